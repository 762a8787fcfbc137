"""What several targets begin with: names of two processes, and one frame of each kind."""

from collections.abc import Callable
from typing import Any

from pdpool_connector.protocol import frames as f

Fuzzed = Callable[[bytes], None]
"""Takes one input of a target."""
A, B = "a" * 32, "b" * 32


def sample_frames() -> list[f.Frame]:
    """One frame of each kind and a batch, as real connectors send them."""
    attempt = f.AttemptId(A, 1)
    plain: dict[str, Any] = {"version": f.VERSION_MAX, "sender": A}
    head: dict[str, Any] = {**plain, "attempt": attempt, "room": 7}
    opened = f.Open(**head, request_id="r", prompt=b"one", deadline_s=30.0)
    offer = f.Offer(**head, pages=bytes(range(16)), prefix_pages=0, aux_slot=3, state=(b"\1\0\0\0", b""))
    frames: list[f.Frame] = [
        f.Hello(**plain, oldest_version=f.VERSION_MIN, address="h:1", memory=b"m", state=True),
        f.HelloOk(**plain, memory=b"m"),
        f.HelloRefused(**plain, reason="no", retry=True),
        f.Goodbye(**plain, reason="bye"),
        opened,
        offer,
        f.Accepted(**head, offered=True),
        f.Ended(**head, cause="", settled=True, bytes_moved=4096, checksum=7),
        f.Ended(**head, cause="aborted", settled=False, message="client left"),
        f.Ack(**head),
        f.Abort(**head, cause="aborted", message="client left", request_id="r", prompt=b"one"),
        f.Query(**head),
    ]
    return [*frames, *f.batches([opened, offer, f.Query(**head)])]
