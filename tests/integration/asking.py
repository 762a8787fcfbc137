"""What tests ask engine processes, whose schedulers may be busy or frozen."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

web = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""One for all, with a connection for each request: `httpx.get` would read the CAs of the world each time, for 24 ms."""
ANSWER_S = 30.0
SILENT_S = 60.0
PATIENT_ROUTER = ("--health-check-timeout-secs", "30")
"""Three seconds, as the demo has it, may be too few for an engine beside much other work: it would get no requests."""


def get_json(url: str) -> dict[str, Any]:
    """Body of a GET, an object."""
    answer = web.get(url, timeout=ANSWER_S)
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def load_of(url: str) -> dict[str, Any]:
    """What an engine's scheduler says of itself; asked again while a long step, or another process, holds it up."""
    deadline = time.monotonic() + SILENT_S
    while True:
        answer = web.get(f"{url}/v1/loads?include=all", timeout=ANSWER_S)
        if answer.status_code == 200:
            load: dict[str, Any] = answer.json()["loads"][0]
            return load
        assert answer.json()["error"]["code"] == "scheduler_silent", answer.text
        assert time.monotonic() < deadline, f"the scheduler of {url} does not answer"


@contextmanager
def admin_socket() -> Iterator[Path]:
    """Where an engine may listen. A Unix socket's path must be short; pytest's own directories are not."""
    with tempfile.TemporaryDirectory(prefix="pdpool-") as directory:
        yield Path(directory) / "admin.sock"


def drain_state(socket: Path) -> dict[str, Any]:
    """The state of the drain behind this admin socket, begun or not; the engine's scheduler may be frozen."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket), verify=False), timeout=ANSWER_S) as admin:
        state: dict[str, Any] = admin.get("http://engine/drain").json()
        return state


def open_sequences(url: str) -> int:
    """How many sequences an engine has taken and not ended; its scheduler may be frozen."""
    count: int = get_json(f"{url}/server_info")["open_sequences"]
    return count
