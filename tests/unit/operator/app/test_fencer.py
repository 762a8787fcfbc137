"""Fences are given once, again when they did not help, and holds without hope are told after a while."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from aiohttp import web
from pdpool_connector.transport.tokens import Gate
from pdpool_operator.api.names import ADMIN_PORT, Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller_fences import AGAIN, PATIENCE, Fencer
from pdpool_operator.observe.http import session
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.model import HoldSample
from pdpool_operator.observe.sampler import Target
from pdpool_operator.runtime.engines import Engines
from pdpool_operator.runtime.keys import Signer

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pool, make_sample, seconds

SEED = b"0123456789abcdef0123456789abcdef"
DEAD = "d" * 32
IP = "127.99.0.7"
ENDED = {
    "metadata": {"name": "chat-prefill-0-0", "uid": "dead-pod", "deletionTimestamp": "2026-11-22T06:00:00Z"},
    "status": {"containerStatuses": [{"name": "engine", "state": {"terminated": {"containerID": "containerd://c1"}}}]},
}


class Samples:
    """In the place of the sampler: one decode pod."""

    def __init__(self, uid: str) -> None:
        self.uid, self.held = uid, True

    def targets(self):
        return [Target("llm", "chat", Role.DECODE, 0, self.uid, IP)]

    def newest(self, uid: str):
        assert uid == self.uid
        sample = make_sample(pod_uid=uid)
        assert sample.connector is not None
        holds = (HoldSample(DEAD, 1, "dead-pod", "run 1"),) if self.held else ()
        return {0: replace(sample, connector=replace(sample.connector, pod_uid=uid, held_for=holds))}


class Scene:
    def __init__(self, http) -> None:
        pool = make_pool(Role.DECODE)
        instance = make_instance(pool)
        assert instance.pod is not None
        self.pool = make_observed(pool, replace(instance, pod=replace(instance.pod, ip=IP)))
        self.samples, self.lives, self.now, self.counts = Samples(instance.pod.uid), Lives(), T0, Counter[str]()
        self.gate = Gate(Signer(SEED).public, instance.pod.uid)
        self.status, self.bodies = 200, []
        engines = Engines(http, Signer(SEED), "operator x")
        self.fencer = Fencer(engines, self.samples, self.lives, lambda: self.now, lambda o: self.counts.update([o]))

    async def answer(self, request: web.Request) -> web.Response:
        assert self.gate.admit(request.headers["Authorization"], "fence") == "operator x"
        self.bodies.append(await request.json())
        return web.json_response({"error": "no proof"}, status=self.status)

    async def give(self):
        return await self.fencer.give(self.fencer.plan(self.pool).fences)


@pytest.fixture
async def scene():
    http = session(4)
    scene = Scene(http)
    app = web.Application()
    app.router.add_post("/v1/fence", scene.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, IP, ADMIN_PORT).start()
    yield scene
    await runner.cleanup()
    await http.close()


async def test_a_signed_word_with_the_kubelets_evidence_reaches_the_holder_and_is_an_event(scene):
    scene.lives.note(ENDED)
    assert scene.fencer.due(scene.pool)
    (event,) = await scene.give()
    assert event.reason is Reason.FENCED_PEER
    assert "containerd://c1" in event.message
    (body,) = scene.bodies
    assert body["incarnation"] == DEAD
    (proof,) = body["proofs"]
    assert (proof["kind"], proof["pod_uid"]) == ("container_terminated", "dead-pod")
    assert scene.counts == {"given": 1}


async def test_it_is_given_once_and_again_only_if_it_did_not_help(scene):
    scene.lives.note(ENDED)
    await scene.give()
    assert not scene.fencer.due(scene.pool)
    scene.now += AGAIN
    assert scene.fencer.due(scene.pool)
    await scene.give()
    scene.samples.held = False
    scene.now += AGAIN
    assert not scene.fencer.due(scene.pool)


async def test_a_refusal_is_told_in_the_connectors_words(scene):
    scene.lives.note(ENDED)
    scene.status = 422
    (event,) = await scene.give()
    assert event.reason is Reason.FENCE_REFUSED
    assert json.dumps({"error": "no proof"}) in event.message
    assert scene.counts == {"refused": 1}


async def test_a_hold_without_hope_is_told_after_a_while_and_until_it_ends(scene):
    assert scene.fencer.plan(scene.pool).unproven == ()
    scene.now += PATIENCE
    assert scene.fencer.due(scene.pool)
    assert [one.hold.incarnation for one in scene.fencer.plan(scene.pool).unproven] == [DEAD]
    assert not scene.fencer.due(scene.pool)
    scene.samples.held = False
    assert scene.fencer.due(scene.pool)
    assert scene.fencer.plan(scene.pool).unproven == ()
    scene.samples.held = True
    scene.now += seconds(1)
    assert scene.fencer.plan(scene.pool).unproven == (), "it began anew"
