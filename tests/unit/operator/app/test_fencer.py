"""Fences are sent once, and again if they had no effect. Holds without possible proof are reported after a while."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from aiohttp import web
from pdpool_connector.transport.tokens import TokenVerifier
from pdpool_operator.api.base import Condition, ConditionStatus
from pdpool_operator.api.names import ADMIN_PORT, Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller.engines import Engines
from pdpool_operator.controller.fences import AGAIN, PATIENCE, Fencer, fence_events
from pdpool_operator.observe.http import session
from pdpool_operator.observe.keys import Key
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.pod_nodes import PodNodes
from pdpool_operator.observe.samples import HoldSample
from pdpool_operator.plan.fences import Fencing
from pdpool_operator.runtime.keys import Keys
from pdpool_operator.runtime.write_budget import NotLeaderError

from tests.serving import pod_address
from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pool, make_sample, seconds

SEED = b"0123456789abcdef0123456789abcdef"
DEAD = "d" * 32
IP = pod_address()
ENDED = {
    "metadata": {"name": "chat-prefill-0-0", "uid": "dead-pod", "deletionTimestamp": "2026-11-22T06:00:00Z"},
    "status": {
        "phase": "Failed",
        "containerStatuses": [{"name": "engine", "state": {"terminated": {"containerID": "containerd://c1"}}}],
    },
}


KEY = Key("DecodePool", "llm", "chat")


class Samples:
    """Stand-in for the sampler: one decode pod of two ranks, some of which hold memory."""

    def __init__(self, uid: str) -> None:
        self.uid, self.held, self.asked = uid, {0}, 0

    def samples(self):
        self.asked += 1
        return {self.uid: {rank: self.look(rank) for rank in (0, 1)}}

    def look(self, rank: int):
        sample = make_sample(pod_uid=self.uid, rank=rank)
        assert sample.connector is not None
        holds = (HoldSample(DEAD, "dead-pod", "run 1"),) if rank in self.held else ()
        return replace(sample, connector=replace(sample.connector, pod_uid=self.uid, held_for=holds))


class Scene:
    def __init__(self, http) -> None:
        pool = make_pool(Role.DECODE)
        instance = make_instance(pool)
        assert instance.pod is not None
        self.pool = make_observed(pool, replace(instance, pod=replace(instance.pod, ip=IP)))
        self.samples, self.lives, self.now, self.counts = Samples(instance.pod.uid), Lives(), T0, Counter[str]()
        self.gate = TokenVerifier(Keys({1: SEED}).public(1), instance.pod.uid)
        self.status, self.bodies = 200, {0: [], 1: []}
        self.budget_s = 60.0
        engines = Engines(http, Keys({1: SEED}), "operator x", write_budget=lambda: self.budget_s)
        self.fencer = Fencer(
            engines, self.samples, self.lives, PodNodes(), lambda: self.now, lambda o: self.counts.update([o])
        )

    async def answer(self, request: web.Request) -> web.Response:
        assert self.gate.admit(request.headers["Authorization"], "fence") == "operator x"
        assert request.url.port is not None
        self.bodies[request.url.port - ADMIN_PORT].append(await request.json())
        if self.status is None and request.transport is not None:
            request.transport.close()
        return web.json_response({"error": "no proof"}, status=self.status or 200)

    def due(self) -> bool:
        return self.fencer.pools_due({KEY: self.pool}) == [KEY]

    def take(self) -> Fencing:
        return self.fencer.take(KEY, self.pool)

    async def give(self):
        return fence_events(await self.fencer.send(self.take().fences))


@pytest.fixture
async def scene(monkeypatch):
    monkeypatch.setattr("pdpool_operator.controller.engines.TIMEOUT_S", 60.0)
    http = session(4)
    scene = Scene(http)
    app = web.Application()
    app.router.add_post("/v1/fence", scene.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    for rank in scene.bodies:
        await web.TCPSite(runner, IP, ADMIN_PORT + rank).start()
    yield scene
    await runner.cleanup()
    await http.close()


async def test_a_signed_word_with_the_kubelets_evidence_reaches_the_holder_and_is_an_event(scene):
    scene.lives.note(ENDED)
    assert scene.due()
    (event,) = await scene.give()
    assert event.reason is Reason.FENCED_PEER
    assert "containerd://c1" in event.message
    (body,) = scene.bodies[0]
    assert body["incarnation"] == DEAD
    (proof,) = body["proofs"]
    assert (proof["kind"], proof["pod_uid"]) == ("container_terminated", "dead-pod")
    assert scene.counts == {"given": 1}


async def test_it_is_given_once_and_again_only_if_it_did_not_help(scene):
    scene.lives.note(ENDED)
    await scene.give()
    assert not scene.due()
    scene.now += AGAIN
    assert scene.due()
    await scene.give()
    scene.samples.held = set()
    scene.now += AGAIN
    assert not scene.due()


async def test_one_who_may_not_write_tells_nobody(scene):
    scene.lives.note(ENDED)
    scene.budget_s = 0.0
    with pytest.raises(NotLeaderError):
        await scene.give()
    assert scene.bodies == {0: [], 1: []}


@pytest.mark.parametrize("status", [200, 422, None])
async def test_what_does_not_help_is_tried_less_and_less_often(scene, status):
    """Each try is a reconcile, and each refusal an event."""
    scene.lives.note(ENDED)
    scene.status = status
    tries = 0
    for _ in range(3600):
        scene.now += seconds(1)
        if scene.due():
            tries += 1
            await scene.give()
    assert 6 <= tries <= 12


async def test_a_refusal_is_told_in_the_connectors_words(scene):
    scene.lives.note(ENDED)
    scene.status = 422
    (event,) = await scene.give()
    assert event.reason is Reason.FENCE_REFUSED
    assert json.dumps({"error": "no proof"}) in event.message
    assert scene.counts == {"refused": 1}


async def test_every_rank_that_holds_is_told_at_its_own_port(scene):
    scene.lives.note(ENDED)
    scene.samples.held = {0, 1}
    events = await scene.give()
    assert [len(bodies) for bodies in scene.bodies.values()] == [1, 1]
    assert ["rank 0" in events[0].message, "rank 1" in events[1].message] == [True, True]
    scene.samples.held = {1}
    scene.now += AGAIN
    assert scene.due()
    await scene.give()
    assert [len(bodies) for bodies in scene.bodies.values()] == [1, 2]


async def test_what_was_decided_for_all_pools_at_once_is_what_a_reconcile_takes(scene):
    scene.lives.note(ENDED)
    assert scene.due()
    asked = scene.samples.asked
    await scene.give()
    assert scene.samples.asked == asked, "decided twice"


async def test_a_hold_without_hope_is_told_after_a_while_and_until_it_ends(scene):
    scene.due()
    assert scene.take().unproven == ()
    scene.now += PATIENCE
    assert scene.due()
    assert [one.hold.incarnation for one in scene.take().unproven] == [DEAD]
    assert not scene.due()
    scene.samples.held = set()
    assert scene.due()
    assert scene.take().unproven == ()
    assert not scene.due()
    scene.samples.held = {0}
    scene.now += seconds(1)
    assert not scene.due(), "the wait did not start again"


async def test_an_operator_that_begins_goes_on_saying_what_the_status_says(scene):
    told = Condition(
        type="HoldsProvable",
        status=ConditionStatus.FALSE,
        reason=Reason.PEER_UNPROVEN,
        last_transition_time=T0 - seconds(600),
    )
    pool = scene.pool.pool
    status = pool.status.model_copy(update={"conditions": (told,)})
    scene.pool = replace(scene.pool, pool=pool.model_copy(update={"status": status}))
    assert [one.hold.incarnation for one in scene.take().unproven] == [DEAD]
    scene.samples.held = {0, 1}
    scene.due()
    assert [one.rank for one in scene.take().unproven] == [0], "what is new is waited for"


async def test_a_pool_that_was_made_anew_under_the_same_name_begins_anew(scene):
    scene.due()
    scene.now += PATIENCE
    assert scene.due()
    assert scene.take().unproven
    pool = scene.pool.pool
    another = pool.model_copy(update={"metadata": pool.metadata.model_copy(update={"uid": "another"})})
    instances = tuple(replace(i, controller_uid="another") for i in scene.pool.instances)
    scene.pool = replace(scene.pool, pool=another, instances=instances)
    assert scene.take().unproven == ()
    scene.now += PATIENCE
    assert scene.due()
