"""`replay` of files that are no recording, or that were edited by hand: the message names the field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pdpool_kubectl.cli import cli
from pdpool_kubectl.recording import FORMAT, RecordingError, load
from pdpool_kubectl.replay import replay
from pdpool_operator.api.names import Role

from .conftest import lasting, role_of, run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", f"the field format must be '{FORMAT}' or 'pdpool-recording/1', not None"),
        ('{"format": "pdpool-recording/9"}', "not 'pdpool-recording/9'"),
        ('{"format": ["pdpool-recording/1"]}', "not ['pdpool-recording/1']"),
        ("", "not complete JSON: Expecting value: line 1 column 1"),
        ("look 1", "not complete JSON: Expecting value: line 1 column 1"),
        ("[" * 100_000, "not complete JSON: "),
        (f'{{"format": "{FORMAT}",\n"looks": [{{"at": "2026', "not complete JSON: Unterminated string"),
        ("\0", "not complete JSON: "),
        (f'{{"format": "{FORMAT}"}}', ".looks is missing"),
        (f'{{"format": "{FORMAT}", "looks": []}}', ".looks: List should have at least 1 item"),
        (f'{{"format": "{FORMAT}", "looks": [{{"when": 1}}]}}', ".looks[0].at is missing"),
        (f'{{"format": "{FORMAT}", "looks": [{{"at": 1}}]}}', ".looks[0].at: must be a valid string, not 1"),
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "foreign.json"
    file.write_text(text)
    assert message in refusal(file)


def refusal(file: Path) -> str:
    """Replay a file that is no recording, and return the message."""
    result = CliRunner().invoke(cli, ["replay", str(file)])
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith(f"Error: {file}: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.json"
    file.write_bytes(b"\x1f\x8b\xff")
    assert "not complete JSON: 'utf-8' codec can't decode" in refusal(file)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each value in a JSON document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


WRONG = (None, 7, "x", [], [7], {"x": 7})


def test_any_edit_is_replayed_or_refused_with_its_place(recorded: Path) -> None:
    """Each value is left out, and replaced by values of other types."""
    lasting(recorded, 0.1)
    whole = recorded.read_text()
    refused = []
    for *above, last in places(json.loads(whole)):
        for wrong in (..., *WRONG):
            body = json.loads(whole)
            parent = body
            for key in above:
                parent = parent[key]
            if wrong is ...:
                del parent[last]
            else:
                parent[last] = wrong
            recorded.write_text(json.dumps(body))
            try:
                list(replay(load(recorded)))
            except RecordingError as error:
                refused.append(str(error).removeprefix(f"{recorded}: "))
    assert len(refused) > 100
    assert [words for words in refused if not words.startswith((".looks", "the field format "))] == []


def decode_answers(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the answers of the decode pod in the second look, under their path."""
    look = body["looks"][1]
    uid = next(pod["metadata"]["uid"] for pod in look["pods"] if role_of(pod) == Role.DECODE)
    return f'.looks[1].answers["{uid}"]', look["answers"][uid]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ({}, ": must have one of the fields body, text and error, not {}"),
        ({"body": {}, "error": "x"}, ": must have one of the fields body, text and error, not {'body'"),
        ({"text": 7}, ".text: must be a valid string, not 7"),
        (None, ": must be an object, not None"),
    ],
)
def test_answer_without_a_body_is_named(recorded: Path, answer: Any, fault: str) -> None:
    lasting(recorded, 0.1, 0.1)
    body = json.loads(recorded.read_text())
    path, answers = decode_answers(body)
    answers["connectors"][0] = answer
    recorded.write_text(json.dumps(body))
    assert f"{path}.connectors[0]{fault}" in refusal(recorded)


@pytest.mark.parametrize("at", ["2026-11-21T12:00:00", "yesterday", ""])
def test_time_without_a_zone_is_named(recorded: Path, at: str) -> None:
    lasting(recorded, 0.1, 0.1)
    body = json.loads(recorded.read_text())
    path, answers = decode_answers(body)
    answers["asked_at"] = at
    recorded.write_text(json.dumps(body))
    assert f"{path}.asked_at: must be a time with a zone, such as 2026-11-21T12:00:00+00:00, not {at!r}" in refusal(
        recorded
    )


def test_time_that_goes_backwards_is_named(recorded: Path) -> None:
    lasting(recorded, 0.1, 0.1, 0.1)
    body = json.loads(recorded.read_text())
    body["looks"][1]["at"], body["looks"][2]["at"] = body["looks"][2]["at"], body["looks"][1]["at"]
    recorded.write_text(json.dumps(body))
    assert ".looks[2].at: must not be before that of the look before" in refusal(recorded)


@pytest.mark.parametrize("words", [(), ("--as-test", "x.py")])
def test_folder_is_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, output = run("replay", str(tmp_path), *words)
    assert code == 2
    assert "is a directory" in output
