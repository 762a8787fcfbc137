"""What `make faults` counts as right, and how it continues."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from pdpool_operator.api.reasons import Reason

from proof.cluster.page import END, begin_mark, write
from proof.cluster.results import Results
from proof.faults.__main__ import pending
from proof.faults.deeds import PLAYS
from proof.faults.expectation import FILE, Expectation, Mode, read
from proof.faults.report import line, table
from proof.faults.score import Run, Said, confusion, false_repairs, side_right, summary, wrong
from proof.faults.watch import VerdictWatch, complaints
from tests.cluster.stack import Stack

FROZEN = Expectation.model_validate(
    {
        "about": "a decode engine is frozen",
        "verdicts": ["Stuck"],
        "side": "decode",
        "reasons": ["QueuesStuck"],
        "within_s": 35,
        "repair": "Required",
        "may_lose": 3,
    }
)
BURST = Expectation.model_validate({"about": "more clients", "verdicts": [], "repair": "Forbidden", "may_lose": 0})
WANTED = {"decode-frozen": FROZEN, "burst": BURST}
ENFORCED = Run(
    scenario="decode-frozen",
    mode=Mode.ENFORCE,
    number=1,
    guilty="decode/1",
    verdicts=(Said(1.0, "decode/1", "Flowing"), Said(32.7, "decode/1", "Stuck"), Said(33.0, "prefill/0", "Blocked")),
    reasons=(Said(33.0, "decode", "QueuesStuck"),),
    repairs=(Said(33.5, "decode/1", "Intended"), Said(34.0, "decode/1", "Done")),
    asked=100,
    lost=1,
    wrong_tokens=0,
    recover_s=50.7,
)
OBSERVED = dataclasses.replace(
    ENFORCED, mode=Mode.OBSERVE, repairs=(Said(33.5, "decode/1", "Proposed"),), recover_s=80.0
)
CALM = dataclasses.replace(
    ENFORCED,
    scenario="burst",
    guilty="",
    verdicts=(Said(1.0, "decode/1", "Saturated"),),
    reasons=(),
    repairs=(),
    lost=0,
)
INNOCENT_STUCK = (*ENFORCED.verdicts, Said(40.0, "prefill/0", "Stuck"))


AT_LIMITS = dataclasses.replace(
    ENFORCED, lost=3, verdicts=(Said(35.0, "decode/1", "Stuck"),), reasons=(Said(35.0, "decode", "QueuesStuck"),)
)


@pytest.mark.parametrize(
    ("wanted", "run"), [(FROZEN, ENFORCED), (FROZEN, OBSERVED), (FROZEN, AT_LIMITS), (BURST, CALM)]
)
def test_right_run_has_no_faults(wanted: Expectation, run: Run) -> None:
    assert wrong(wanted, run) == []
    assert side_right(wanted, run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"verdicts": ENFORCED.verdicts[:1]}, "verdict Stuck was not given for decode/1"),
        ({"verdicts": (Said(32.7, "decode/0", "Flowing"), Said(35.1, "decode/1", "Stuck"))}, "came after 35.1 s"),
        ({"verdicts": INNOCENT_STUCK}, "prefill/0 is not at fault and was judged Stuck"),
        ({"reasons": (Said(33.0, "prefill", "QueuesStuck"),)}, "reason QueuesStuck was not given"),
        ({"reasons": (Said(36.0, "decode", "QueuesStuck"),)}, "reason QueuesStuck came after 36.0 s"),
        ({"repairs": ()}, "no restart of decode/1 is Done"),
        ({"repairs": (*ENFORCED.repairs, Said(60.0, "prefill/0", "Done"))}, "not at fault: prefill/0 Done"),
        ({"lost": 4}, "4 of 100 requests lost, at most 3"),
        ({"wrong_tokens": 1}, "other tokens"),
        ({"recover_s": None}, "not recovered"),
        ({"failed": "no pod"}, "not played to its end: no pod"),
        ({"asked": 0}, "no request was sent"),
    ],
)
def test_each_fault_fails_run_and_session(change: dict[str, object], reason: str) -> None:
    run = dataclasses.replace(ENFORCED, **change)
    (found,) = wrong(FROZEN, run)
    assert reason in found
    fine, last = summary(WANTED, [run], 1)
    assert not fine
    assert last.startswith("faults failed: scenarios=1 right=0/1 ")


def test_missing_verdict_or_innocent_makes_side_wrong() -> None:
    assert not side_right(FROZEN, dataclasses.replace(ENFORCED, verdicts=ENFORCED.verdicts[:1]))
    assert not side_right(FROZEN, dataclasses.replace(ENFORCED, verdicts=INNOCENT_STUCK))


def test_accusation_in_burst_is_wrong() -> None:
    run = dataclasses.replace(CALM, guilty="decode/1", verdicts=(Said(20.0, "decode/1", "Failing"),))
    (found,) = wrong(BURST, run)
    assert "decode/1 is not at fault" in found
    assert not side_right(BURST, run)


def test_forbidden_reason_is_wrong() -> None:
    wanted = BURST.model_copy(update={"never": (Reason.QUEUES_UNKNOWN,)})
    seen = (Said(12.0, "decode", "Unschedulable"), Said(20.0, "prefill", "QueuesUnknown"))
    assert wrong(wanted, CALM) == []
    assert wrong(wanted, dataclasses.replace(CALM, reasons=seen)) == [
        "reason QueuesUnknown was given for prefill after 20.0 s"
    ]


def test_verdict_on_sibling_is_not_the_verdict() -> None:
    run = dataclasses.replace(ENFORCED, verdicts=(Said(32.7, "decode/0", "Stuck"),))
    assert wrong(FROZEN, run) == [
        "decode/0 is not at fault and was judged Stuck after 32.7 s",
        "verdict Stuck was not given for decode/1",
    ]


PURGED = (Said(33.5, "decode/1", "Purge Intended"), Said(35.0, "decode/1", "Purge Done"))


def test_purge_may_come_before_restart() -> None:
    assert wrong(FROZEN, dataclasses.replace(ENFORCED, repairs=(*PURGED, *ENFORCED.repairs))) == []
    proposed = (Said(33.5, "decode/1", "Purge Proposed"),)
    assert wrong(FROZEN, dataclasses.replace(OBSERVED, repairs=proposed)) == []


def test_purge_is_no_restart() -> None:
    assert wrong(FROZEN, dataclasses.replace(ENFORCED, repairs=PURGED)) == ["no restart of decode/1 is Done"]


def test_restart_of_sibling_is_not_the_repair() -> None:
    run = dataclasses.replace(ENFORCED, repairs=(Said(34.0, "decode/0", "Done"),))
    assert wrong(FROZEN, run) == [
        "repaired or proposed, but not at fault: decode/0 Done",
        "no restart of decode/1 is Done",
    ]
    assert "mttr_p50_s=nan" in summary(WANTED, [run], 1)[1]


class TestFalseRepairs:
    def test_restart_in_observe_is_false(self) -> None:
        run = dataclasses.replace(OBSERVED, repairs=(*OBSERVED.repairs, Said(40.0, "decode/1", "Done")))
        assert false_repairs(FROZEN, run) == [Said(40.0, "decode/1", "Done")]

    def test_proposal_for_innocent_is_false(self) -> None:
        run = dataclasses.replace(OBSERVED, repairs=(*OBSERVED.repairs, Said(40.0, "prefill/1", "Proposed")))
        assert false_repairs(FROZEN, run) == [Said(40.0, "prefill/1", "Proposed")]

    def test_forbidden_restart_of_guilty_is_false(self) -> None:
        run = dataclasses.replace(CALM, guilty="decode/1", repairs=(Said(9.0, "decode/1", "Intended"),))
        assert false_repairs(BURST, run) == [Said(9.0, "decode/1", "Intended")]
        purged = dataclasses.replace(CALM, guilty="decode/1", repairs=PURGED)
        assert false_repairs(BURST, purged) == list(PURGED)
        assert summary(WANTED, [run], 1)[1].endswith("false_repairs=1")


def test_last_line_has_times_of_verdict_and_recovery() -> None:
    fine, last = summary(WANTED, [ENFORCED, OBSERVED, CALM], 3)
    assert fine
    assert last == (
        "faults ok: scenarios=2 right=3/3 side_right=3/3 mttd_p50_s=32.7 mttd_p95_s=32.7 "
        "mttr_p50_s=50.7 mttr_p95_s=50.7 false_repairs=0"
    )


def test_runs_not_played_fail_session() -> None:
    fine, last = summary(WANTED, [ENFORCED], 2)
    assert not fine
    assert last.endswith("false_repairs=0 not_played=1")
    assert not summary(WANTED, [], 0)[0]


def test_confusion_counts_first_accusation() -> None:
    missed = dataclasses.replace(ENFORCED, verdicts=())
    blamed = dataclasses.replace(ENFORCED, verdicts=(Said(9.0, "prefill/1", "Failing"), *ENFORCED.verdicts))
    assert confusion(WANTED, [ENFORCED, missed, blamed, CALM]) == {
        ("decode Stuck", "decode Stuck"): 1,
        ("decode Stuck", "none"): 1,
        ("decode Stuck", "prefill Failing"): 1,
        ("none", "none"): 1,
    }


def test_line_shows_verdict_repair_and_recovery() -> None:
    assert line(FROZEN, ENFORCED) == (
        "decode-frozen Enforce #1: right: decode/1 Stuck after 32.7 s; restarted after 34.0 s; well after 50.7 s; "
        "1 of 100 requests lost"
    )
    assert "repair of decode/1 proposed after 33.5 s" in line(FROZEN, OBSERVED)


def test_table_names_what_was_not_run() -> None:
    text = table(WANTED, [ENFORCED])
    assert "| `decode-frozen` | Enforce | 1 | 1 | 32.7 s | 50.7 s | 1 of 100 |" in text
    assert text.endswith("Not run: `burst`.")


class TestExpectations:
    def test_file_has_exactly_the_scenarios_that_can_be_played(self) -> None:
        assert list(read()) == list(PLAYS)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"within": 3}, "decode-frozen.within: Extra inputs are not permitted"),
            ({"verdicts": ["Stucked"]}, "decode-frozen.verdicts.0: Input should be"),
            ({"verdicts": ["Flowing"]}, "verdicts: Flowing accuses no instance"),
            ({"reasons": ["Broken"]}, "decode-frozen.reasons.0: Input should be"),
            ({"never": ["Broken"]}, "decode-frozen.never.0: Input should be"),
            ({"side": None}, "side and within_s are required"),
            ({"within_s": 0}, "decode-frozen.within_s: Input should be greater than 0"),
            ({"verdicts": [], "reasons": []}, "repair: Required needs verdicts"),
            ({"repair": "Maybe"}, "decode-frozen.repair: Input should be"),
            ({"may_lose": -1}, "decode-frozen.may_lose: Input should be"),
        ],
    )
    def test_fault_names_scenario_and_field(self, tmp_path: Path, change: dict[str, object], message: str) -> None:
        body = yaml.safe_load(FILE.read_text())["decode-frozen"] | change
        file = tmp_path / "faults.yaml"
        file.write_text(yaml.safe_dump({"decode-frozen": body}))
        with pytest.raises(ValueError, match=r"faults.yaml: ") as error:
            read(file)
        assert message in str(error.value)


def test_bad_conditions_are_complaints() -> None:
    conditions = [
        {"type": "Ready", "status": "True", "reason": "Ready"},
        {"type": "QueuesHealthy", "status": "False", "reason": "QueuesStuck"},
        {"type": "Reconciling", "status": "False", "reason": "Ready"},
        {"type": "RepairStopped", "status": "True", "reason": "ManyAtFault"},
    ]
    body = {"status": {"conditions": conditions}}
    assert list(complaints("decode", body)) == [("decode", "QueuesStuck"), ("decode", "ManyAtFault")]


def test_interrupted_session_continues(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(Run, path, "a").add(ENFORCED)
    (kept,) = Results(Run, path, "a").runs
    assert kept == ENFORCED
    todo = pending(["decode-frozen", "burst"], [Mode.ENFORCE], [kept], 2)
    assert [(name, number) for name, _, number in todo] == [("burst", 1), ("decode-frozen", 2), ("burst", 2)]


def test_page_keeps_text_around_results(tmp_path: Path) -> None:
    page = tmp_path / "faults.md"
    page.write_text(f"before\n{begin_mark('faults')}\nold\n{END}\nafter\n")
    write(page, "faults", "| new |", "faults ok: …")
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| new |" in text
    assert "old" not in text
    with pytest.raises(ValueError, match="are missing"):
        write(page, "drills", "", "")


NO_CLUSTER = cast(Stack, None)
"""The tests hand over the versions of the pools themselves."""


def shown(
    verdict: str, *, reason: str = "QueuesStuck", repair: str = "", uid: str = "a", action: str = "Restart"
) -> dict[str, Any]:
    """Return a decode pool in whose status one instance has this verdict."""
    repairs = [{"index": 1, "podUID": uid, "action": action, "state": repair}] if repair else []
    conditions = [{"type": "QueuesHealthy", "status": "False", "reason": reason}]
    instances = [{"index": 1, "verdict": verdict}]
    return {"status": {"instances": instances, "conditions": conditions, "repairs": repairs}}


class TestVerdictWatch:
    def test_words_before_fault_do_not_count(self) -> None:
        watch = VerdictWatch(NO_CLUSTER)
        watch.take("decode", shown("Saturated", reason="QueuesUnknown"))
        watch.fault_now()
        watch.take("decode", shown("Saturated", reason="QueuesUnknown"))
        assert watch.well() == "decode/1 Saturated"
        for _ in range(2):
            watch.take("decode", shown("Stuck"))
        watch.take("prefill", shown("Idle", reason="QueuesUnknown"))
        said = [(one.whom, one.word) for one in watch.verdicts]
        assert said == [("decode/1", "Stuck"), ("prefill/1", "Idle")]
        assert [(one.whom, one.word) for one in watch.reasons] == [
            ("decode", "QueuesStuck"),
            ("prefill", "QueuesUnknown"),
        ]
        assert watch.well() == "decode/1 Stuck"

    def test_purge_is_told_from_restart(self) -> None:
        watch = VerdictWatch(NO_CLUSTER)
        watch.fault_now()
        for action, state in (("Purge", "Intended"), ("Purge", "Done"), ("Restart", "Done")):
            watch.take("decode", shown("Stuck", repair=state, action=action))
        assert [one.word for one in watch.repairs] == ["Purge Intended", "Purge Done", "Done"]

    def test_second_restart_of_index_is_seen(self) -> None:
        watch = VerdictWatch(NO_CLUSTER)
        watch.fault_now()
        for uid, state in (("a", "Intended"), ("a", "Intended"), ("a", "Done"), ("b", "Done")):
            watch.take("decode", shown("Flowing", repair=state, uid=uid))
        assert [one.word for one in watch.repairs] == ["Intended", "Done", "Done"]
        assert watch.well() is None
