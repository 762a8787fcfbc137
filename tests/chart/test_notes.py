"""NOTES.txt, which Helm prints after an installation."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import CHART

Notes = Callable[[dict[str, Any]], str]
AS_OBJECT = 'notes: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n'


@pytest.fixture
def notes(helm: Path, tmp_path: Path) -> Notes:
    """Render the notes with values. `helm template` leaves them out, so a copy of the chart has them as a template."""
    chart = tmp_path / "pdpool"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "NOTES.txt")
    (chart / "templates" / "notes.yaml").write_text(AS_OBJECT)

    def render(values: dict[str, Any]) -> str:
        command = [str(helm), "template", "pdpool", str(chart), "-s", "templates/notes.yaml", "--values", "-"]
        text = yaml.safe_dump(values)
        run = subprocess.run(command, input=text, capture_output=True, text=True, timeout=240, check=True)
        return str(yaml.safe_load(run.stdout)["notes"])

    return render


def test_default_notes_lead_to_pools(notes: Notes) -> None:
    text = notes({})
    assert "kubectl apply -f examples/chat.yaml" in text
    assert "After an uninstall, pools keep serving" in text
    assert "watch" not in text.partition("Next:")[2]


def test_notes_of_a_watcher_name_no_pools(notes: Notes) -> None:
    text = notes({"rbac": {"watchOnly": True}})
    assert "kubectl apply -f examples/watch-a-fleet.yaml" in text
    assert "Pools and routers cannot run" in text
    assert "chat.yaml" not in text
    assert "uninstall" not in text


def test_notes_without_roles_name_the_account(notes: Notes) -> None:
    assert "grant pdpool-operator what files/rbac.yaml of the chart lists" in notes({"rbac": {"create": False}})
