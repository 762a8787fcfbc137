"""The file of `plan`: documents of another shape are named, and dates are text."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.fake_api import Call, FakeApi

from .conftest import Kubectl

HEAD = "apiVersion: pdpool.dev/v1alpha1\nkind: DecodePool\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEAD}metadata: {{name: chat, namespace: 7}}", "metadata.namespace must be text, not 7"),
        (f"{HEAD}metadata: {{name: chat, annotations: [a]}}", "metadata.annotations must be an object, not ['a']"),
        (f"{HEAD}metadata: {{name: chat}}\nspec: [a]", "spec must be an object, not ['a']"),
        (f"{HEAD}metadata: {{name: chat}}\nspec: abc", "spec must be an object, not 'abc'"),
        (f"{HEAD}metadata: {{name: chat}}\nspec: {{model: !!binary aGk=}}", "has a value that JSON has not"),
        (f"{HEAD}metadata: {{name: chat}}\nspec: &a {{model: *a}}", "has a value that JSON has not"),
        ("kind: [a]\nmetadata: {name: chat}", "['a'] chat: the kind must be one of PrefillPool"),
        ("[a]", "each document must be an object with kind and metadata.name"),
        ("[" * 5000, "not YAML"),
        ("", "the file holds no objects"),
    ],
)
async def test_document_of_another_shape_is_exit_code_2(
    api: FakeApi, kubectl: Kubectl, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    result = await kubectl("plan", "-f", str(path))
    assert result.exit_code == 2, result.exception
    assert words in result.stderr
    assert not api.calls


@pytest.mark.parametrize("date", ["2026-11-21", "2026-13-41", "2026-11-21T12:00:00Z"])
async def test_unquoted_date_is_text_as_for_kubectl(api: FakeApi, kubectl: Kubectl, tmp_path: Path, date: str) -> None:
    sent: list[Any] = []

    async def note(request: web.Request, call: Call) -> None:
        if call.verb == "patch":
            sent.append((await request.json())["metadata"]["annotations"])

    api.fault = note
    path = tmp_path / "date.yaml"
    path.write_text(f"{HEAD}metadata: {{name: chat, annotations: {{since: {date}}}}}\nspec: {{model: {{path: tiny}}}}")
    result = await kubectl("plan", "-f", str(path))
    assert result.exit_code == 0, result.output
    assert sent == [{"since": date}]
