"""Sampling engines: answers are read exactly, missing answers are unknown with a reason, and load is bounded."""

import asyncio
import contextlib
import json
import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_connector import client_answer
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT, Role
from pdpool_operator.engines.answers import MAX_RANKS
from pdpool_operator.observe.connector_state import NOT_OURS, parse_state
from pdpool_operator.observe.http import Unanswered, session
from pdpool_operator.observe.pod_reader import ANSWER_BYTES, PodReader, parse_loads
from pdpool_operator.observe.sampler import Sampler
from pdpool_operator.observe.samples import HoldSample, RankSample, Tally
from pdpool_operator.observe.targets import Target, pool_targets

from tests.serving import pod_address
from tests.unit.operator.plan.makers import make_instance, make_pod, make_pool

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

STATE = {
    "version": 1,
    "role": "prefill",
    "rank": 0,
    "ranks": 1,
    "incarnation": "ab" * 16,
    "pod_uid": "pod-1",
    "container": "boot pid:[1] 7",
    "uptime_s": 12.5,
    "loop_lag_s": 4.5,
    "engine_beat_age_s": 31.0,
    "engine_paused": True,
    "draining": False,
    "queues": {
        "prefill_bootstrap": {"reqs": 3, "oldest_s": 40.5, "moved_total": 17},
        "prefill_inflight": {"reqs": 0, "oldest_s": None, "moved_total": 17},
    },
    "outcomes": {"done": 17, "failed": 0, "aborted": 0},
    "holds": 1,
    "held_bytes": 4096,
    "held_oldest_s": 2.0,
    "held_for": [{"incarnation": "ef" * 16, "holds": 1, "pod_uid": "pod-9", "container": "boot pid:[1] 3"}],
    "bytes_moved_total": 123,
    "peers": [{"incarnation": "cd" * 16, "control": "10.0.0.3:8999", "last_seen_s": 0.5, "attempts": 3, "waiting": 3}],
}
LOADS = {
    "loads": [
        {
            "dp_rank": 0,
            "num_running_reqs": 2,
            "num_waiting_reqs": 5,
            "num_used_tokens": 64,
            "max_total_num_tokens": 1024,
            "token_usage": 0.0625,
            "disaggregation": {
                "mode": "prefill",
                "prefill_bootstrap_queue_reqs": 3,
                "prefill_inflight_queue_reqs": 1,
                "decode_prealloc_queue_reqs": 0,
                "decode_transfer_queue_reqs": 0,
                "decode_retracted_queue_reqs": 0,
            },
        }
    ]
}


class Pod:
    """A pod that answers on both ports as the test sets it."""

    def __init__(self, ip: str = "", rank: int = 0) -> None:
        self.ip, self.port = ip or pod_address(), ADMIN_PORT + rank
        self.state = self.loads = None
        self.asked = 0
        self.at_once = self.most_at_once = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def _answer(self, what) -> web.StreamResponse:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.hold.wait()
        finally:
            self.at_once -= 1
        return what() if callable(what) else web.json_response(what)

    async def admin(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/state"
        return await self._answer(self.state)

    async def engine(self, request: web.Request) -> web.StreamResponse:
        assert request.path_qs == "/v1/loads?include=all"
        return await self._answer(self.loads)


@pytest.fixture
async def serve():
    runners = []

    async def start(pod: Pod, *, admin: bool = True, engine: bool = True) -> Pod:
        for wanted, port, handler in ((admin, pod.port, pod.admin), (engine, ENGINE_HTTP_PORT, pod.engine)):
            if wanted:
                app = web.Application()
                app.router.add_get("/{path:.*}", handler)
                runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
                await runner.setup()
                await web.TCPSite(runner, pod.ip, port).start()
                runners.append(runner)
        return pod

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def http():
    async with session(8) as client:
        yield client


def target(pod: Pod, uid: str = "u1") -> Target:
    return Target("llm", "chat", Role.PREFILL, 0, uid, pod.ip)


class Recording(Sampler):
    """A sampler with a record of its callbacks."""

    seen: dict[str, list[RankSample]]


def sampler(http, **options) -> Recording:
    loop = asyncio.get_running_loop()
    seen: dict[str, list[RankSample]] = {}

    def on_samples(target: Target, samples) -> None:
        seen.setdefault(target.pod_uid, []).extend(samples)

    asked = {name: options.pop(name) for name in ("timeout_s", "concurrency") if name in options}
    given = {"clock": loop.time} | options
    one = Recording(reader(http, **asked), rng=random.Random(0), on_samples=on_samples, **given)
    one.seen = seen
    return one


def reader(http, **options) -> PodReader:
    return PodReader(http, now=lambda: NOW, **{"timeout_s": 30.0} | options)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(STATE | {"engine_beat_age_s": None}, id="null"),
        pytest.param({name: value for name, value in STATE.items() if name != "engine_beat_age_s"}, id="absent"),
    ],
)
async def test_state_without_beat_is_read(http, serve, state):
    pod = await serve(Pod())
    pod.state, pod.loads = state, LOADS
    (sample,) = await reader(http).sample(target(pod))
    assert (sample.connector.beat_age_s, sample.connector_error) == (None, "")


async def test_both_sources_are_taken_in(http, serve):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE, LOADS
    (sample,) = await reader(http).sample(target(pod))
    assert sample.connector.queues["prefill_bootstrap"].reqs == 3
    assert sample.connector.queues["prefill_bootstrap"].oldest_s == 40.5
    assert sample.connector.queues["prefill_bootstrap"].moved_total == 17
    assert sample.connector.queues["prefill_inflight"].oldest_s is None
    assert sample.connector.beat_age_s == 31.0
    assert (sample.connector.paused, sample.connector.loop_lag_s) == (True, 4.5)
    assert sample.connector.holds == 1
    assert sample.connector.held_for == (HoldSample("ef" * 16, "pod-9", "boot pid:[1] 3"),)
    assert (sample.connector.pod_uid, sample.connector.container) == ("pod-1", "boot pid:[1] 7")
    assert sample.asked_at <= sample.at
    assert (sample.connector.ranks, sample.connector.held_bytes, sample.connector.held_oldest_s) == (1, 4096, 2.0)
    assert sample.engine.running == 2
    assert sample.engine.waiting == 5
    assert sample.engine.queues == {"prefill_bootstrap": 3, "prefill_inflight": 1}
    assert (sample.rank, sample.pod_uid, sample.at) == (0, "u1", NOW)


async def test_nothing_that_listens_is_unknown_with_the_reason_and_not_zero(http):
    answers = set()
    (sample,) = await reader(http, on_answer=lambda _, *answer: answers.add(answer)).sample(target(Pod()))
    assert sample.connector is None
    assert sample.engine is None
    assert sample.connector_error == sample.engine_error == "refused"
    assert answers == {("connector", "refused"), ("engine", "refused")}


async def test_a_frozen_scheduler_leaves_the_connectors_answer(http, serve):
    pod = await serve(Pod())
    pod.state = STATE
    pod.loads = lambda: web.Response(status=503)
    (sample,) = await reader(http).sample(target(pod))
    assert sample.connector is not None
    assert sample.engine is None
    assert sample.engine_error == "http 503"


async def test_an_answer_that_does_not_come_is_unknown_within_the_deadline(http, serve):
    pod = await serve(Pod())
    pod.hold.clear()
    loop = asyncio.get_running_loop()
    started = loop.time()
    (sample,) = await reader(http, timeout_s=0.2).sample(target(pod))
    assert sample.connector_error == sample.engine_error == "timeout"
    assert loop.time() - started < 10


async def test_an_answer_that_drips_is_unknown_within_the_deadline(http, serve):
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await response.write(b" ")
                await asyncio.sleep(0.05)
        return response

    pod = Pod()
    pod.admin = drip
    await serve(pod, engine=False)
    (sample,) = await reader(http, timeout_s=0.3).sample(target(pod))
    assert sample.connector_error == "timeout"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(lambda: web.Response(text="<html>"), "invalid", id="no JSON"),
        pytest.param(lambda: web.Response(body=b"\xff\xfe{}"), "invalid", id="no text"),
        pytest.param({}, "invalid", id="fields missing"),
        pytest.param(STATE | {"holds": -1}, "invalid", id="negative"),
        pytest.param(STATE | {"ranks": 0}, "invalid", id="no ranks"),
        pytest.param(STATE | {"engine_beat_age_s": 1e14}, "invalid", id="an age that no clock can hold"),
        pytest.param(STATE | {"held_oldest_s": 1e300}, "invalid", id="a hold older than that"),
        pytest.param(STATE | {"queues": {"x": {"reqs": 1, "oldest_s": 1e300}}}, "invalid", id="a wait older than that"),
        pytest.param(STATE | {"queues": {"x": {"reqs": 10**400}}}, "invalid", id="more than any metric can hold"),
        pytest.param(STATE | {"held_bytes": 1 << 63}, "invalid", id="more than the API can hold"),
        pytest.param(STATE | {"queues": {'x"}\n': {"reqs": 1}}}, "invalid", id="a name that is none"),
        pytest.param(STATE | {"incarnation": "all is well.\nTrue"}, "invalid", id="an incarnation with a line break"),
        pytest.param(STATE | {"ranks": MAX_RANKS + 1}, "invalid", id="too many ranks"),
        pytest.param(STATE | {"queues": {"x": {"reqs": "many"}}}, "invalid", id="wrong type"),
        pytest.param(STATE | {"queues": {str(i): {"reqs": 1} for i in range(17)}}, "invalid", id="too many queues"),
        pytest.param(lambda: web.Response(body=b" " * (ANSWER_BYTES + 2)), "invalid", id="too long"),
        pytest.param(lambda: web.Response(status=302, headers={"Location": "/v1/state"}), "http 302", id="redirect"),
        pytest.param(lambda: web.Response(status=500), "http 500", id="500"),
        pytest.param(
            lambda: web.json_response(STATE, headers={"Content-Encoding": "gzip"}), None, id="not decompressed"
        ),
    ],
)
async def test_garbage_is_unknown(http, serve, answer, reason):
    pod = await serve(Pod(), engine=False)
    pod.state = answer
    (sample,) = await reader(http).sample(target(pod))
    if reason is None:
        assert sample.connector is not None
    else:
        assert sample.connector is None
        assert sample.connector_error.startswith(reason)


async def test_every_rank_is_asked_at_its_own_port_as_soon_as_one_says_how_many_there_are(http, serve):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE | {"ranks": 3}, LOADS
    second = await serve(Pod(pod.ip, rank=1), engine=False)
    second.state = STATE | {"ranks": 3, "rank": 1, "holds": 7}
    one = sampler(http)
    await one.watch("llm", "chat", Role.PREFILL, [target(pod)])
    samples = one.newest("u1")
    assert [samples[rank].connector_error for rank in (0, 1, 2)] == ["", "", "refused"]
    assert samples[1].connector.holds == 7
    pod.state = lambda: web.Response(status=503)
    again = await reader(http).sample(target(pod), known=samples)
    assert [sample.connector_error for sample in again] == ["http 503", "", "refused"], "the others are known"


async def test_lengths_that_are_none_are_left_out(http, serve):
    pod = await serve(Pod(), admin=False)
    odd = LOADS["loads"][0] | {"disaggregation": {"prefill_a_queue_reqs": 1 << 63, "prefill_b_queue_reqs": 2}}
    pod.loads = {"loads": [odd]}
    (sample,) = await reader(http).sample(target(pod))
    assert sample.engine.queues == {"prefill_b": 2}


async def test_ranks_that_share_a_scheduler_are_counted_at_the_first(http, serve):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE | {"ranks": 2}, LOADS
    first, second = await reader(http).sample(target(pod))
    assert (first.engine.running, first.engine_error) == (2, "")
    assert (second.engine, second.engine_error) == (None, "")
    pod.loads = {"loads": [LOADS["loads"][0] | {"dp_rank": 1}]}
    first, second = await reader(http).sample(target(pod))
    assert (first.engine, first.engine_error) == (None, "invalid: rank not listed")
    assert second.engine.running == 2
    pod.loads = lambda: web.Response(status=503)
    assert [sample.engine_error for sample in await reader(http).sample(target(pod))] == ["http 503"] * 2


async def eventually(condition, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def running():
    tasks = []

    def run(one: Sampler) -> Sampler:
        tasks.append(asyncio.create_task(one.run()))
        return one

    yield run
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_pod_is_looked_at_again_and_again_and_forgotten_when_it_vanishes(http, serve, running):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE, LOADS
    one = running(sampler(http, interval_s=0.05))
    await one.watch("llm", "chat", Role.PREFILL, [target(pod)])
    await eventually(lambda: len(one.seen.get("u1", [])) >= 3)
    assert one.newest("u1")[0].connector is not None
    await one.watch("llm", "chat", Role.DECODE, [])
    assert one.newest("u1")
    await one.watch("llm", "chat", Role.PREFILL, [])
    assert one.newest("u1") == {}
    assert one.samples() == {}


async def test_a_pod_that_hangs_is_asked_once_at_a_time_and_does_not_hold_up_others(http, serve, running):
    slow, quick = await serve(Pod(), engine=False), await serve(Pod())
    slow.hold.clear()
    quick.state, quick.loads = STATE, LOADS
    one = running(sampler(http, interval_s=0.02, timeout_s=60.0))
    watching = asyncio.create_task(
        one.watch("llm", "chat", Role.PREFILL, [target(slow, "slow"), target(quick, "quick")])
    )
    await eventually(lambda: len(one.seen.get("quick", [])) > 5)
    assert (slow.asked, slow.most_at_once, one.seen.get("slow")) == (1, 1, None)
    slow.hold.set()
    await asyncio.wait_for(watching, 30)
    assert one.seen["slow"]


async def test_late_sample_does_not_keep_the_loop_awake(http, serve, running):
    slow = await serve(Pod())
    slow.state, slow.loads = STATE, LOADS
    slow.hold.clear()
    calls, loop = [], asyncio.get_running_loop()
    clock = lambda: calls.append(None) or loop.time()  # noqa: E731
    one = sampler(http, interval_s=0.05, timeout_s=60.0, clock=clock)
    watching = asyncio.create_task(one.watch("llm", "chat", Role.PREFILL, [target(slow)]))
    await eventually(lambda: slow.asked >= 2)
    running(one)
    await asyncio.sleep(1.0)  # the time over which wake-ups are counted: 20 intervals
    assert len(calls) <= 100
    slow.hold.set()
    await asyncio.wait_for(watching, 30)
    await eventually(lambda: len(one.seen["u1"]) >= 3)


async def test_what_is_seen_of_a_pod_after_it_was_forgotten_is_dropped(http, serve):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE, LOADS
    pod.hold.clear()
    one = sampler(http)
    watching = asyncio.create_task(one.watch("llm", "chat", Role.PREFILL, [target(pod)]))
    await eventually(lambda: pod.asked >= 2)
    await one.watch("llm", "chat", Role.PREFILL, [])
    pod.hold.set()
    await asyncio.wait_for(watching, 30)
    assert one.seen == {}
    assert one.newest("u1") == {}


async def test_pod_whose_target_changed_is_known_only_after_a_look_as_the_new_one(http, serve):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE, LOADS
    pod.hold.clear()
    one, stock = sampler(http), replace(target(pod), engine=EngineType.SGLANG, has_connector=False)
    before = asyncio.create_task(one.watch("llm", "chat", Role.PREFILL, [target(pod)]))
    await eventually(lambda: pod.asked == 2)
    pod.hold, held = asyncio.Event(), pod.hold
    both = [asyncio.create_task(one.watch("llm", "chat", Role.PREFILL, [stock])) for _ in range(2)]
    await eventually(lambda: pod.asked == 3)
    held.set()
    await asyncio.wait_for(before, 30)
    assert not any(task.done() for task in both)
    pod.hold.set()
    for task in both:
        await asyncio.wait_for(task, 30)
    assert [sample.has_connector for sample in one.seen["u1"]] == [False]


async def test_a_new_pod_is_known_when_watch_returns_to_whoever_asked(http, serve):
    pod = await serve(Pod())
    pod.state, pod.loads = STATE, LOADS
    pod.hold.clear()
    one = sampler(http)
    both = [asyncio.create_task(one.watch("llm", "chat", Role.PREFILL, [target(pod)])) for _ in range(2)]
    await eventually(lambda: pod.asked >= 2)
    assert not any(task.done() for task in both)
    pod.hold.set()
    for task in both:
        await asyncio.wait_for(task, 30)
        assert one.newest("u1")[0].connector is not None
    assert pod.asked == 2


async def test_all_requests_together_are_bounded_and_waiting_for_a_turn_is_no_silence(http, serve, running):
    pod, other = await serve(Pod(), engine=False), await serve(Pod())
    pod.hold.clear()
    other.state, other.loads = STATE, LOADS
    one = running(sampler(http, interval_s=0.01, timeout_s=1.0, concurrency=2))
    hung = [target(pod, f"u{i}") for i in range(4)]
    await one.watch("llm", "chat", Role.PREFILL, [*hung, target(other, "answers")])
    await eventually(lambda: len(one.seen) == 5)
    assert pod.most_at_once <= 2
    assert {sample.connector_error for sample in one.seen["answers"]} == {""}


async def test_many_pods_that_hang_leave_most_slots_to_the_others(http, serve, running):
    hung, quick = [await serve(Pod(), engine=False) for _ in range(12)], await serve(Pod())
    for pod in hung:
        pod.hold.clear()
    quick.state, quick.loads = STATE, LOADS
    one = running(sampler(http, interval_s=0.01, timeout_s=0.8, concurrency=8))
    targets = [target(pod, f"hung {number}") for number, pod in enumerate(hung)]
    await one.watch("llm", "chat", Role.PREFILL, [*targets, target(quick, "quick")])
    before, again = len(one.seen["quick"]), [pod.asked for pod in hung]
    # Each is asked once more. With 4 of 8 slots that takes 12 / 4 times 0.8 s.
    await eventually(lambda: all(pod.asked > asked for pod, asked in zip(hung, again, strict=True)))
    assert len(one.seen["quick"]) - before > 6, "it does not wait for a slot of the others"


@settings(deadline=None, derandomize=True)
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*STATE, *LOADS, "reqs"]), inner)
            ),
            max_leaves=20,
        ),
    )
)
def test_no_answer_whatever_raises_anything_but_unanswered(body):
    for parse in (parse_state, lambda text: parse_loads(text, Role.DECODE, EngineType.REFERENCE)):
        with contextlib.suppress(Unanswered):
            parse(body)


def test_connector_failures_leave_out_what_others_caused() -> None:
    clients = {"too_long": 7, "invalid": 5, "aborted": 4, "peer_aborted": 1}
    causes = {"transfer_failed": 2, "internal": 1, "timed_out": 3, "peer_lost": 2, **clients}
    body = {"incarnation": "a", "queues": {}, "outcomes": {"done": 40, "failed": 17, "aborted": 5}, "causes": causes}
    assert parse_state(json.dumps(body).encode()).ended == Tally(40, 3)


def test_connector_without_outcomes_has_no_tally() -> None:
    assert parse_state(b'{"incarnation": "a", "queues": {}}').ended is None


def test_excluded_causes_are_of_clients_or_operators() -> None:
    answers = {cause: client_answer(TransferStatus(Phase.FAILED, cause)).status for cause in Cause}
    refused = {str(cause) for cause, status in answers.items() if status == 400}
    assert refused | {"aborted", "peer_aborted", "purged"} == NOT_OURS


@pytest.mark.parametrize("ranks", [1, 2])
async def test_without_connector_only_the_engine_is_asked(serve, http, ranks):
    pod = await serve(Pod(), admin=False)
    pod.loads = {"loads": [LOADS["loads"][0] | {"dp_rank": rank} for rank in range(ranks)]}
    asked = []
    stock = Target("llm", "chat", Role.PREFILL, 0, "u1", pod.ip, EngineType.SGLANG, has_connector=False)
    looks = await reader(http, on_answer=lambda *answer: asked.append(answer)).sample(stock)
    assert [look.rank for look in looks] == list(range(ranks))
    assert all(not look.has_connector and look.connector is None and not look.engine_error for look in looks)
    assert [look.engine.queues["prefill_bootstrap"] for look in looks] == [3] * ranks
    assert asked == [(Role.PREFILL, "engine", "ok")]


def test_state_has_versions_and_transports():
    peer = {"incarnation": "cd" * 16, "backend": "nixl", "transport": "rdma", "last_seen_s": 0.5}
    state = STATE | {"engine": "sglang 0.5.23", "connector_version": "0.1.0", "peers": [peer]}
    sample = parse_state(json.dumps(state).encode())
    assert (sample.engine, sample.version) == ("sglang 0.5.23", "0.1.0")
    assert [(one.incarnation, one.backend, one.transport) for one in sample.peers] == [("cd" * 16, "nixl", "rdma")]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "x" * 65},
        {"engine": "line\nbreak"},
        {"connector_version": 1},
        {"peers": [{"incarnation": "a b"}]},
        {"peers": [{"incarnation": "ab", "transport": "r dma"}]},
        {"peers": [{"incarnation": "ab"}] * 4097},
    ],
)
def test_state_with_unusable_texts_is_refused(change):
    with pytest.raises(Unanswered, match="invalid"):
        parse_state(json.dumps(STATE | change).encode())


def test_only_running_pods_of_the_pools_own_instances_are_sampled() -> None:
    pool = make_pool()
    own, pending = make_instance(pool), make_instance(pool, 1, pod=make_pod("x", phase="Pending"))
    foreign, empty = make_instance(pool, 2, controller_uid="another"), make_instance(pool, 3, pod=None)
    assert [target.instance for target in pool_targets(pool, [own, pending, foreign, empty])] == [0]


def test_queues_that_are_no_handoff_queues_are_not_judged():
    """A request that generates for minutes stands in `engine_running`. Its engine was judged Stuck."""
    row = {"reqs": 1, "oldest_s": 100.0, "moved_total": 5}
    body = {
        "incarnation": "a",
        "queues": {"decode_transfer": row, "engine_running": row},
        "engine_queues": {"engine_running": row},
        "attempts": {"offered": row, "aborting": row, "held": row},
    }
    found = parse_state(json.dumps(body).encode())
    assert (set(found.queues), set(found.engine_queues)) == ({"decode_transfer"}, set())
    assert found.unsettled == 2
