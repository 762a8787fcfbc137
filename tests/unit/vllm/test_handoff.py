"""Scheduler and worker of both sides over real connectors, called in vLLM's order."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector, Timeouts
from pdpool_vllm.scheduler import DecodeScheduler, PrefillScheduler
from pdpool_vllm.worker import DecodeWorker, PrefillWorker

BLOCK, BLOCKS, HEADS, CONTENT = 4, 16, 2, 8
WAIT_S = 20.0


class Engine:
    """One side: its cache, its scheduler's side, and one worker."""

    def __init__(self, make_connector, make_worker, make_scheduler, **timeouts):
        shape = (2, BLOCKS, HEADS, BLOCK, CONTENT)
        self.arena = HostArena(4 * int(np.prod(shape)))
        self.cache = self.arena.array(0, shape, np.float32)
        memory = KVMemory.from_tensors(list(self.cache), model="m", layout="HND", kv_order="packed")
        self.connector = make_connector(ConnectorConfig("127.0.0.1", timeouts=Timeouts(**timeouts)), memory)
        self.connector.start()
        self.worker = make_worker(self.connector)
        self.scheduler = make_scheduler(self.connector)
        self.sent, self.received, self.failed = set(), set(), set()

    def step(self):
        """One step of the engine."""
        self.worker.do(self.scheduler.take_step())
        results = self.worker.results()
        for over, reported in ((results.sent, self.sent), (results.received, self.received)):
            assert not over & reported, "vLLM ends when an id is reported twice"
            reported |= over
        self.failed |= results.failed
        self.scheduler.received(results.received)

    def end(self):
        self.connector.close()
        self.arena.close()


@pytest.fixture
def engines():
    made = []

    def make(**timeouts):
        rooms = itertools.count(1)
        made.append(
            Engine(
                PrefillConnector,
                PrefillWorker,
                lambda prefill: PrefillScheduler(BLOCK, prefill.bootstrap_address, rooms.__next__),
                **timeouts,
            )
        )
        made.append(Engine(DecodeConnector, DecodeWorker, lambda _: DecodeScheduler(BLOCK)))
        return made

    yield make
    for one in made:
        one.end()


def request(name, tokens, **params):
    """vLLM's request, as far as it is read."""
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=name, prompt_token_ids=ids, num_prompt_tokens=tokens, kv_transfer_params=params or None
    )


def run(engines, done):
    """Step both engines until a condition holds."""
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, "the engines do not get there"
        for one in engines:
            one.step()
        time.sleep(0.001)


def computed(prefill, name="p", tokens=10, blocks=(3, 1, 2)):
    """Prefill has computed a request. Returns its parameters for decode."""
    one = request(name, tokens, do_remote_decode=True)
    prefill.cache[:, list(blocks)] = np.arange(len(blocks)).reshape(1, -1, 1, 1, 1) + 1
    kept, params = prefill.scheduler.finished(one, list(blocks), complete=True)
    assert kept
    return params


def loading(decode, params, name="d", tokens=10, blocks=(5, 6, 7), cached=0):
    """Decode has a request, and blocks for it of which `cached` tokens are there. Returns it."""
    one = request(name, tokens, **params)
    decode.scheduler.arrived(one)
    external = decode.scheduler.remote_tokens(one, cached)
    decode.scheduler.allocated(one, list(blocks), external)
    return one


def asked_at_once(prefill, decode):
    """Both sides have a request, and decode has memory for it. Returns prefill's half."""
    one = request("p", 10, do_remote_decode=True, remote_room=9)
    prefill.scheduler.arrived(one)
    bootstrap = prefill.connector.bootstrap_address
    loading(decode, {"do_remote_prefill": True, "remote_bootstrap": bootstrap, "remote_room": 9})
    run((prefill, decode), lambda: prefill.connector.stats().attempts["ready"].reqs)
    return one


def values(engine, blocks):
    return [float(value) for value in engine.cache[0, list(blocks), 0, 0, 0]]


def test_blocks_arrive(engines):
    prefill, decode = engines()
    loading(decode, computed(prefill))
    run((prefill, decode), lambda: prefill.sent and decode.received)
    assert (prefill.sent, decode.received, decode.failed) == ({"p"}, {"d"}, set())
    assert values(decode, (5, 6, 7)) == [1, 2, 3]
    assert (decode.cache[:, [5, 6, 7]] == decode.cache[:1, [5, 6, 7], :1, :1, :1]).all()


def test_both_sides_may_be_asked_at_once(engines):
    prefill, decode = engines()
    one = asked_at_once(prefill, decode)
    assert (prefill.sent, decode.received) == (set(), set())
    prefill.cache[:, [3, 1, 2]] = 4
    prefill.scheduler.finished(one, [3, 1, 2], complete=True)
    run((prefill, decode), lambda: prefill.sent and decode.received)
    assert (values(decode, (5, 6, 7)), decode.failed) == ([4, 4, 4], set())


def test_request_that_prefill_gives_up_fails_at_decode(engines):
    prefill, decode = engines()
    one = asked_at_once(prefill, decode)
    prefill.scheduler.finished(one, [3], complete=False)
    run((prefill, decode), lambda: decode.received)
    assert (prefill.sent, decode.failed) == (set(), {"d"})


def test_blocks_that_decode_has_are_left_alone(engines):
    prefill, decode = engines()
    decode.cache[:, 5] = 9
    loading(decode, computed(prefill), cached=BLOCK)
    run((prefill, decode), lambda: prefill.sent and decode.received)
    assert values(decode, (5, 6, 7)) == [9, 2, 3]


def test_more_blocks_than_the_prompt_needs_are_left_alone(engines):
    prefill, decode = engines()
    loading(decode, computed(prefill, blocks=(3, 1, 2, 8)), blocks=(5, 6, 7, 9))
    run((prefill, decode), lambda: prefill.sent and decode.received)
    assert values(decode, (5, 6, 7, 9)) == [1, 2, 3, 0]


def test_whole_prompt_in_decodes_cache_frees_prefill(engines):
    prefill, decode = engines()
    loading(decode, computed(prefill), cached=10)
    run((prefill, decode), lambda: prefill.sent)
    assert (decode.received, decode.failed) == (set(), set())


def test_request_that_decode_never_gets_is_freed_after_match_s(engines):
    prefill, decode = engines(match_s=0.3)
    computed(prefill)
    run((prefill, decode), lambda: prefill.sent)


def test_request_given_up_before_it_has_blocks_frees_prefill(engines):
    prefill, decode = engines()
    one = request("d", 10, **computed(prefill))
    decode.scheduler.arrived(one)
    run((prefill, decode), lambda: prefill.connector.stats().attempts["matched"].reqs)
    assert decode.scheduler.finished(one, [], complete=False) == (False, None)
    run((prefill, decode), lambda: prefill.sent)
    assert decode.received == set()


def test_request_given_up_while_it_loads_is_reported_once_it_is_safe(engines):
    prefill, decode = engines()
    params = computed(prefill)
    one = loading(decode, params)
    decode.step()
    assert decode.scheduler.finished(one, [5, 6, 7], complete=False) == (False, None)
    run((prefill, decode), lambda: prefill.sent and decode.received)
    assert decode.received == {"d"}


def test_prefill_that_is_gone_fails_the_request(engines):
    prefill, decode = engines()
    params = computed(prefill)
    prefill.connector.close()
    loading(decode, params)
    run((decode,), lambda: decode.received)
    assert (decode.received, decode.failed) == ({"d"}, {"d"})


@pytest.mark.parametrize("bootstrap", ["nowhere", "host:port", "[::1:5"])
def test_address_that_is_none_fails_the_request(engines, bootstrap):
    _, decode = engines()
    loading(decode, {"do_remote_prefill": True, "remote_bootstrap": bootstrap, "remote_room": 1})
    decode.step()
    assert (decode.received, decode.failed) == ({"d"}, {"d"})


def test_other_prompt_is_never_served(engines):
    prefill, decode = engines(match_s=0.3)
    loading(decode, computed(prefill, tokens=11), tokens=10)
    run((prefill, decode), lambda: prefill.sent and decode.received)
    assert decode.failed == {"d"}


def test_blocks_of_another_request_that_is_held_are_refused(engines):
    prefill, decode = engines()
    first = computed(prefill, "p1", blocks=(3, 1, 2))
    second = computed(prefill, "p2", blocks=(4, 5, 6))
    loading(decode, first, "d1")
    loading(decode, second, "d2")  # vLLM never gives the same blocks twice
    decode.step()
    assert (decode.received, decode.failed) == ({"d2"}, {"d2"})
