"""The command lines: defaults that depend on others, what is refused, what to install."""

import socket
import sys
from importlib.metadata import version

import pytest
from click.testing import CliRunner
from pdpool_connector.cli import main
from pdpool_connector.installed import install_command
from pdpool_reference.options import engine_options, make_options
from pdpool_reference.server_process import run_engine


def parse(*arguments, env=None):
    """Options that a command line gives, or the result of the refusal."""
    import click

    made = []

    @click.command()
    @engine_options
    def command(**values):
        made.append(make_options(values))

    result = CliRunner().invoke(command, arguments, env=env)
    return made[0] if made else result


def test_name_defaults_to_that_of_directory():
    assert parse("--model-path", "/models/smollm2").served_model_name == "smollm2"
    assert parse("--model-path", "/models/smollm2", "--served-model-name", "x").served_model_name == "x"


def test_role_and_address_come_from_the_pod():
    options = parse(
        "--model-path", "tiny", "--host", "0.0.0.0", env={"PDPOOL_ROLE": "decode", "PDPOOL_POD_IP": "10.0.0.7"}
    )
    assert (options.mode, options.advertise_host, options.host) == ("decode", "10.0.0.7", "0.0.0.0")


def test_an_address_that_peers_cannot_use_is_refused():
    result = parse("--model-path", "tiny", "--mode", "prefill", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "--advertise-host" in result.output


def test_admin_socket_of_unified_engine_is_refused():
    result = parse("--model-path", "tiny", "--admin-socket", "/tmp/admin.sock")
    assert result.exit_code == 2
    assert "--admin-socket needs --mode prefill or decode" in result.output


@pytest.mark.parametrize(
    "wrong", [["--port", "70000"], ["--mode", "both"], ["--kv-pages", "0"], ["--transfer-backend", "pigeon"], []]
)
def test_values_that_cannot_work_are_refused(wrong):
    model = ["--model-path", "tiny"] if wrong else []
    result = parse(*model, *wrong)
    assert result.exit_code == 2
    assert (wrong or ["--model-path"])[0] in result.output


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["demo"], "pdpool_reference.demo.story"),
        (["engine", "--model-path", "tiny"], "pdpool_reference.server_process"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, command, module):
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert install_command("demo") in result.output


def test_missing_model_is_one_line_of_log(caplog):
    assert run_engine(parse("--model-path", "/no/such/model")) == 1
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.message.startswith("the engine cannot start: no model at /no/such/model: No such file or directory")
    assert not error.exc_info


def test_taken_port_is_named(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_engine(parse("--model-path", "tiny", "--port", str(port))) == 1
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert str(port) in error.message
    assert not error.exc_info


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(main, ["--version"], prog_name="pdpool")
    assert result.output == f"pdpool, version {version('pdpool')}\n"
