"""Entrypoint of the router image: sglang-router in PD mode over the workers that the operator last knew.

Reads the worker list from the mounted ConfigMap and the control-plane key from the environment, then becomes the
router. From then on the operator keeps the router's list; the file matters only when a router starts, so that it serves
at once even while the operator is away. The router takes keys by argument only: the key shows in /proc of this
container and nowhere else, and is never printed. Arguments of this script are handed on, and win over those given here.
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
"""The engines' bound (a test compares): what they would refuse is refused here, and not sent to pair after pair."""

FLAGS = (
    # Round robin on both sides would form fixed pairs; power_of_two does not start with fewer than two workers.
    *("--policy", "round_robin", "--decode-policy", "random"),
    # A worker that hangs is out after 10 s, one that drains after 2. One that is merely short of CPU may take seconds
    # to answer: were it taken out, a pool under load could lose all of its workers at once.
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--health-check-timeout-secs", "3", "--health-check-endpoint", "/health"),
    # The breaker blames both halves of a pair for what one did, so that one dead decode would shut out all of prefill
    # for 60 s. Health checks and the operator's list take dead workers out.
    "--disable-circuit-breaker",
    *("--max-payload-size", str(MAX_BODY_BYTES)),
    # Registration of a dead worker holds up others for most of this time.
    *("--worker-startup-timeout-secs", "10", "--worker-startup-check-interval", "1"),
    # The time of a whole stream; above the longest.
    *("--request-timeout-secs", "14400"),
    *("--shutdown-grace-period-secs", "180"),
    *("--log-level", "warn"),
)


def command(workers: dict[str, list[dict[str, object]]], key: str) -> list[str]:
    """The router's command line.

    `workers`: {"prefill": [{"url", "bootstrap_port"}], "decode": [{"url"}]}; either may be empty.
    """
    line = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", ANY_ADDRESS]
    line += ["--port", str(PORT), "--prometheus-host", ANY_ADDRESS, "--prometheus-port", str(METRICS_PORT), *FLAGS]
    for worker in workers.get("prefill", []):
        line += ["--prefill", str(worker["url"]), str(worker["bootstrap_port"])]
    for worker in workers.get("decode", []):
        line += ["--decode", str(worker["url"])]
    return [*line, "--control-plane-api-keys", f"{KEY_ID}:{KEY_ID}:admin:{key}"]


def main() -> None:
    """Read what there is and become the router."""
    key = os.environ.pop("PDPOOL_ROUTER_KEY", "")
    if not key:
        sys.exit("PDPOOL_ROUTER_KEY is not set: without a key anybody could change the router's workers")
    path = Path(os.environ.get("PDPOOL_ROUTER_WORKERS", WORKERS))
    workers = json.loads(path.read_text()) if path.exists() else {}
    sys.stderr.write(
        f"router starts with {len(workers.get('prefill', []))} prefill, {len(workers.get('decode', []))} decode\n"
    )
    # It would ask a public model hub for the tokenizer of each model that an engine names, and needs none in this mode.
    os.environ.setdefault("HF_ENDPOINT", NOWHERE)
    os.execv(sys.executable, [*command(workers, key), *sys.argv[1:]])  # noqa: S606 - our own interpreter


if __name__ == "__main__":
    main()
