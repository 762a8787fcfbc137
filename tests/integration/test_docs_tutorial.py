"""The files of docs/integrate-an-engine.md run as they stand there and print what the page says."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.paths import CHECKOUT
from tests.integration.ports import KeptPort

PAGE = (CHECKOUT / "docs" / "integrate-an-engine.md").read_text(encoding="utf-8")
NAMED = re.compile(r"^```python\n# (\w+\.py)(, continued|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^python (\w+\.py) +# (.*)$", re.MULTILINE)
"""Commands of the page with their output."""


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a reader who saved every file, with free ports in place of the page's."""
    folder = tmp_path_factory.mktemp("tutorial")
    ports = {number: KeptPort() for number in ("8998", "8999")}
    for name, _, text in NAMED.findall(PAGE):
        for number, port in ports.items():
            text = text.replace(number, str(port.number))
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(text)
    yield folder
    for port in ports.values():
        port.close()


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(CHECKOUT / "connector"), str(folder)])}
    return subprocess.Popen([sys.executable, name], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out


def test_first_handoff_prints_the_documented_lines(tutorial: Path) -> None:
    with start(tutorial, "prefill.py") as prefill:
        assert prefill.stdout is not None
        assert prefill.stdout.readline().startswith("bootstrap address: 127.0.0.1:")
        with start(tutorial, "decode.py") as decode:
            assert f"```\n{output(decode)}```\n" in PAGE
        assert output(prefill) == "prefill: done pages may be reused\n"


def test_page_documents_the_output_of_programs() -> None:
    assert {name for name, _ in PRINTED.findall(PAGE)} == {"loop.py", "ranks.py", "agree.py", "drain.py"}


@pytest.mark.parametrize(("name", "line"), PRINTED.findall(PAGE))
def test_program_prints_the_documented_line(tutorial: Path, name: str, line: str) -> None:
    with start(tutorial, name) as process:
        assert output(process) == line + "\n"
