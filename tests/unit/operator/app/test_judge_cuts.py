"""A pair of engines that cannot reach each other, beside an instance that is Stuck: what the routers list."""

from datetime import timedelta

from pdpool_operator.api.names import Role
from pdpool_operator.controller.judge import Judge
from pdpool_operator.observe.keys import Bindings, Key
from pdpool_operator.observe.samples import ConnectorSample, QueueSample, RankSample
from pdpool_operator.observe.targets import Target
from pdpool_operator.plan.rotation import receiving

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pod, make_pool

NETS = {Role.PREFILL: "10.1.0", Role.DECODE: "10.2.0"}


def observed(role):
    pool = make_pool(role, replicas=2)
    pods = (make_pod(f"chat-{role}-{i}-0", uid=f"uid-{role}-{i}", ip=f"{NETS[role]}.{i}") for i in range(2))
    return make_observed(pool, *(make_instance(pool, index, pod=pod) for index, pod in enumerate(pods)))


def connector(role, index, age_s):
    """Decode 0 hangs with a request in its queue. Decode 1 gets no answer from prefill 1."""
    hangs, cut = (role, index) == (Role.DECODE, 0), (role, index) == (Role.DECODE, 1)
    return ConnectorSample(
        incarnation=f"{role}{index}",
        beat_age_s=age_s if hangs else 0.1,
        queues={"decode_transfer": QueueSample(1, age_s, 5)} if hangs else {},
        silent=(f"{NETS[Role.PREFILL]}.1:8998",) if cut else (),
    )


def test_routers_list_a_pair_that_works_beside_a_stuck_decode():
    now, bindings = [T0], Bindings()
    judge = Judge(bindings, lambda: now[0], lambda _: None)
    pools = {role: observed(role) for role in NETS}
    keys = {role: Key(pool.pool.kind, "llm", pool.pool.metadata.name) for role, pool in pools.items()}
    bindings.bind(Key("DisaggregatedService", "llm", "chat"), *(key.name for key in keys.values()))
    for role, pool in pools.items():
        judge.observed(keys[role], pool)
    for second in range(0, 90, 3):
        now[0] = T0 + timedelta(seconds=second)
        for role in NETS:
            for index in range(2):
                uid = f"uid-{role}-{index}"
                sample = RankSample(0, uid, now[0], now[0], connector(role, index, 60.0 + second), None)
                judge.on_samples(Target("llm", "chat", role, index, uid, ""), [sample])
        judge.tick()
    for key in keys.values():
        judge.shown(key, judge.judge(key))
    listed = {role: receiving(judge.marked(keys[role], pool)) for role, pool in pools.items()}
    assert listed == {Role.PREFILL: {"10.1.0.0"}, Role.DECODE: {"10.2.0.1"}}
