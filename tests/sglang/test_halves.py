"""Our sender and receiver in SGLang's environment: prefix in tokens, events, chunks, aborts, refusals."""

import json
import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
FAILED, BOOTSTRAPPING = 0, 1


@pytest.fixture(scope="module")
def facts(engines):
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT / "connector"), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [engines / "venv/bin/python", Path(__file__).with_name("halves.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


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


def test_room_zero_and_no_address_fail(facts):
    assert facts["refused"]["polls"] == [FAILED] * 3
    assert "'nowhere'" in facts["refused"]["message"]
