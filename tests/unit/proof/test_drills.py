"""What drills count as a word, as right, and as done."""

import dataclasses
import json
from pathlib import Path

import pytest
from pdpool_operator.api.reasons import ConditionType, Reason

from proof.cluster.percentile import percentile
from proof.cluster.results import Results
from proof.cluster.words import Expected, alert_words, condition_words, event_word
from proof.drills.__main__ import pending
from proof.drills.catalogue import DRILLS
from proof.drills.verdict import Run, faults, missing_words, summary, unexpected_words

FAILING = Expected(("dpool QueuesHealthy=False RequestsFailing", "alert PdpoolInstanceFailing"))
RIGHT = Run(
    drill="failing-decode",
    number=1,
    asked=100,
    lost=0,
    wrong_tokens=0,
    words=("dpool Ready=True Ready", "dpool QueuesHealthy=False RequestsFailing", "alert PdpoolInstanceFailing"),
    stuck_after=0,
    recover_s=3.0,
)


def test_right_run_has_no_faults() -> None:
    assert faults(FAILING, RIGHT) == []
    assert summary({"failing-decode": FAILING}, [RIGHT], 1) == (
        True,
        "drills ok: drills=1 runs=1 lost=0 wrong_words=0 wrong_tokens=0 stuck_after=0 recover_p95_s=3.0",
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"words": RIGHT.words[:2]}, "not given: alert PdpoolInstanceFailing"),
        ({"words": (*RIGHT.words, "ppool QueuesHealthy=False QueuesStuck")}, "not expected: ppool"),
        ({"lost": 1}, "1 of 100 requests lost, at most 0"),
        ({"wrong_tokens": 1}, "other tokens"),
        ({"stuck_after": 2}, "2 engines still hold"),
        ({"recover_s": None}, "not recovered"),
        ({"failed": "no pod"}, "not played to its end: no pod"),
        ({"asked": 0}, "no request was sent"),
    ],
)
def test_each_fault_fails_run_and_session(change: dict[str, object], reason: str) -> None:
    run = dataclasses.replace(RIGHT, **change)
    (found,) = faults(FAILING, run)
    assert reason in found
    fine, line = summary({"failing-decode": FAILING}, [run], 1)
    assert not fine
    assert line.startswith("drills failed: ")


def test_missing_runs_make_session_incomplete() -> None:
    fine, line = summary({"failing-decode": FAILING}, [RIGHT], 2)
    assert not fine
    assert line.startswith("drills incomplete: drills=1 runs=1 ")
    assert summary({"failing-decode": FAILING}, [], 1)[0] is False


def test_last_line_counts_words_and_excess_losses() -> None:
    run = dataclasses.replace(RIGHT, words=("alert PdpoolOperatorDown",), lost=5)
    expected = dataclasses.replace(FAILING, may_lose=3)
    _, line = summary({"failing-decode": expected}, [run, RIGHT], 1)
    assert "runs=2 lost=2 wrong_words=3 " in line


def test_word_must_match_as_whole() -> None:
    words = ("dpool QueuesHealthy=False RequestsFailingNot", "alert PdpoolInstanceFailing")
    assert missing_words(FAILING, words) == ["dpool QueuesHealthy=False RequestsFailing"]
    assert unexpected_words(FAILING, words) == ["dpool QueuesHealthy=False RequestsFailingNot"]


def test_percentile_is_smallest_sufficient_value() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.34, 0.95)] == [1.0, 2.0, 3.0]


def test_words_name_kind_condition_and_reason() -> None:
    body = {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotReady"}]}}
    assert list(condition_words("dpool", body)) == ["dpool Ready=False NodeNotReady"]
    assert event_word({"regarding": {"kind": "PrefillPool"}, "reason": "FencedPeer"}) == "event ppool FencedPeer"
    assert event_word({"regarding": {"kind": "Pod"}, "reason": "Killing"}) is None
    alerts = [{"state": state, "labels": {"alertname": state}} for state in ("firing", "pending")]
    assert list(alert_words(alerts)) == ["alert firing"]


def test_catalogue_expects_only_words_that_exist() -> None:
    rules = (Path(__file__).parents[3] / "charts/pdpool/files/rules/pdpool.rules.yaml").read_text()
    alerts = [line.split()[-1] for line in rules.splitlines() if "- alert:" in line]
    known = {f"alert {name}" for name in alerts}
    for kind in ("ppool", "dpool", "pdsvc"):
        known |= {f"event {kind} {reason}" for reason in Reason}
        known |= {
            f"{kind} {type_}={status} {reason}"
            for type_ in ConditionType
            for status in ("True", "False", "Unknown")
            for reason in Reason
        }
    for drill in DRILLS:
        assert missing_words(drill.expected, sorted(known)) == [], drill.name
        possible = Expected(drill.expected.may)
        assert missing_words(possible, sorted(known)) == [], drill.name


class TestResults:
    def test_interrupted_session_continues(self, tmp_path: Path) -> None:
        path = tmp_path / "results.jsonl"
        Results(Run, path, "a").add(RIGHT)
        path.write_text(path.read_text() + '{"drill": "half')
        again = Results(Run, path, "a")
        assert again.runs == [RIGHT]
        again.add(dataclasses.replace(RIGHT, number=2))
        assert [run.number for run in Results(Run, path, "a").runs] == [1, 2]
        assert [json.loads(line)["digest"] for line in path.read_text().splitlines() if line.endswith("}")] == [
            "a",
            "a",
        ]

    def test_other_code_starts_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "results.jsonl"
        Results(Run, path, "a").add(RIGHT)
        assert Results(Run, path, "b").runs == []

    @pytest.mark.parametrize("fresh", [True, False])
    def test_finished_session_stays_closed(self, tmp_path: Path, fresh: bool) -> None:
        path = tmp_path / "results.jsonl"
        first = Results(Run, path, "a")
        first.add(RIGHT)
        if fresh:
            Results(Run, path, "a", fresh=True)
        else:
            first.finish()
        assert Results(Run, path, "a").runs == []

    def test_first_runs_come_before_second(self, tmp_path: Path) -> None:
        results = Results(Run, tmp_path / "results.jsonl", "a")
        results.add(dataclasses.replace(RIGHT, drill=DRILLS[0].name))
        todo = [(one.name, number) for one, number in pending(DRILLS[:2], results, 2)]
        assert todo == [(DRILLS[1].name, 1), (DRILLS[0].name, 2), (DRILLS[1].name, 2)]
