"""The command that a hint names: it installs from where pdpool came from."""

import json
from types import SimpleNamespace

import pytest
from pdpool_connector import installed


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        (
            {"url": "file:///d/my%20wheels/pdpool-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/d/my wheels/pdpool-0.1.0-py3-none-any.whl[demo]'",
        ),
        ({"url": "file:///checkout", "dir_info": {"editable": True}}, "pip install -e '/checkout[demo]'"),
        ({"url": "file:///checkout", "dir_info": {}}, "pip install '/checkout[demo]'"),
        ({"url": "https://h/pdpool.whl", "archive_info": {}}, "pip install 'pdpool[demo] @ https://h/pdpool.whl'"),
        (None, "pip install 'WHEEL[demo]'"),
        ({"no": "url"}, "pip install 'WHEEL[demo]'"),
    ],
    ids=str,
)
def test_hint_names_the_source_of_the_installation(monkeypatch, recorded, command):
    text = None if recorded is None else json.dumps(recorded)
    found = SimpleNamespace(read_text=lambda _name: text)
    monkeypatch.setattr(installed.importlib.metadata, "distribution", lambda _name: found)
    assert installed.install_command("demo") == command


def test_hint_of_a_bare_checkout_has_a_placeholder(monkeypatch):
    monkeypatch.setattr(installed.importlib.metadata, "distribution", _raise)
    assert installed.install_command("otel") == "pip install 'WHEEL[otel]'"


def _raise(name):
    raise installed.importlib.metadata.PackageNotFoundError(name)
