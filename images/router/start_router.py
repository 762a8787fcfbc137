"""Entrypoint of the router image: sglang-router in PD mode, with the last worker list of the operator.

It reads the worker list from the mounted ConfigMap and the control-plane key from the environment. Then it becomes the
router. From then on the operator maintains the router's list. The file matters only at the start, so that a router
serves at once even without the operator.

The router accepts keys only as an argument. So the key is visible in /proc of this container, but nowhere else, and it
is never printed. Arguments of this script are appended, and override those given here.
"""

import json
import os
import sys
from pathlib import Path

WORKERS = "/etc/pdpool/workers.json"
PORT = 8000
METRICS_PORT = 29000
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - a pod serves other pods
KEY_ID = "operator"
NOWHERE = "http://127.0.0.1:9"

MAX_BODY_BYTES = 16 << 20
"""The limit of the engines (a test compares the two). Without it, a router sends larger requests to pair after pair."""

FLAGS = (
    # Round robin on both sides would form fixed pairs. power_of_two does not start with fewer than two workers.
    *("--policy", "round_robin", "--decode-policy", "random"),
    # A worker that hangs is removed after 10 s, a draining one after 2 s. A worker that lacks CPU may take seconds to
    # answer. If it were removed, a pool under load could lose all of its workers at once.
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--health-check-timeout-secs", "3", "--health-check-endpoint", "/health"),
    # The breaker counts an error against both halves of a pair. One dead decode engine would exclude all prefill
    # engines for 60 s. Health checks and the operator's list remove dead workers instead.
    "--disable-circuit-breaker",
    *("--max-payload-size", str(MAX_BODY_BYTES)),
    # The registration of a dead worker blocks others for most of this time.
    *("--worker-startup-timeout-secs", "10", "--worker-startup-check-interval", "1"),
    # Duration of a whole stream. It is above the longest.
    *("--request-timeout-secs", "14400"),
    *("--shutdown-grace-period-secs", "180"),
    *("--log-level", "warn"),
)


def command(workers: dict[str, list[dict[str, object]]], key: str) -> list[str]:
    """Return the router's command line.

    `workers` is {"prefill": [{"url", "bootstrap_port"}], "decode": [{"url"}]}. Either list may be empty.
    """
    line = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", ANY_ADDRESS]
    line += ["--port", str(PORT), "--prometheus-host", ANY_ADDRESS, "--prometheus-port", str(METRICS_PORT), *FLAGS]
    for worker in workers.get("prefill", []):
        line += ["--prefill", str(worker["url"]), str(worker["bootstrap_port"])]
    for worker in workers.get("decode", []):
        line += ["--decode", str(worker["url"])]
    return [*line, "--control-plane-api-keys", f"{KEY_ID}:{KEY_ID}:admin:{key}"]


def main() -> None:
    """Read the inputs and become the router."""
    key = os.environ.pop("PDPOOL_ROUTER_KEY", "")
    if not key:
        sys.exit("PDPOOL_ROUTER_KEY is not set: without a key any client could change the router's workers")
    path = Path(os.environ.get("PDPOOL_ROUTER_WORKERS", WORKERS))
    workers = json.loads(path.read_text()) if path.exists() else {}
    sys.stderr.write(
        f"router starts with {len(workers.get('prefill', []))} prefill, {len(workers.get('decode', []))} decode\n"
    )
    # Otherwise the router asks a public model hub for the tokenizer of each model, which it does not need in this mode.
    os.environ.setdefault("HF_ENDPOINT", NOWHERE)
    os.execv(sys.executable, [*command(workers, key), *sys.argv[1:]])  # noqa: S606 - our own interpreter


if __name__ == "__main__":
    main()
