"""`pdpool demo` on this machine: an answer, a URL, and no process left however it ends."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pdpool_reference.demo import launch
from pdpool_reference.demo.launch import LOGS_PREFIX, Children, LaunchError, remove_abandoned_logs

from tests.integration.asking import web
from tests.waiting import until

COMMAND = [sys.executable, "-m", "pdpool_connector.cli", "demo", "--model", "tiny", "--transfer-backend", "local"]
START_S = 120


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def hear_ctrl_c():
    """As at a terminal: what a shell starts in the background ignores it, and so does all that this starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def demo(tmp_path):
    """A demo that has answered and stays. Its process, the URL that it printed, and its children."""
    # Logs in a directory of its own: the next demo removes those of a demo that has ended.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, preexec_fn=hear_ctrl_c
    ) as process:
        try:
            seen = ""
            while "Ctrl-C ends everything." not in seen:
                line = process.stdout.readline()
                assert line, f"the demo ended early:\n{seen}"
                seen += line
            url = re.search(r"OpenAI-compatible URL: (\S+)", seen)[1]
            children = children_of(process.pid)
            assert len(children) == 3
            yield process, url, children
        finally:
            process.kill()


def test_demo_answers_once_and_ends():
    done = subprocess.run(
        [*COMMAND, "--once", "Are you there?"], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> Are you there?" in done.stdout
    moved = re.search(r"([\d,]+) bytes of KV cache moved", done.stdout)
    assert int(moved[1].replace(",", "")) > 0
    assert "all processes have ended" in done.stdout


def test_demo_serves_until_ctrl_c(demo):
    process, url, children = demo
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert web.post(url + "/chat/completions", json=body, timeout=120).status_code == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not any(alive(child) for child in children)


def test_missing_backend_is_named_without_traceback(tmp_path):
    (tmp_path / "nixl_cu12.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [*COMMAND[:-1], "nixl", "--once"],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1
    hint, where = done.stdout[done.stdout.index("failed:") :].splitlines()[1:3]
    assert "NIXL cannot be imported" in hint
    assert "not here" in hint
    assert "pip install --no-deps nixl-cu12" in hint
    assert "Traceback" not in done.stdout + done.stderr
    assert Path(where.removeprefix("its whole log: ")).is_file()


def test_logs_of_ended_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    names = [f"{LOGS_PREFIX}{gone.pid}-abc", f"{LOGS_PREFIX}{os.getpid()}-def", "pdpool-logs-of-somebody"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "0-prefill.log").touch()
    remove_abandoned_logs()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_survives_the_demo(demo, number):
    process, _, children = demo
    process.send_signal(number)
    process.wait(60)
    until(lambda: not any(alive(child) for child in children))


def test_demo_shows_log_of_ended_child(demo):
    process, _, children = demo
    os.kill(children[1], signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait(60) == 1
    assert "decode ended with code -9" in rest
    log = Path(re.search(r"its whole log: (\S+)", rest)[1])
    assert "decode engine of" in log.read_text()
    shutil.rmtree(log.parent)
    assert not any(alive(child) for child in children)


def test_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*COMMAND, "--once", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 1
    assert f"port {port} cannot be used: Address already in use" in done.stdout


def test_hung_engine_is_killed_and_named(monkeypatch):
    monkeypatch.setattr(launch, "LOOK_S", 0.1)
    monkeypatch.setattr(launch, "SILENT_S", 1.0)
    with Children() as children:
        engine = children.engine("unified", model_path="tiny")
        engine.process.send_signal(signal.SIGSTOP)
        with pytest.raises(LaunchError, match="unified answered nothing for 1 s, and was ended"):
            children.wait_for_end_of_any()
        assert engine.process.wait(20) == -signal.SIGKILL


def test_answering_engine_is_left_alone(monkeypatch):
    monkeypatch.setattr(launch, "LOOK_S", 0.1)
    monkeypatch.setattr(launch, "SILENT_S", 60.0)
    with Children() as children:
        engine = children.engine("unified", model_path="tiny")
        looked, asked = [], launch.get_status

        def counted(url):
            looked.append(asked(url))
            if len(looked) == 5:
                engine.process.kill()
            return looked[-1]

        monkeypatch.setattr(launch, "get_status", counted)
        with pytest.raises(LaunchError, match="unified ended with code -9"):
            children.wait_for_end_of_any()
        assert len(looked) >= 5
