"""Engines that cannot reach each other while the operator reaches both: who leaves the rotation, and what is said."""

import json
from dataclasses import replace
from itertools import product

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.evidence import STALE_S
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.reach import with_cuts
from pdpool_operator.diagnose.track import follow
from pdpool_operator.observe.connector_state import parse_state
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.plan.model import Plan
from pdpool_operator.status.pool import PoolFacts, pool_status

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pod, make_pool, seconds

SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2))


def state(silent=()):
    """A connector's `/v1/state`. `silent`: addresses of prefills that do not answer it."""
    links = [{"address": "10.1.0.99:8998", "state": "linked"}]
    links += [{"address": one, "state": "silent", "failing_s": 12.0} for one in silent]
    return json.dumps({"incarnation": "ab" * 16, "queues": {}, "links": links}).encode()


def subject(role, index, silent=(), *, ip=None, ranks=1):
    uid, host = f"uid-{role}-{index}", "10.1.0" if role is Role.PREFILL else "10.2.0"
    tracks = tuple(
        follow(None, RankSample(rank, uid, T0, T0, parse_state(state(silent)), None)) for rank in range(ranks)
    )
    pod = make_pod(f"chat-{role}-{index}-0", uid=uid, ip=ip or f"{host}.{index}", node=f"node-{index}")
    return Subject("chat", role, index, pod, leaving=False, tracks=tracks)


def fleet(prefills, decodes, cuts):
    """Instances of both sides. `cuts`: pairs (prefill, decode)."""
    return (
        [subject(Role.PREFILL, p) for p in range(prefills)],
        [subject(Role.DECODE, d, [f"10.1.0.{p}:8998" for p, e in cuts if e == d]) for d in range(decodes)],
    )


def judged(own, others, now=T0, out=()):
    return with_cuts([Diagnosis(one, Verdict.IDLE, "") for one in own], others, out, now)


def avoided(prefills, decodes, now=T0, out=()):
    """Who leaves the rotation, by the judgement of both pools. `out`: UIDs that are out for another cause."""
    both = (*judged(prefills, decodes, now, out), *judged(decodes, prefills, now, out))
    return {diagnosis.subject.name.removeprefix("chat-") for diagnosis in both if diagnosis.avoided and diagnosis.out}


@pytest.mark.parametrize(
    ("size", "cuts", "expected"),
    [
        ((2, 2), [(1, 1)], {"decode-1"}),
        ((2, 1), [(1, 0)], {"prefill-1"}),
        ((2, 2), [(1, 0), (1, 1)], {"prefill-1"}),
        ((2, 2), [(0, 1), (1, 1)], {"decode-1"}),
        ((3, 3), [(0, 0), (1, 1)], {"decode-0", "decode-1"}),
        ((1, 1), [(0, 0)], set()),
        ((2, 2), [(0, 0), (0, 1), (1, 0), (1, 1)], set()),
        ((2, 2), [], set()),
    ],
)
def test_fewest_leave_the_rotation(size, cuts, expected):
    assert avoided(*fleet(*size, cuts)) == expected


@pytest.mark.parametrize("size", SIZES)
def test_all_cuts_are_avoided_or_nobody_leaves(size):
    pairs = list(product(range(size[0]), range(size[1])))
    for chosen in product((False, True), repeat=len(pairs)):
        cuts = [pair for pair, cut in zip(pairs, chosen, strict=True) if cut]
        out = avoided(*fleet(*size, cuts))
        if out:
            assert all({f"prefill-{p}", f"decode-{d}"} & out for p, d in cuts)
            assert sum(name.startswith("prefill") for name in out) < size[0]
            assert sum(name.startswith("decode") for name in out) < size[1]


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ({"uid-decode-0"}, {"prefill-1"}),
        ({"uid-decode-1"}, set()),
        ({"uid-prefill-1"}, set()),
        ({"uid-prefill-0"}, {"decode-1"}),
        ({"uid-prefill-0", "uid-decode-0"}, set()),
        ({"uid-decode-0", "uid-decode-1"}, {"decode-1"}),
    ],
)
def test_instance_that_is_out_already_serves_no_more(out, expected):
    assert avoided(*fleet(2, 2, [(1, 1)]), out=out) == expected


def test_address_may_be_ipv6():
    prefills = [subject(Role.PREFILL, 0, ip="fd00::7"), subject(Role.PREFILL, 1)]
    assert avoided(prefills, [subject(Role.DECODE, 0, ["[fd00::7]:8998"])]) == {"prefill-0"}


def test_each_rank_counts():
    prefills, (decode,) = fleet(2, 1, [])
    (cut,) = subject(Role.DECODE, 0, ["10.1.0.1:8998"]).tracks
    assert avoided(prefills, [replace(decode, tracks=(*decode.tracks, cut))]) == {"prefill-1"}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    "state_of",
    [
        lambda one: replace(one, pod=replace(one.pod, ready=False)),
        lambda one: replace(one, pod=replace(one.pod, terminating=True)),
        lambda one: replace(one, pod=None, tracks=()),
        lambda one: replace(one, leaving=True),
        lambda one: replace(one, tracks=()),
    ],
    ids=["not Ready", "terminating", "gone", "leaving", "never sampled"],
)
def test_end_that_does_not_serve_is_no_cut(side, state_of):
    prefills, decodes = fleet(2, 2, [(1, 1)])
    ends = prefills if side == "prefill" else decodes
    ends[1] = state_of(ends[1])
    assert avoided(prefills, decodes) == set()


def test_end_that_answers_the_operator_no_more_is_no_cut():
    assert avoided(*fleet(2, 2, [(1, 1)]), now=T0 + seconds(STALE_S)) == {"decode-1"}
    assert avoided(*fleet(2, 2, [(1, 1)]), now=T0 + seconds(STALE_S + 1)) == set()


def test_both_pools_say_who_cannot_reach_whom():
    prefills, decodes = fleet(2, 2, [(1, 1)])
    for role, own, others, out in ((Role.PREFILL, prefills, decodes, False), (Role.DECODE, decodes, prefills, True)):
        pool = make_pool(role, replicas=2)
        observed = make_observed(pool, *(make_instance(pool, index) for index in range(2)))
        status = pool_status(PoolFacts(observed, Plan(), judged(own, others), T0))
        (said,) = [one for one in status.conditions if one.type == "PeersUnreachable"]
        assert (said.status, said.reason) == ("True", "PeerSilent")
        assert "chat-decode-1 on node-1 gets no answer from chat-prefill-1 on node-1" in said.message
        assert ("chat-decode-1 left the rotation" in said.message) == out


def test_no_cut_says_nothing():
    pool = make_pool()
    status = pool_status(PoolFacts(make_observed(pool, make_instance(pool)), Plan(), judged(*fleet(1, 1, [])), T0))
    assert not [one for one in status.conditions if one.type == "PeersUnreachable"]
