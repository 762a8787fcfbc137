"""An engine put together: in what order it ends."""

import threading

from click.testing import CliRunner
from pdpool_reference import server_engine
from pdpool_reference.options import engine_options, make_options
from pdpool_reference.server_engine import Engine

WAIT_S = 20.0


def options_of(*arguments):
    import click

    made = []

    @click.command()
    @engine_options
    def command(**values):
        made.append(make_options(values))

    ports = [word for name in ("--bootstrap-port", "--control-port", "--admin-port") for word in (name, "0")]
    arguments = ("--model-path", "tiny", "--transfer-backend", "local", "--kv-pages", "16", *ports, *arguments)
    assert CliRunner().invoke(command, arguments).exit_code == 0
    return made[0]


def test_connector_closes_before_long_step_ends(monkeypatch, caplog):
    monkeypatch.setattr(server_engine, "TURN_S", 0.0)
    engine = Engine(options_of("--mode", "prefill"), crashed=lambda: None)
    engine.start()
    begun, over = threading.Event(), threading.Event()
    close = engine.connector.close

    def step(_core):
        begun.set()
        assert over.wait(WAIT_S)

    def closing(timeout_s):
        close(timeout_s)
        over.set()

    monkeypatch.setattr(engine.connector, "close", closing)
    engine.scheduler.call(step)
    assert begun.wait(WAIT_S)
    engine.stop()
    assert engine.scheduler.join(0)
    assert "did not stop" not in caplog.text
