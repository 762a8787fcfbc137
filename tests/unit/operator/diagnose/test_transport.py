"""Transports of paired engines: which instances must not serve, and what the status says of it.

The inventories have the fields of `/v1/state` of connectors, cut to what matters. Prefill alone reports a transport.
"""

import json

import pytest
from pdpool_operator.api.base import ConditionStatus
from pdpool_operator.api.names import Role
from pdpool_operator.api.rdma import RdmaSpec
from pdpool_operator.api.reasons import Reason
from pdpool_operator.diagnose.model import Subject
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.track import follow
from pdpool_operator.diagnose.transport import with_transports
from pdpool_operator.observe.connector_state import parse_state
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.plan.model import Plan
from pdpool_operator.status.chain import ConditionWriter
from pdpool_operator.status.pool import PoolFacts, pool_status
from pdpool_operator.status.transfer import transfer_ready

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pod, make_pool, seconds

REQUIRED = RdmaSpec(mode="Required", resource="rdma/ib")
PREFERRED = RdmaSpec(mode="Preferred", resource="rdma/ib")
OFF = RdmaSpec(mode="Off")


def life(role, index, rank=0):
    return f"{'c0' if role is Role.PREFILL else 'de'}{index:02x}{rank:02x}" * 4 + "0" * 8


def inventory(role, index, rank=0, peers=()):
    """A connector's `/v1/state`. `peers`: (incarnation, transport)."""
    return json.dumps(
        {
            "version": 1,
            "role": str(role),
            "rank": rank,
            "incarnation": life(role, index, rank),
            "engine": "sglang 0.5.23",
            "connector_version": "0.1.0",
            "queues": {},
            "peers": [
                {"incarnation": name, "control": "10.0.0.3:9100", "backend": "nixl", "transport": transport}
                for name, transport in peers
            ],
        }
    ).encode()


def subject(role, index, *states):
    uid = f"uid-{role}-{index}"
    tracks = tuple(
        follow(None, RankSample(rank, uid, T0, T0, parse_state(state), None)) for rank, state in enumerate(states)
    )
    return Subject("chat", role, index, make_pod(f"chat-{role}-{index}-0", uid=uid), leaving=False, tracks=tracks)


def fleet(links, prefills=1, decodes=1):
    """Instances of both sides. `links`: (prefill, decode) -> transport."""
    writers = [
        subject(
            Role.PREFILL,
            p,
            inventory(Role.PREFILL, p, peers=[(life(Role.DECODE, d), t) for (q, d), t in links.items() if q == p]),
        )
        for p in range(prefills)
    ]
    targets = [
        subject(
            Role.DECODE, d, inventory(Role.DECODE, d, peers=[(life(Role.PREFILL, p), "") for p, e in links if e == d])
        )
        for d in range(decodes)
    ]
    return writers, targets


def judged(own, others, rdma):
    return with_transports(diagnose(own, others, stuck_after_s=30, now=T0 + seconds(1)), others, rdma)


def unfit(links, prefills, decodes, rdma=REQUIRED):
    writers, targets = fleet(links, prefills, decodes)
    both = (*judged(writers, targets, rdma), *judged(targets, writers, rdma))
    return {f"{'P' if d.subject.role is Role.PREFILL else 'D'}{d.subject.index}" for d in both if d.unfit}


@pytest.mark.parametrize(
    ("links", "prefills", "decodes", "expected"),
    [
        ({}, 1, 1, set()),
        ({(0, 0): "rdma"}, 1, 1, set()),
        ({(0, 0): ""}, 1, 1, set()),
        ({(0, 0): "tcp"}, 1, 1, {"P0", "D0"}),
        ({(0, 0): "cma"}, 1, 1, {"P0", "D0"}),
        ({(0, 0): "memory"}, 1, 1, {"P0", "D0"}),
        ({(0, 0): "rdma", (0, 1): "tcp"}, 1, 2, {"D1"}),
        ({(0, 0): "rdma", (1, 0): "tcp"}, 2, 1, {"P1"}),
        ({(0, 0): "rdma", (0, 1): "tcp", (1, 0): "rdma", (1, 1): "tcp"}, 2, 2, {"D1"}),
        ({(0, 0): "tcp", (0, 1): "tcp", (1, 0): "rdma", (1, 1): "rdma"}, 2, 2, {"P0"}),
        ({(0, 0): "rdma", (0, 1): "tcp", (1, 1): "tcp"}, 2, 2, {"D1"}),
        ({(0, 0): "rdma", (0, 1): "tcp", (1, 0): "tcp", (1, 1): "rdma"}, 2, 2, {"D0", "D1"}),
        ({(0, 0): "tcp", (0, 1): "tcp", (1, 0): "tcp", (1, 1): "tcp"}, 2, 2, {"P0", "P1", "D0", "D1"}),
    ],
)
def test_every_pair_without_rdma_has_an_unfit_end(links, prefills, decodes, expected):
    found = unfit(links, prefills, decodes)
    assert found == expected
    assert all({f"P{p}", f"D{d}"} & found for (p, d), transport in links.items() if transport not in {"rdma", ""})


@pytest.mark.parametrize("rdma", [None, OFF, PREFERRED])
def test_only_required_makes_instances_unfit(rdma):
    assert unfit({(0, 0): "tcp"}, 1, 1, rdma) == set()


def test_every_rank_counts():
    writers = [
        subject(
            Role.PREFILL,
            0,
            inventory(Role.PREFILL, 0, 0, [(life(Role.DECODE, 0), "rdma")]),
            inventory(Role.PREFILL, 0, 1, [(life(Role.DECODE, 0), "tcp")]),
        )
    ]
    targets = [subject(Role.DECODE, 0, inventory(Role.DECODE, 0))]
    (decode,) = judged(targets, writers, REQUIRED)
    assert decode.unfit == "chat-prefill-0 rank 1 reaches chat-decode-0 by tcp (nixl), and rdma.mode is Required"


def test_a_silent_connector_keeps_what_it_said():
    writers, targets = fleet({(0, 0): "tcp"})
    (track,) = writers[0].tracks
    silent = RankSample(0, "uid-prefill-0", T0 + seconds(3), T0, None, None, "timeout")
    later = Subject("chat", Role.PREFILL, 0, writers[0].pod, leaving=False, tracks=(follow(track, silent),))
    assert judged([later], targets, REQUIRED)[0].unfit


def test_a_new_pod_begins_without_pairs():
    writers, _ = fleet({(0, 0): "tcp"})
    (track,) = writers[0].tracks
    fresh = follow(track, RankSample(0, "another-pod", T0 + seconds(3), T0, None, None, "refused"))
    assert fresh.answer is None


def condition(links, rdma, prefills=1, decodes=1, role=Role.PREFILL):
    writers, targets = fleet(links, prefills, decodes)
    own, others = (writers, targets) if role is Role.PREFILL else (targets, writers)
    return transfer_ready(ConditionWriter((), 1, T0), rdma, judged(own, others, rdma))


@pytest.mark.parametrize("rdma", [None, OFF])
def test_pool_without_rdma_has_no_condition(rdma):
    assert condition({(0, 0): "tcp"}, rdma) == ()


@pytest.mark.parametrize(
    ("links", "rdma", "status", "reason", "words"),
    [
        ({}, REQUIRED, ConditionStatus.UNKNOWN, Reason.NOT_PAIRED, "No engine has paired"),
        ({(0, 0): ""}, REQUIRED, ConditionStatus.UNKNOWN, Reason.TRANSPORT_UNKNOWN, "chat-prefill-0 to chat-decode-0"),
        ({(0, 0): "rdma"}, REQUIRED, ConditionStatus.TRUE, Reason.RDMA_IN_USE, "All paired engines"),
        ({(0, 0): "tcp"}, REQUIRED, ConditionStatus.FALSE, Reason.NOT_RDMA, "chat-prefill-0 is not available"),
        ({(0, 0): "tcp"}, PREFERRED, ConditionStatus.FALSE, Reason.NOT_RDMA, "so they serve all the same"),
    ],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_condition_says_what_was_found(links, rdma, status, reason, words, role):
    (found,) = condition(links, rdma, role=role)
    assert (found.type, found.status, found.reason) == ("TransferReady", status, reason)
    assert words.replace("prefill-0 is", f"{role}-0 is") in found.message


@pytest.mark.parametrize(
    ("memlock", "words"),
    [("NodeLimit", "ulimit -l in the container is unlimited"), ("Capability", "root with IPC_LOCK")],
)
def test_condition_says_what_to_check(memlock, words):
    (found,) = condition({(0, 0): "tcp"}, RdmaSpec(mode="Required", resource="rdma/ib", memlock=memlock))
    for text in (
        "chat-prefill-0 reaches chat-decode-0 by tcp (nixl)",
        "has rdma/ib",
        "/dev/infiniband",
        words,
        "UCX_TLS",
    ):
        assert text in found.message


def status(links, mode):
    rdma = {"mode": mode, "resource": "rdma/ib"}
    pool = make_pool(engine={"type": "SGLang"}, model={"path": "/m"}, rdma=rdma, template=IMAGE)
    observed = make_observed(pool, make_instance(pool))
    writers, targets = fleet(links)
    return pool_status(PoolFacts(observed, Plan(), judged(writers, targets, pool.spec.rdma), T0))


IMAGE = {"spec": {"containers": [{"name": "engine", "image": "registry.example/sglang:1"}]}}


def conditions(shown):
    return {one.type: (one.status, one.reason) for one in shown.conditions}


def test_required_over_tcp_is_not_available():
    shown = conditions(status({(0, 0): "tcp"}, "Required"))
    assert shown["Available"][0] is ConditionStatus.FALSE
    assert shown["Ready"][0] is ConditionStatus.FALSE
    assert shown["TransferReady"] == (ConditionStatus.FALSE, Reason.NOT_RDMA)


@pytest.mark.parametrize(("transport", "mode"), [("tcp", "Preferred"), ("rdma", "Required"), ("", "Required")])
def test_other_findings_leave_it_available(transport, mode):
    shown = conditions(status({(0, 0): transport}, mode))
    assert (shown["Available"][0], shown["Ready"][0]) == (ConditionStatus.TRUE, ConditionStatus.TRUE)


def test_status_names_versions_and_transport():
    shown = status({(0, 0): "rdma"}, "Required")
    assert (shown.engine, shown.connector, shown.transport) == ("sglang 0.5.23", "pdpool 0.1.0", "nixl rdma")
