"""A scheduler's calls in exactly the order recorded from SGLang 0.5.23, and the same hand-off in an asyncio program."""

import asyncio
import time

import numpy as np
import pytest
from pdpool_connector import DecodeConnector, Phase, PrefillConnector

from tests.integration.sglang_order import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    WAITING_FOR_INPUT,
    Receiver,
    Sender,
    TransferError,
)
from tests.integration.small_side import Side, until


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


@pytest.fixture
def pair():
    prefill, decode = Side(PrefillConnector, pages=128), Side(DecodeConnector, pages=128)
    yield prefill, decode
    for side in (prefill, decode):
        side.close()


@pytest.fixture
def receiver(pair):
    return lambda room: Receiver(pair[1].connector, pair[0].connector.bootstrap_address, room)


def polled(side: Sender | Receiver, code: int) -> list[int]:
    """Poll as a scheduler does, in every turn of its loop, until it says `code`; what it said, without repetitions."""
    said = [side.poll()]
    deadline = time.monotonic() + 20
    while said[-1] != code:
        assert time.monotonic() < deadline, f"never {code}: {said}"
        if (now := side.poll()) != said[-1]:
            said.append(now)
    return said


def test_short_the_request_reaches_prefill_first(pair, receiver):
    prefill, decode = pair
    prefill.cache[:, 3] = 77
    sender = Sender(prefill.connector, 5343)
    assert sender.poll() == BOOTSTRAPPING
    taker = receiver(5343)
    assert taker.poll() == BOOTSTRAPPING
    taker.init(prefill_dp_rank=0)
    taker.send_metadata(ids(2), aux_index=1, decode_prefix_len=0)
    # Decode may have come before the first of these polls.
    assert set(polled(sender, WAITING_FOR_INPUT)) <= {BOOTSTRAPPING, WAITING_FOR_INPUT}
    assert sender.pop_decode_prefix_len() == 0
    sender.init(num_kv_indices=1, aux_index=1)
    assert sender.should_send_kv_chunk(1, last_chunk=True)
    sender.send(ids(3), state_indices=[])
    polled(sender, SUCCESS)
    sender.clear()
    assert sender.get_transfer_metric() == prefill.memory.page_bytes + prefill.memory.aux.item_bytes
    polled(taker, SUCCESS)
    taker.clear()
    assert (decode.cache[:, 2] == 77).all()


def test_long_in_chunks_with_metadata_before_the_sender_exists(pair, receiver):
    prefill, decode = pair
    taker = receiver(2124)
    taker.init(prefill_dp_rank=0)
    taker.send_metadata(ids(*range(42, 80)), aux_index=3, decode_prefix_len=0)
    for _ in range(3000):
        assert taker.poll() == WAITING_FOR_INPUT
    sender = Sender(prefill.connector, 2124)
    polled(sender, WAITING_FOR_INPUT)
    sender.init(num_kv_indices=38, aux_index=3)
    for first, count in ((0, 8), (8, 8), (16, 8), (24, 8), (32, 6)):
        prefill.cache[:, first : first + count] = first + 1
        sender.send(ids(*range(first, first + count)), state_indices=[] if first == 32 else None)
        sender.poll()
    polled(sender, SUCCESS)
    polled(taker, SUCCESS)
    for first in (0, 8, 16, 24, 32):
        assert (decode.cache[:, 42 + first] == first + 1).all()
    for side in (sender, taker, sender, taker):
        side.clear()
    assert sender.get_transfer_metric() > 0


def test_prefix_that_decode_holds_is_told_and_not_sent_again(pair, receiver):
    prefill, decode = pair
    decode.cache[:, 10:16] = 5
    taker = receiver(99)
    taker.send_metadata(ids(20, 21), aux_index=0, decode_prefix_len=6)
    sender = Sender(prefill.connector, 99)
    polled(sender, WAITING_FOR_INPUT)
    assert sender.pop_decode_prefix_len() == 6
    sender.init(num_kv_indices=8, aux_index=0)
    prefill.cache[:, :8] = 9
    sender.send(ids(*range(7)), state_indices=None)
    sender.send(ids(7), state_indices=[])
    polled(taker, SUCCESS)
    assert (decode.cache[:, 20:22] == 9).all()
    assert sender.get_transfer_metric() in (0, 2 * prefill.memory.page_bytes + prefill.memory.aux.item_bytes)


def test_decode_aborts_while_it_waits(pair, receiver):
    prefill, _ = pair
    taker = receiver(7998)
    taker.init(prefill_dp_rank=0)
    taker.send_metadata(ids(80, 81, 82), aux_index=4, decode_prefix_len=0)
    sender = Sender(prefill.connector, 7998)
    polled(sender, WAITING_FOR_INPUT)
    taker.abort()
    polled(taker, FAILED)
    with pytest.raises(TransferError, match="aborted: the client left"):
        taker.failure_exception()
    until(taker.is_abort_release_safe)
    taker.clear()
    polled(sender, FAILED)
    with pytest.raises(TransferError, match="peer_aborted: the client left"):
        sender.failure_exception()


def test_prefill_aborts_while_it_waits_and_the_room_serves_the_next_request(pair, receiver):
    prefill, _ = pair
    sender = Sender(prefill.connector, 6266)
    assert sender.poll() == BOOTSTRAPPING
    sender.abort()
    polled(sender, FAILED)
    for _ in range(2):
        with pytest.raises(TransferError, match="aborted: the client left"):
            sender.failure_exception()
    sender.clear()
    assert sender.get_transfer_metric() == 0
    again = Sender(prefill.connector, 6267)
    assert again.poll() == BOOTSTRAPPING


async def test_an_asyncio_program_waits_for_the_end_and_for_the_pages(pair):
    prefill, decode = pair
    prefill.cache[:, 1] = 8
    sent = prefill.connector.open(1, "a")
    got = decode.connector.open(prefill.connector.bootstrap_address, 1, "a", pages=ids(4), aux_slot=0)
    sent.send(ids(1), start=0, last=True)
    async with asyncio.timeout(20):
        statuses = await asyncio.gather(sent.wait_ended(), got.wait_ended(), sent.wait_released(), got.wait_released())
    assert {status.phase for status in statuses} == {Phase.DONE}
    assert (decode.cache[:, 4] == 8).all()
    assert (await got.wait_ended()).phase is Phase.DONE, "asked again it answers at once"


async def test_a_wait_that_is_cancelled_gives_nothing_up(pair):
    prefill, _ = pair
    sent = prefill.connector.open(1, "a")
    waiting = asyncio.create_task(sent.wait_ended())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sent.status.phase is Phase.WAITING
