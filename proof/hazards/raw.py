"""A decode that speaks the protocol and obeys none of its rules."""

import secrets
from typing import Any, Self

import numpy as np
import zmq
from pdpool_connector import HostArena, KVMemory
from pdpool_connector.backends import open_backend
from pdpool_connector.layout.memory import RemoteMemory, encode_remote
from pdpool_connector.protocol import frames as f

from proof.hazards.stage import CANARY, Stage

ANSWER_MS = 15_000


class RawDecode:
    """Pairs with the standing prefill by a real engine in this process, and then says whatever it is told to."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.incarnation = secrets.token_hex(16)
        facts = stage.prefill.facts["part"]
        regions, pages, item = stage.prefill.pages.shape
        rows, row_bytes = stage.prefill.aux.shape
        self._backend = open_backend(stage.backend, self.incarnation, target=True)
        self._arena = HostArena(regions * pages * item + rows * row_bytes)
        self._view = self._arena.array(0, self._arena.nbytes, np.uint8)
        self._view[:] = CANARY
        self._memory = KVMemory(
            kv=tuple(self._arena.region(index * pages * item, item, pages) for index in range(regions)),
            aux=(self._arena.region(regions * pages * item, row_bytes, rows),),
            page_tokens=16,
            head_dim=4,
            dtype="float32",
            model="m",
            **facts,
        )
        self._numbers = iter(range(1, 1 << 30))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)

    def __enter__(self) -> Self:
        descriptor = self._backend.register(self._memory)
        remote = RemoteMemory(backend=self._backend.name, memory=self._memory, descriptor=descriptor)
        self._socket.connect(f"tcp://{self._stage.prefill.control}")
        hello = f.Hello(
            version=f.VERSION_MAX,
            oldest_version=f.VERSION_MIN,
            sender=self.incarnation,
            address="127.0.0.1:1",
            memory=encode_remote(remote),
        )
        self._socket.send(f.encode(hello))
        answer = self._hear()
        assert isinstance(answer, f.HelloOk), answer
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.send(f.encode(f.Goodbye(version=f.VERSION_MAX, sender=self.incarnation, reason="over")))
        self._socket.close(1000)
        self._context.term()
        self._backend.close()

    def say(self, kind: Any, decode: str, room: int, *, sender: str = "", **fields: object) -> None:  # noqa: ANN401
        """Send a frame about attempt 1 of `decode`, in the name of `sender` (our own by default)."""
        frame = kind(
            version=f.VERSION_MAX,
            sender=sender or self.incarnation,
            attempt=f.AttemptId(decode, 1),
            room=room,
            sibling=0,
            **fields,
        )
        self._socket.send(f.encode(frame))

    def open(self, request_id: str, room: int, pages: list[int], aux_slot: int) -> f.AnyFrame:
        """Offer pages; the frame that ends the attempt."""
        offer = f.Open(
            version=f.VERSION_MAX,
            sender=self.incarnation,
            attempt=f.AttemptId(self.incarnation, next(self._numbers)),
            room=room,
            sibling=0,
            request_id=request_id,
            pages=np.array(pages, "<i4").tobytes(),
            prefix_pages=0,
            aux_slot=aux_slot,
            deadline_s=10.0,
        )
        self._socket.send(f.encode(offer))
        while not isinstance(answer := self._hear(), f.Done | f.Drained):
            pass
        acknowledged = f.Ack(
            version=answer.version, sender=self.incarnation, attempt=offer.attempt, room=room, sibling=0
        )
        self._socket.send(f.encode(acknowledged))
        return answer

    def intact(self) -> bool:
        """Whether no byte of our memory has changed."""
        return bool((self._view == CANARY).all())

    def _hear(self) -> f.AnyFrame:
        assert self._socket.poll(ANSWER_MS), "prefill does not answer"
        return f.decode(self._socket.recv())


def refused_by_api(stage: Stage) -> int:
    """Calls with indices outside the memory: each must be refused before anything is sent. How many were tried."""
    calls = 0
    for pages, aux_slot in (([10**6], 0), ([-1], 0), ([1], 10**6), ([1], -1)):
        where = {"prefill": stage.prefill.bootstrap, "pages": pages, "aux_slot": aux_slot}
        try:
            stage.decode.open(stage.name(), stage.room(), **where)
        except AssertionError as error:
            calls += "ValueError" in str(error)
    assert calls == 4, f"open() took {4 - calls} of 4 calls with indices outside the memory"
    return calls
