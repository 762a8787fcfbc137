"""Instances of many ranks, each a real process: made, filled with one model's cache, and looked at."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from pdpool_connector import Key, RankStatus, TransferStatus, agree
from pdpool_connector.layout.pairing import pair

from tests.integration.connector_peer import HEAD_BYTES, PAGES, TOKENS, Side, first_row
from tests.integration.handoffs import TIMEOUTS, settle_empty
from tests.integration.ports import KeptPort
from tests.integration.shards import shards_of

HEADS = 4
SOURCE, TARGET = [1, 2, 33], [8, 3, 60]
AUX_FROM, AUX_TO = 4, TARGET[0]


def shape(layers, heads=HEADS, tp=1, cp=1) -> dict:
    return {"layers": layers, "heads": heads, "tp": tp, "cp": cp}


class Instance:
    """All ranks of one instance, started side by side."""

    def __init__(self, role: str, backend: str, ranks: dict, **options) -> None:
        self.role, self.backend = role, backend
        self.shards = shards_of(**ranks)
        base = {"timeouts": TIMEOUTS, "request_deadline_s": 60.0, "checksum_rate": 1.0}
        self.options = {**base, "shape": ranks, **options}
        self.port = KeptPort()
        self.ended: list[Side] = []
        with ThreadPoolExecutor(len(self.shards)) as pool:
            self.ranks = list(pool.map(self.start, range(len(self.shards))))

    def start(self, rank: int) -> Side:
        options = self.options | {"rank": rank}
        if self.role == "prefill":
            where = {"bootstrap_port": self.port.number} if rank == 0 else {"registry": self.bootstrap}
            options |= where
        return Side(self.role, self.backend, **options)

    @property
    def bootstrap(self) -> str:
        return self.port.address

    def kill(self, rank: int) -> Side:
        killed = self.ranks[rank]
        killed.kill()
        self.ended.append(killed)
        return killed

    def restart(self, rank: int) -> None:
        """Start a killed rank again; the registry knows its successor when this returns."""
        self.ranks[rank] = self.start(rank)
        if self.role == "prefill" and rank > 0:
            self.ranks[rank].settle(lambda stats: [link["state"] for link in stats["links"]] == ["registered"])

    def fill(self, seed: int) -> np.ndarray:
        """Fill all ranks with one model's cache, each its shard, and return the whole of it. Replicas hold the same."""
        random = np.random.default_rng(seed)
        total = self.shards[0]
        whole = random.integers(
            1, 256, (total.total_layers, 2, PAGES, TOKENS, total.total_heads, HEAD_BYTES), dtype=np.uint8
        )
        for side, shard in zip(self.ranks, self.shards, strict=True):
            side.cells[:] = _held(whole, shard)
            side.aux[:] = random.integers(1, 256, side.aux.shape, dtype=np.uint8)
        return whole

    def open(self, name: str, room: int, **arguments) -> None:
        for side in self.ranks:
            side.open(name, room, **arguments)

    def send(self, name: str, pages, **arguments) -> None:
        for side in self.ranks:
            side.send(name, pages, **arguments)

    def abort(self, name: str) -> None:
        for side in self.ranks:
            side.abort(name)

    def until(self, name: str, what: str, within_s: float = 30.0) -> list[dict]:
        return [side.until(name, what, within_s) for side in self.ranks]

    def agreed(self, name: str, room: int) -> RankStatus:
        """What the ranks' engines would agree on; the test is their collective."""
        key = Key(room, name)
        return agree([{key: msgspec.convert(side.status(name), TransferStatus)} for side in self.ranks])[key]

    def settle(self, check) -> list[dict]:
        return [side.settle(check) for side in self.ranks]

    def settle_empty(self) -> None:
        settle_empty(*self.ranks)

    def end(self) -> list[int]:
        self.port.close()
        return [side.end() for side in [*self.ranks, *self.ended]]


def _held(whole: np.ndarray, shard) -> np.ndarray:
    return whole[shard.first_layer : shard.layer_end, :, :, :, shard.first_head : shard.head_end]


def open_both(prefill: Instance, decode: Instance, room: int, name: str = "r", pages=TARGET, **more) -> None:
    """Open both halves of one hand-off on all ranks; `more` is what decode offers."""
    prefill.open(name, room)
    pages = list(pages)
    decode.open(name, room, prefill=prefill.bootstrap, pages=pages, aux_slot=first_row(pages), **more)


def hand_over(prefill: Instance, decode: Instance, room: int, name: str, seed: int = 1) -> np.ndarray:
    """One hand-off from all ranks to all ranks, in two sends; returns the model's cache that was handed over."""
    whole = prefill.fill(seed)
    open_both(prefill, decode, room, name)
    prefill.send(name, SOURCE[:2], last=False)
    prefill.send(name, SOURCE[2:], start=2, aux_slot=AUX_FROM)
    decode.until(name, "done")
    prefill.until(name, "done")
    return whole


def check_bytes(prefill: Instance, decode: Instance, whole: np.ndarray) -> None:
    """Each decode rank has its cells, an aux row of the prefill rank that owes it, and no other byte has changed."""
    for side, shard, writers in zip(decode.ranks, decode.shards, pair(prefill.shards, decode.shards), strict=True):
        expected = np.zeros_like(side.cells)
        expected[:, :, TARGET] = _held(whole, shard)[:, :, SOURCE]
        assert np.array_equal(side.cells, expected)
        (aux,) = [writer.rank for writer in writers if writer.aux]
        rows = np.zeros_like(side.aux)
        rows[AUX_TO] = prefill.ranks[aux].aux[AUX_FROM]
        assert np.array_equal(side.aux, rows)
