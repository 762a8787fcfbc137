import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dev.processes import send

SPINNING = """
import threading
def spin():
    while True:
        pass
for _ in range(6):
    threading.Thread(target=spin, daemon=True).start()
print("spinning", flush=True)
spin()
"""


@pytest.fixture
def spinning():
    with subprocess.Popen([sys.executable, "-c", SPINNING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"spinning\n"
        yield process
        process.kill()


def states(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(") ")[2][0] for task in tasks}


def test_a_stop_has_taken_effect_in_every_thread_when_send_returns(spinning):
    for _ in range(20):
        send(spinning.pid, signal.SIGSTOP)
        assert states(spinning.pid) == {"T"}
        send(spinning.pid, signal.SIGCONT)


def test_a_process_that_has_ended_is_an_error(spinning):
    spinning.kill()
    spinning.wait()
    with pytest.raises(ProcessLookupError):
        send(spinning.pid, signal.SIGSTOP)
