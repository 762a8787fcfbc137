"""A scheduler's calls in exactly the order recorded from SGLang 0.5.23."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from pdpool_connector import DecodeConnector, PrefillConnector
from pdpool_connector.protocol.timeouts import Timeouts

from dev import inside
from tests.integration.sglang_calls import (
    ABORT_IN_DECODE,
    ABORT_IN_PREFILL,
    ABORTED,
    LONG,
    LONG_HIT,
    SHORT,
    Call,
)
from tests.integration.sglang_order import (
    BOOTSTRAPPING,
    CLEARED,
    FAILED,
    SUCCESS,
    WAITING_FOR_INPUT,
    Receiver,
    Sender,
    TransferError,
)
from tests.integration.small_side import Side
from tests.waiting import until


@pytest.fixture
def pair():
    timeouts = Timeouts(result_s=1.0, acked_s=0.5)  # ends are remembered for so long
    prefill, decode = (Side(kind, pages=128, timeouts=timeouts) for kind in (PrefillConnector, DecodeConnector))
    noise = np.random.default_rng(3)
    prefill.cache[:] = noise.integers(1, 256, prefill.cache.shape, dtype=np.uint8)
    prefill.aux[:] = noise.integers(1, 256, prefill.aux.shape, dtype=np.uint8)
    yield prefill, decode
    for side in (prefill, decode):
        side.close()


@pytest.fixture
def receiver(pair):
    return lambda room: Receiver(pair[1].connector, pair[0].connector.bootstrap_address, room)


def polled(side: Sender | Receiver, code: int) -> list[int]:
    """Poll as a scheduler does, in every turn of its loop, until `code` comes; the results, without repetitions."""
    said = [side.poll()]
    deadline = time.monotonic() + 20
    while said[-1] != code:
        assert time.monotonic() < deadline, f"never {code}: {said}"
        if (now := side.poll()) != said[-1]:
            said.append(now)
    return said


def until_bare(*sides: Side) -> None:
    """No table has anything of any hand-off, a remembered end included."""
    for side in sides:
        connector = side.connector
        until(lambda connector=connector: inside.rows(connector) == 0)
        until(lambda connector=connector: not any(queue.reqs for queue in connector.stats().attempts.values()))
        stats = connector.stats()
        assert (stats.holds, stats.faults, inside.kept(connector)) == (0, 0, 0)


class Replay:
    """Makes the calls of a record on our connectors, and compares what they return with what was recorded."""

    def __init__(self, pair: tuple[Side, Side]) -> None:
        self._prefill, self._decode = pair
        self._objects: dict[str, Sender | Receiver] = {}
        self._may_say = {"P": {BOOTSTRAPPING}, "D": {BOOTSTRAPPING}}
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.aux_slot = 0

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            match call.name:
                case "Sender":
                    self._objects["P"] = Sender(self._prefill.connector, **call.arguments)
                case "Receiver":
                    where = self._prefill.connector.bootstrap_address
                    self._objects["D"] = Receiver(self._decode.connector, where, **call.arguments)
                case "metadata":
                    until(lambda: self._prefill.connector.stats().attempts["parked"].reqs == 1)
                case "poll":
                    self._poll(call)
                case "failure_exception":
                    assert call.returned == ABORTED
                    with pytest.raises(TransferError, match=r"^aborted: the client left$"):
                        self._objects[call.side].failure_exception()
                case "is_abort_release_safe":
                    until(self._objects["D"].is_abort_release_safe)
                case "get_transfer_metric":
                    memory = self._prefill.memory
                    moved = call.returned * memory.page_bytes + memory.aux_bytes
                    assert self._objects["P"].get_transfer_metric() == moved
                case _:
                    assert self._call(call) == call.returned, call

    def _call(self, call: Call):
        arguments = dict(call.arguments)
        if (pages := arguments.get("kv_indices")) is not None:
            arguments["kv_indices"] = list(pages)
            (self.sources if call.side == "P" else self.targets).extend(pages)
        self.aux_slot = arguments.get("aux_index", self.aux_slot)
        return getattr(self._objects[call.side], call.name)(**arguments)

    def _poll(self, call: Call) -> None:
        side, may_say = self._objects[call.side], self._may_say[call.side]
        may_say.add(call.returned)
        if call.passing:
            said = [side.poll() for _ in range(call.times)]
            assert set(said) <= may_say | {call.returned + 1}, f"{said} instead of {call}"
            return
        said = polled(side, call.returned)
        assert set(said) <= may_say, f"{said} instead of {call}"
        assert {side.poll() for _ in range(call.times - 1)} <= {call.returned}, call
        self._may_say[call.side] = {call.returned}


@pytest.mark.parametrize(
    "records", [[SHORT], [LONG], [LONG_HIT], [LONG, LONG_HIT]], ids=["short", "long", "hit", "long_then_hit"]
)
def test_recorded_calls_hand_the_cache_over(pair, records):
    prefill, decode = pair
    for calls in records:
        decode.cache[:] = decode.aux[:] = 0
        replay = Replay(pair)
        replay.run(calls)
        assert (decode.cache[:, replay.targets] == prefill.cache[:, replay.sources]).all()
        assert (decode.aux[replay.aux_slot] == prefill.aux[replay.aux_slot]).all()
        assert not np.delete(decode.cache, replay.targets, axis=1).any()
        assert not np.delete(decode.aux, replay.aux_slot, axis=0).any()
    until_bare(prefill, decode)


@pytest.mark.parametrize("calls", [ABORT_IN_DECODE, ABORT_IN_PREFILL], ids=["decode", "prefill"])
def test_recorded_abort_frees_the_room(pair, receiver, calls):
    prefill, decode = pair
    Replay(pair).run(calls)
    until_bare(prefill, decode)
    room = calls[0].arguments["room"]
    taker, sender = receiver(room), Sender(prefill.connector, room)
    taker.init(prefill_dp_rank=0)
    taker.send_metadata([80], aux_index=4, state_indices=[], decode_prefix_len=0)
    assert polled(sender, WAITING_FOR_INPUT) in ([BOOTSTRAPPING, WAITING_FOR_INPUT], [WAITING_FOR_INPUT])
    sender.init(num_kv_indices=1, aux_index=4)
    sender.send([3], state_indices=[], num_kv_tokens=16)
    assert FAILED not in polled(sender, SUCCESS) + polled(taker, SUCCESS)
    assert (decode.cache[:, 80] == prefill.cache[:, 3]).all()
    until_bare(prefill, decode)


def test_prefix_held_by_decode_is_counted_in_tokens(pair, receiver):
    """SGLang gives 144 tokens for the nine pages that its radix cache has."""
    prefill, decode = pair
    decode.cache[:, 10:19] = 5
    taker = receiver(99)
    taker.init(prefill_dp_rank=0)
    taker.send_metadata([20, 21], aux_index=0, state_indices=[], decode_prefix_len=144)
    sender = Sender(prefill.connector, 99)
    polled(sender, WAITING_FOR_INPUT)
    assert sender.pop_decode_prefix_len() == 144
    assert sender.transfer.status.prefix_pages == 9
    sender.init(num_kv_indices=2, aux_index=0)
    sender.send([9], state_indices=None, num_kv_tokens=16)
    sender.send([10], state_indices=[], num_kv_tokens=1)
    polled(sender, SUCCESS)
    assert sender.get_transfer_metric() == 2 * prefill.memory.page_bytes + prefill.memory.aux_bytes
    polled(taker, SUCCESS)
    assert (decode.cache[:, 20:22] == prefill.cache[:, 9:11]).all()
    assert (decode.cache[:, 10:19] == 5).all()


def test_abort_at_decode_fails_the_sender(pair, receiver):
    prefill, decode = pair
    taker = receiver(7998)
    taker.init(prefill_dp_rank=0)
    taker.send_metadata([80, 81, 82], aux_index=4, state_indices=[], decode_prefix_len=0)
    sender = Sender(prefill.connector, 7998)
    polled(sender, WAITING_FOR_INPUT)
    taker.abort()
    polled(taker, FAILED)
    with pytest.raises(TransferError, match="aborted: the client left"):
        taker.failure_exception()
    until(taker.is_abort_release_safe)
    taker.clear()
    polled(sender, FAILED)
    for _ in range(2):
        with pytest.raises(TransferError, match="peer_aborted: the client left"):
            sender.failure_exception()
    assert sender.get_transfer_metric() == 0
    until_bare(prefill, decode)


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("moment", ["made", "matched", "half sent", "ended"])
def test_clear_ends_only_its_own_request(pair, receiver, moment, who):
    prefill, decode = pair
    other_sender, other_taker = Sender(prefill.connector, 2), receiver(2)
    sender, taker = Sender(prefill.connector, 1), receiver(1)
    if moment != "made":
        taker.init(prefill_dp_rank=0)
        taker.send_metadata([40, 41], aux_index=1, state_indices=[], decode_prefix_len=0)
        polled(sender, WAITING_FOR_INPUT)
        sender.init(num_kv_indices=2, aux_index=1)
    if moment in ("half sent", "ended"):
        sender.send([3], state_indices=None, num_kv_tokens=16)
    if moment == "ended":
        sender.send([4], state_indices=[], num_kv_tokens=16)
        polled(sender, SUCCESS)
        polled(taker, SUCCESS)
    first, second = (sender, taker) if who == "sender" else (taker, sender)
    for _ in range(2):
        first.clear()
    if moment != "ended":
        polled(first, FAILED)
        polled(second, FAILED)
        with pytest.raises(TransferError, match=f"peer_aborted: {CLEARED}"):
            second.failure_exception()
    for _ in range(2):
        second.clear()
    other_taker.send_metadata([50], aux_index=2, state_indices=[], decode_prefix_len=0)
    polled(other_sender, WAITING_FOR_INPUT)
    other_sender.init(num_kv_indices=1, aux_index=2)
    other_sender.send([5], state_indices=[], num_kv_tokens=16)
    polled(other_sender, SUCCESS)
    polled(other_taker, SUCCESS)
    assert (decode.cache[:, 50] == prefill.cache[:, 5]).all()
    page, row = prefill.memory.page_bytes, prefill.memory.aux_bytes
    moved = {"ended": {2 * page + row}, "half sent": {0, page}}.get(moment, {0})
    assert sender.get_transfer_metric() in moved
    assert sender.poll() == taker.poll() == (SUCCESS if moment == "ended" else FAILED)
    until_bare(prefill, decode)
