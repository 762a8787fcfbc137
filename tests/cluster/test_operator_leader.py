"""Starts, stops, crashes and successions of operators against a real API server."""

import asyncio
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from pdpool_operator.runtime.resources import DISRUPTION_BUDGETS, LEASES, PODS, PREFILL_POOLS, SERVICES, STATEFUL_SETS
from pdpool_operator.status.transition import REFRESH

from tests.cluster.hands import POOLS, at_rest, eventually
from tests.cluster.operator_harness import ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(480, func_only=True)]

WRITES = {"create", "update", "patch", "delete"}


async def holder(here: Bench) -> str:
    lease = await here.see(LEASES, "pdpool-operator")
    return lease["spec"]["holderIdentity"] if lease else ""


async def writes(operator) -> float:
    """Return the number of writes that an operator has sent, except to its Lease."""
    return sum(n for (verb, what), n in (await operator.calls()).items() if verb in WRITES and what != "leases")


async def writes_at_rest(operator) -> float:
    """Return its writes once none is delayed: changes of numbers alone are written within `REFRESH`."""
    await operator.quiet_reconciles()
    return await at_rest(partial(writes, operator), every_s=REFRESH.total_seconds() + 2, within_s=150)


async def made(here: Bench) -> dict[str, str]:
    """Return the existing objects by name, with the hash of what was rendered."""
    return {
        f"{kind.kind}/{obj['metadata']['name']}": obj["metadata"]["annotations"]["pdpool.dev/build-hash"]
        for kind in (STATEFUL_SETS, SERVICES, DISRUPTION_BUDGETS)
        for obj in await here.admin.all(kind, here.namespace)
    }


async def test_of_two_operators_started_together_only_the_leader_writes_and_the_other_takes_over(here: Bench):
    one, two = here.operator(), here.operator()
    await asyncio.gather(one.start(ready=False), two.start(ready=False))

    async def settled() -> tuple[str, ...] | None:
        states = [(await operator.get("/readyz")).strip() for operator in (one, two)]
        return tuple(states) if sorted(states) == ["leader", "standby"] else None

    states = await eventually(settled)
    leader, standby = (one, two) if states[0] == "leader" else (two, one)
    await here.pool("PrefillPool", replicas=3)
    await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-2"))
    assert await writes(leader) > 0
    assert await writes(standby) == 0
    assert (await standby.calls()).keys() <= {("get", "leases"), ("create", "leases"), ("update", "leases")}
    await leader.quiet_reconciles()  # a write that is cut off would keep it from releasing the lease
    led = await holder(here)
    took = await leader.stop(signal.SIGTERM)
    assert took < 10, f"SIGTERM took {took:.1f} s"
    assert leader.process.returncode == 0
    assert await holder(here) != led, "the lease must be released, not expire"
    await standby.until("leader")
    await here.admin.drop(STATEFUL_SETS, here.namespace, "chat-prefill-1")
    await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-1"))


async def test_a_leader_that_is_frozen_writes_nothing_after_its_lease_ran_out(here: Bench):
    first = await here.operator().start()
    await here.pool("PrefillPool")
    await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-0"))
    old = await holder(here)
    second = await here.operator().start(ready=False)
    first.send(signal.SIGSTOP)
    try:
        await second.until("leader", within_s=90)
        assert await holder(here) != old
        await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"spec": {"replicas": 2}})
        await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-1"))
    finally:
        first.send(signal.SIGCONT)
    async with asyncio.timeout(60):
        assert await first.process.wait() == 1
    assert "no longer the leader" in first.logged()
    assert await holder(here) not in {old, ""}


@pytest.mark.long
@pytest.mark.parametrize("moment", ["half the instances", "during an update"])
async def test_an_operator_killed_in_the_middle_is_followed_by_the_same_end_state(here: Bench, moment: str):
    operator = await here.operator().start()
    async with here.kubelet():
        await here.pool("PrefillPool", replicas=4)
        if moment == "during an update":
            await here.until("PrefillPool", "Ready", status="True", within_s=60)
            await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"spec": {"model": {"servedName": "another"}}})
            await eventually(lambda: updated(here, 1), within_s=60, every_s=0.01)
        else:
            await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-1"), every_s=0.01)
        await operator.stop(signal.SIGKILL)
        await here.operator().start(ready=False)
        if moment == "during an update":
            await eventually(lambda: updated(here, 4), within_s=90)
        await here.until("PrefillPool", "Ready", status="True", within_s=90)
        await here.until("PrefillPool", "Ready", status="True")
    assert sorted(await made(here)) == [
        "PodDisruptionBudget/chat-prefill",
        "Service/chat-prefill",
        *(f"StatefulSet/chat-prefill-{i}" for i in range(4)),
    ]
    for sts in await here.admin.all(STATEFUL_SETS, here.namespace):
        assert "pdpool.dev/drain-started" not in sts["metadata"]["annotations"]


@pytest.mark.long
async def test_operators_that_are_killed_at_random_while_pools_change_leave_what_the_specs_say(here: Bench):
    rng, names, replicas = random.Random(1), ("a", "b"), {}

    async def make(name: str) -> None:
        replicas[name] = rng.randrange(4)
        await eventually(lambda: here.pool("PrefillPool", name=name, replicas=replicas[name]), every_s=0.05)

    async def scale(name: str) -> None:
        replicas[name] = rng.randrange(4)
        await here.admin.edit(PREFILL_POOLS, here.namespace, name, {"spec": {"replicas": replicas[name]}})

    async def change(name: str) -> None:
        spec = {"model": {"servedName": f"model-{rng.randrange(1000)}"}}
        await here.admin.edit(PREFILL_POOLS, here.namespace, name, {"spec": spec})

    async def make_anew(name: str) -> None:
        how = rng.choice(("Background", "Foreground"))
        await here.admin.drop(PREFILL_POOLS, here.namespace, name, propagationPolicy=how)
        await make(name)

    operator = await here.operator().start()
    async with here.kubelet():
        for name in names:
            await make(name)
        for _ in range(2):
            for _ in range(4):
                await rng.choice((scale, change, make_anew))(rng.choice(names))
                await asyncio.sleep(rng.random())  # the times at which changes meet the operator
            await operator.stop(signal.SIGKILL)
            operator = await here.operator().start()
        for name in names:
            await here.until("PrefillPool", "Ready", name=name, status="True", within_s=90)
            await here.until("PrefillPool", "Ready", name=name, status="True")
    made = Counter(
        s["metadata"]["labels"]["pdpool.dev/pool"] for s in await here.admin.all(STATEFUL_SETS, here.namespace)
    )
    assert made == Counter(replicas)
    wrote = await writes_at_rest(operator)
    await asyncio.sleep(10)  # the time over which writes are counted
    assert await writes(operator) == wrote


async def updated(here: Bench, count: int) -> bool:
    """Whether this number of pods runs the new spec."""
    pods = await here.admin.all(PODS, here.namespace)
    return sum("--served-model-name=another" in pod["spec"]["containers"][0]["args"] for pod in pods) >= count


@pytest.mark.long
async def test_an_operator_that_is_replaced_writes_nothing_where_all_is_as_it_was(here: Bench):
    first = await here.operator().start()
    await here.pool("PrefillPool")
    await here.pool("DecodePool")
    await here.run_pod("chat-prefill-0-0")
    await here.run_pod("chat-decode-0-0")
    await here.service(router={"enabled": False})
    for kind in POOLS:
        await here.until(kind, "Ready", status="True")
        await here.until(kind, "QueuesHealthy", status="True")
    await writes_at_rest(first)
    before = {kind: await here.see(resource, "chat") for kind, resource in POOLS.items()}
    await first.stop()
    second = await here.operator().start()

    async def looked_at_all() -> bool:
        return await second.reconciles() >= len(POOLS)

    await eventually(looked_at_all)
    await second.quiet_reconciles()
    after = {kind: await here.see(resource, "chat") for kind, resource in POOLS.items()}
    assert after == before
    assert await writes(second) == 0, await second.calls()


async def test_without_a_seed_it_does_not_start_and_says_why(here: Bench, tmp_path: Path):
    (tmp_path / "short").write_text("short")
    operator = await here.operator(PDPOOL_ROUTER_SEED_FILE=str(tmp_path / "short")).start(ready=False)
    async with asyncio.timeout(60):
        assert await operator.process.wait() == 1
    assert "PDPOOL_ROUTER_SEED_FILE" in operator.logged()
    assert "at least 32" in operator.logged()
