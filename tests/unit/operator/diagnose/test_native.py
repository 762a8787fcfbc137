"""Ranks without pdpool's connector: lengths from SGLang's `/v1/loads` are all the evidence there is."""

from dataclasses import replace

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.model import Subject, Verdict
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.engines.answers import parse_sglang_loads
from pdpool_operator.observe.samples import EngineSample, RankSample
from pdpool_operator.plan.drain import work_left

from tests.unit.operator.plan.makers import T0, follow_all, make_instance, make_pod, make_pool, seconds

QUEUES = ("decode_prealloc", "decode_transfer", "decode_retracted")
STUCK_AFTER_S = 30

# Written with the fields that SGLang 0.5.23's `/v1/loads?include=all` was seen to have.
ANSWER = b"""{"loads": [{"dp_rank": 0, "num_running_reqs": 1,
"num_waiting_reqs": 0, "disaggregation": {"mode": "decode",
"prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0, "decode_prealloc_queue_reqs": 0,
"decode_transfer_queue_reqs": 2, "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0,
"kv_transfer_latency_ms": 0.0}}]}"""


def sample(at, engine, error=""):
    moment = T0 + seconds(at)
    return RankSample(0, "uid-of-chat-decode-0-0", moment, moment, None, engine, "", error, has_connector=False)


def lengths(running=0, **reqs):
    return EngineSample(running, 0, {name: reqs.get(name.removeprefix("decode_"), 0) for name in QUEUES})


def judge(*samples, at):
    track = follow_all(samples)
    subject = Subject("chat", Role.DECODE, 0, make_pod("chat-decode-0-0"), leaving=False, tracks=(track,))
    (diagnosis,) = diagnose([subject], [], stuck_after_s=STUCK_AFTER_S, now=T0 + seconds(at))
    return diagnosis


def test_answer_of_sglang_gives_lengths_of_own_role():
    (engine,) = parse_sglang_loads(ANSWER, Role.DECODE).values()
    assert engine == EngineSample(1, 0, {"decode_prealloc": 0, "decode_transfer": 2, "decode_retracted": 0})


@pytest.mark.parametrize(
    ("samples", "at", "verdict", "words"),
    [
        ([(0, lengths())], 0, Verdict.IDLE, "nothing waits"),
        ([(0, lengths(running=3))], 0, Verdict.FLOWING, "requests run"),
        ([(0, lengths()), (3, lengths(transfer=2))], 5, Verdict.FLOWING, "requests wait for the KV cache"),
        (
            [(0, lengths()), (3, lengths(transfer=2)), (33, lengths(transfer=2))],
            33,
            Verdict.UNKNOWN,
            "nothing shows",
        ),
        (
            [(0, lengths(prealloc=1)), (40, lengths(prealloc=9))],
            40,
            Verdict.UNKNOWN,
            "or the handshake; nothing",
        ),
        ([(0, lengths(transfer=1)), (20, lengths()), (40, lengths(transfer=1))], 40, Verdict.FLOWING, "requests wait"),
        ([(0, lengths(transfer=1)), (40, None)], 40, Verdict.UNKNOWN, "does not report its queues (timeout)"),
        ([(0, lengths())], 60, Verdict.UNKNOWN, "no sample for 15 s"),
    ],
)
def test_verdict_follows_from_lengths_over_time(samples, at, verdict, words):
    diagnosis = judge(*(sample(when, engine, "" if engine else "timeout") for when, engine in samples), at=at)
    assert diagnosis.verdict is verdict
    assert words in diagnosis.message


def test_a_gap_in_the_answers_does_not_restart_the_clock():
    looks = [sample(0, lengths()), sample(3, lengths(transfer=1)), sample(20, None, "timeout")]
    assert judge(*looks, sample(40, lengths(transfer=1)), at=40).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        (lengths(), ()),
        (lengths(running=2), ("2 running",)),
        (lengths(transfer=1), ("1 in decode_transfer",)),
        (None, ("timeout",)),
    ],
)
def test_drain_without_connector_waits_for_the_engine(engine, left):
    pool = make_pool(Role.DECODE)
    look = sample(10, engine, "" if engine else "timeout")
    instance = replace(make_instance(pool), ranks={0: look}, listed_by=(), drain_seen=T0)
    found = work_left(instance, routed=True)
    assert bool(found) == bool(left)
    assert all(word in found[0] for word in left)
