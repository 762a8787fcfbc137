"""Every cause has one answer, the same on both sides, and the page that documents them says so."""

import re
from pathlib import Path

import pytest
from pdpool_connector.protocol.http_errors import ANSWERS, Answer, client_answer
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

PAGE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"


def test_the_documented_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert {Cause(cause): (int(status), code) for cause, status, code in rows} == ANSWERS
    assert set(ANSWERS) == set(Cause)


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_is_an_error_with_a_code_of_its_own_and_its_message(cause) -> None:
    answer = client_answer(TransferStatus(Phase.FAILED, cause, "because"))
    assert 400 <= answer.status <= 599
    assert answer.message == "the hand-off failed: because"
    assert [code for _, code in ANSWERS.values()].count(answer.code) == 1


def test_the_router_tries_again_what_may_succeed_elsewhere_only() -> None:
    retried = {500, 502, 503, 504}
    assert {cause for cause, (status, _) in ANSWERS.items() if status not in retried} == {
        Cause.SUPERSEDED,
        Cause.CONFLICT,
        Cause.TOO_LONG,
    }


def test_a_hand_off_that_has_not_failed_has_no_answer() -> None:
    with pytest.raises(ValueError, match="done"):
        client_answer(TransferStatus(Phase.DONE))


def test_a_failure_without_a_message_names_its_code() -> None:
    assert client_answer(TransferStatus(Phase.FAILED, Cause.CORRUPT)) == Answer(
        502, "transfer_corrupt", "the hand-off failed: transfer_corrupt"
    )
