"""Connectors whose memory has state, with one another and with a peer of the version before cut state was known."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from pdpool_connector import (
    Cause,
    ConnectorConfig,
    DecodeConnector,
    HostArena,
    KVMemory,
    Phase,
    PrefillConnector,
    StateCut,
)
from pdpool_connector.layout.memory import RemoteMemory
from pdpool_connector.protocol import frames
from pdpool_connector.protocol.status import TransferStatus
from pdpool_connector.runtime import decode as decode_module
from pdpool_connector.runtime.peer_table import mismatch

CUT = {"state_cuts": (StateCut(1, (4,)),), "state_ranks": 1}
PAGES, ITEM = np.array([3], np.int32), np.array([1], np.int32)


class Both:
    """A prefill and a decode of this process over shared memory."""

    def __init__(self, cut: dict) -> None:
        self.arenas = [HostArena(2 * 8 * 256 + 4 * 64 + 4 * 32) for _ in (0, 1)]
        memories = [
            KVMemory(
                kv=(arena.region(0, 256, 8), arena.region(8 * 256, 256, 8)),
                aux=arena.region(2 * 8 * 256, 64, 4),
                state=(arena.region(2 * 8 * 256 + 4 * 64, 32, 4),),
                page_tokens=16,
                layers=1,
                kv_heads=1,
                head_dim=4,
                dtype="float32",
                model="m",
                **cut,
            )
            for arena in self.arenas
        ]
        config = ConnectorConfig("127.0.0.1")
        self.prefill = PrefillConnector(config, memories[0], lambda: None)
        self.decode = DecodeConnector(config, memories[1], lambda: None)
        self.prefill.start()
        self.decode.start()

    def state(self, side: int) -> np.ndarray:
        return self.arenas[side].array(2 * 8 * 256 + 4 * 64, (4, 32), np.uint8)

    def hand_over(self) -> TransferStatus:
        self.state(0)[ITEM] = 7
        got = self.decode.open(self.prefill.bootstrap_address, 1, "r", pages=PAGES, aux_slot=0, state=ITEM)
        sent = self.prefill.open(1, "r")
        sent.send(PAGES, start=0, last=True, aux_slot=0, state=ITEM)
        deadline = time.monotonic() + 60
        while not (got.status.ended and got.status.releasable):
            assert time.monotonic() < deadline, got.status
            time.sleep(0.002)
        sent.abort()
        return got.status

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def both() -> Iterator[Callable[[dict], Both]]:
    made: list[Both] = []

    def make(cut: dict) -> Both:
        made.append(Both(cut))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def older(monkeypatch) -> None:
    """Each tells the other that it speaks version 3 at most."""
    monkeypatch.setattr(frames, "VERSION_MAX", 3)


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_state_arrives(both, cut: dict) -> None:
    pair = both(cut)
    assert pair.hand_over().phase is Phase.DONE
    assert (pair.state(1)[ITEM] == 7).all()
    assert pair.state(1).sum() == 7 * 32


@pytest.mark.usefixtures("older")
def test_state_that_moves_whole_still_does_with_a_peer_of_version_3(both) -> None:
    pair = both({})
    assert pair.hand_over().phase is Phase.DONE
    assert pair.state(1).sum() == 7 * 32


@pytest.mark.usefixtures("older")
def test_decode_does_not_ask_a_prefill_of_version_3_for_a_share_of_state(both) -> None:
    pair = both(CUT)
    status = pair.hand_over()
    assert (status.phase, status.cause) == (Phase.FAILED, Cause.INVALID)
    assert "rank 0 of prefill cannot be spoken to: protocol version is 1..3 at the peer" in status.message
    assert "state that is cut over tensor ranks needs version 4" in status.message


@pytest.mark.usefixtures("older")
def test_prefill_refuses_a_decode_of_version_3_a_share_of_state(both, monkeypatch) -> None:
    monkeypatch.setattr(decode_module, "_refuse_whole_state", lambda _ranks: None)
    status = both(CUT).hand_over()
    assert (status.phase, status.cause) == (Phase.FAILED, Cause.INVALID)
    assert "refused to pair: protocol version is 1..3 at the peer: state that is cut" in status.message


def test_a_stage_without_state_is_not_paired_with_one_that_has_some() -> None:
    with HostArena(4 * 8 * 256 + 4 * 64 + 4 * 32) as arena:
        aux, state = arena.region(4 * 8 * 256, 64, 4), arena.region(4 * 8 * 256 + 4 * 64, 32, 4)
        model = {"page_tokens": 16, "kv_heads": 1, "head_dim": 4, "dtype": "float32", "model": "m", "total_layers": 2}
        kv = [arena.region(index * 8 * 256, 256, 8) for index in range(4)]
        whole = KVMemory(kv=tuple(kv), aux=aux, layers=2, state=(state,), state_layers=(0,), **model)
        second = KVMemory(kv=tuple(kv[:2]), aux=aux, layers=1, first_layer=1, **model)
        assert mismatch("local", second, RemoteMemory(backend="local", memory=whole, descriptor=b"")) == (
            "prefill will not pair, in its own words: state has 0 regions at prefill and 1 at decode, must have some "
            "on both sides or on neither"
        )
