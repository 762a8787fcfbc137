"""A kubeconfig that cannot be used is named in one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from pdpool_kubectl.cli import cli

USABLE = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
}


def with_user(**user: object) -> bytes:
    return json.dumps(USABLE | {"users": [{"name": "u", "user": user}]}).encode()


UNUSABLE = {
    "not YAML": b"{{{",
    "empty": b"",
    "text": b"hello",
    "list": b"[]",
    "binary": b"\xff\xfe\x00",
    "no context": json.dumps(USABLE | {"contexts": []}).encode(),
    "context without a name": json.dumps(USABLE | {"contexts": [{}]}).encode(),
    "auth-provider of another time": with_user(**{"auth-provider": {"name": "gcp"}}),
    "bad certificate": with_user(**{"client-certificate-data": "aGVsbG8=", "client-key-data": "aGVsbG8="}),
}


@pytest.mark.parametrize("command", [("status",), ("record", "x.json"), ("drain", "chat-decode-0"), ("doctor",)])
@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_kubeconfig_is_named(tmp_path: Path, case: str, command: tuple[str, ...]) -> None:
    file = tmp_path / "kubeconfig"
    file.write_bytes(UNUSABLE[case])
    result = CliRunner().invoke(cli, [*command, "--kubeconfig", str(file)])
    assert result.exit_code == 3, result.exception
    assert result.stderr.startswith(f"Error: the kubeconfig {file} cannot be used: ")
    assert result.stdout == ""
