"""Entrypoint of the router image: sglang-router in PD mode, with the last worker list of the operator.

It reads the worker list from the mounted ConfigMap and the control-plane key from the mounted Secret. Then it runs the
router. From then on the operator maintains the router's list. The file matters only at the start, so that a router
serves at once even without the operator.

On its command line the router accepts keys only as an argument, which every process of the node's user can read. So
this script calls the router's Python API instead. The key is neither an argument nor in the environment, and it is
never printed. Arguments of this script are appended, and override those given here.
"""

import json
import os
import sys
from pathlib import Path

from sglang_router.launch_router import launch_router, parse_router_args

WORKERS = "/etc/pdpool/workers.json"
KEY = "/etc/pdpool-keys/router.key"
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


def arguments(workers: dict[str, list[dict[str, object]]]) -> list[str]:
    """Return the router's arguments without the key.

    `workers` is {"prefill": [{"url", "bootstrap_port"}], "decode": [{"url"}]}. Either list may be empty.
    """
    line = ["--pd-disaggregation", "--host", ANY_ADDRESS]
    line += ["--port", str(PORT), "--prometheus-host", ANY_ADDRESS, "--prometheus-port", str(METRICS_PORT), *FLAGS]
    for worker in workers.get("prefill", []):
        line += ["--prefill", str(worker["url"]), str(worker["bootstrap_port"])]
    for worker in workers.get("decode", []):
        line += ["--decode", str(worker["url"])]
    return line


def read_key(path: Path) -> str:
    """Return the key. Exit if there is none."""
    try:
        key = path.read_text().strip()
    except OSError as error:
        sys.exit(f"PDPOOL_ROUTER_KEY_FILE {path} cannot be read: {error.strerror}")
    if not key:
        sys.exit(f"PDPOOL_ROUTER_KEY_FILE {path} is empty: without a key any client could change the router's workers")
    return key


def main() -> None:
    """Read the inputs and run the router until SIGTERM."""
    key = read_key(Path(os.environ.get("PDPOOL_ROUTER_KEY_FILE", KEY)))
    path = Path(os.environ.get("PDPOOL_ROUTER_WORKERS", WORKERS))
    workers = json.loads(path.read_text()) if path.exists() else {}
    sys.stderr.write(
        f"router starts with {len(workers.get('prefill', []))} prefill, {len(workers.get('decode', []))} decode\n"
    )
    # Otherwise the router asks a public model hub for the tokenizer of each model, which it does not need in this mode.
    os.environ.setdefault("HF_ENDPOINT", NOWHERE)
    router = parse_router_args([*arguments(workers), *sys.argv[1:]])
    router.control_plane_api_keys = [(KEY_ID, KEY_ID, key, "admin")]
    launch_router(router)


if __name__ == "__main__":
    main()
