"""Our sender and receiver in SGLang's environment: prefix in tokens, events, chunks, aborts, refusals."""

import pytest

FAILED, BOOTSTRAPPING = 0, 1


@pytest.fixture(scope="module")
def facts(run_script):
    return {row["name"]: row for row in run_script("halves.py")}


def test_halves_wait_for_each_other(facts):
    assert facts["chunks"]["before"] == [BOOTSTRAPPING, BOOTSTRAPPING]


def test_prefix_is_in_tokens(facts):
    assert facts["chunks"]["prefix"] == 12


def test_send_waits_for_its_event(facts):
    assert facts["chunks"]["early"] == [False, False]


def test_chunks_and_aux_row_land(facts):
    assert (facts["chunks"]["landed"], facts["chunks"]["others"], facts["chunks"]["aux"]) == (True, False, 42)


def test_success_holds_nothing(facts):
    assert not facts["chunks"]["hold"]


def test_failures_have_their_status(facts):
    assert facts["abort"]["answers"] == [[503, False], [502, False]]


def test_decode_keeps_pages_until_clear(facts):
    assert (facts["abort"]["held"], facts["abort"]["after"]) == (1, 0)


def test_room_zero_a_list_of_rooms_and_no_address_fail(facts):
    assert facts["refused"]["polls"] == [FAILED] * 5
    assert "'nowhere'" in facts["refused"]["message"]
