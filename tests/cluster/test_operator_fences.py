"""Fences that the operator sends for lost peers, across its own restarts, against a real API server."""

import signal

import pytest
from pdpool_operator.api import names
from pdpool_operator.runtime.resources import DECODE_POOLS, LEASES, NODES, OPERATIONS, PODS

from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(180, func_only=True)]

DEAD = ("d" * 32, "e" * 32)
HOLDER, PEER = "chat-decode-0-0", "chat-prefill-0-0"


async def serve_both_sides(here: Bench, node: str = "") -> str:
    """Start a prefill engine, on a node if one is named, and a decode engine of two ranks. Return the UID of the
    prefill's pod.
    """
    await here.pool("PrefillPool")
    await here.pool("DecodePool")
    if node:
        await here.bind_pod(PEER, node)
    await here.run_pod(PEER)
    await here.run_pod(HOLDER)
    engine = here.engines[HOLDER]
    await engine.stop()
    engine.ranks = 2
    await engine.start()
    for kind in ("PrefillPool", "DecodePool"):
        await here.until(kind, "QueuesHealthy", status="True")
    uid: str = (await here.pod(PEER))["metadata"]["uid"]
    return uid


async def lose(here: Bench, uid: str) -> None:
    """The prefill's process is gone, and each rank of the decode engine holds memory for one of its ranks."""
    await here.engines[PEER].stop()
    here.engines[HOLDER].held_for = {rank: {incarnation: uid} for rank, incarnation in enumerate(DEAD)}


async def history_is_recorded(here: Bench) -> bool:
    lease = await here.see(LEASES, "pdpool-operator")
    return bool((lease["metadata"].get("annotations") or {}).get(names.ANNOTATION_HISTORY_FROM))


async def nothing_is_held(here: Bench) -> bool:
    return not any(here.engines[HOLDER].held_for.values())


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_what_ended_in_order_while_no_operator_ran_is_proved_by_the_next_one(here: Bench, how: int):
    operator = await here.operator().start()
    uid = await serve_both_sides(here)
    await eventually(lambda: history_is_recorded(here))
    await operator.stop(how)
    # A finalizer keeps the object while a kubelet ends its containers. For these pods, the test is the kubelet.
    await here.admin.edit(PODS, here.namespace, PEER, {"metadata": {"finalizers": ["pdpool.dev/test"]}})
    await here.admin.drop(PODS, here.namespace, PEER)
    await here.end_container(PEER)
    await here.admin.edit(PODS, here.namespace, PEER, {"metadata": {"finalizers": None}})
    await here.pod(PEER, but_not=uid)
    await lose(here, uid)
    await here.operator().start()
    await eventually(lambda: nothing_is_held(here))
    await here.until("DecodePool", "HoldsProvable", status="True")


@pytest.mark.long
async def test_what_was_deleted_by_force_while_no_operator_ran_stays_held_and_is_told(here: Bench):
    operator = await here.operator().start()
    uid = await serve_both_sides(here)
    await operator.stop(signal.SIGKILL)
    await here.admin.drop(PODS, here.namespace, PEER, gracePeriodSeconds=0)
    await here.pod(PEER, but_not=uid)
    await lose(here, uid)
    await here.operator().start()
    told = await here.until("DecodePool", "HoldsProvable", status="False", reason="PeerUnproven", within_s=75)
    assert f"{HOLDER} holds memory for process dddddddd, eeeeeeee" in told["message"]
    assert [len(held) for held in here.engines[HOLDER].held_for.values()] == [1, 1]
    before = await here.see(DECODE_POOLS, "chat")
    await here.operators[-1].stop()
    third = await here.operator().start()
    await third.quiet_reconciles()
    after = await here.see(DECODE_POOLS, "chat")
    assert after["status"]["conditions"] == before["status"]["conditions"], "the next operator says it at once"


async def fence(here: Bench, node: str, phase: str) -> Object:
    """Declare a node off. Return the status of the operation once it has this phase."""
    meta = {"name": f"fence-{node}", "namespace": here.namespace}
    await here.admin.make(OPERATIONS, {"metadata": meta, "spec": {"type": "Fence", "node": node}})

    async def ended() -> Object:
        body = await here.see(OPERATIONS, meta["name"])
        assert body is not None
        status: Object = body.get("status") or {}
        assert status.get("phase") == phase, status
        return status

    found: Object = await eventually(ended)
    return found


async def test_person_who_declares_a_gone_node_off_releases_what_is_held_for_it(here: Bench):
    await here.operator().start()
    gone = f"gone-with-{here.namespace}"
    uid = await serve_both_sides(here, gone)
    await here.admin.drop(PODS, here.namespace, PEER, gracePeriodSeconds=0)
    await here.pod(PEER, but_not=uid)
    await lose(here, uid)
    runs = (await here.admin.all(NODES, None))[0]["metadata"]["name"]
    refused = await fence(here, runs, "Failed")
    assert f"The kubelet of the Node {runs} reports" in refused["message"]
    assert [len(held) for held in here.engines[HOLDER].held_for.values()] == [1, 1]
    status = await fence(here, gone, "Succeeded")
    assert (sorted(status["processes"]), status["released"]) == (sorted(DEAD), 2)
    assert await nothing_is_held(here)
