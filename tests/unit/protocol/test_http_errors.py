"""Every cause has one answer, the same on both sides and in the documentation."""

import re
from pathlib import Path

import pytest
from pdpool_connector.protocol.http_errors import ANSWERS, Answer, client_answer
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

PAGE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"


def test_documented_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert {Cause(cause): (int(status), code) for cause, status, code in rows} == ANSWERS
    assert set(ANSWERS) == set(Cause)


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_own_code_and_message(cause) -> None:
    answer = client_answer(TransferStatus(Phase.FAILED, cause, "because"))
    assert 400 <= answer.status <= 599
    assert answer.message == "the hand-off failed: because"
    assert [code for _, code in ANSWERS.values()].count(answer.code) == 1


def test_only_hopeless_requests_are_not_retried() -> None:
    passed_on = {400, 404}
    assert {cause for cause, (status, _) in ANSWERS.items() if status in passed_on} == {Cause.TOO_LONG, Cause.INVALID}


def test_status_without_cause_is_failure_of_other_rank() -> None:
    answer = client_answer(TransferStatus(Phase.TRANSFERRING))
    assert (answer.status, answer.code) == (502, "peer_rank_failed")
    assert "another rank" in answer.message


def test_failure_without_message_names_its_code() -> None:
    assert client_answer(TransferStatus(Phase.FAILED, Cause.CORRUPT)) == Answer(
        502, "transfer_corrupt", "the hand-off failed: transfer_corrupt"
    )
