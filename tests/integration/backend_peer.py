"""One side of a pair of backends, in a process of its own. It reads JSON commands, a line each, and writes answers.

Its process is held by `Peer`, in the tests. The tests look into both arenas themselves, so no answer of a process
under test is believed about bytes.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import BackendError, Poll
from pdpool_connector.layout.arena import ArenaLocation, HostArena, MappedArena
from pdpool_connector.layout.chunk import Chunk, StateItems
from pdpool_connector.layout.memory import KVMemory, RemoteMemory, StateCut, StatePool, decode_remote, encode_remote
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.process import this_process
from pdpool_connector.layout.staging import Staging
from pdpool_connector.protocol.timeouts import Timeouts

from dev.processes import send
from tests.integration.forked import OWN_CODE, ROOT, Forked
from tests.unit.backends import recorded_packages

ANSWER_TIMEOUT_S = 120.0
GAP = 4096  # bytes of no owner between two regions
STAND_INS = "PDPOOL_TEST_STAND_INS"
"""Set for a process whose backends go over the stand-ins of packages that need hardware."""


class Peer:
    """A process with one backend. Every answer has a deadline; `kill` and `stop` are real signals to its pid."""

    def __init__(self, env: dict[str, str], prefix: Sequence[str] = ()) -> None:
        whole = {**os.environ, **env, **OWN_CODE}
        self.process = _prefixed(prefix, whole) if prefix else Forked(__name__, whole)
        self.pid = self.process.pid
        self._buffer = b""
        self.arena: MappedArena
        self.remote: RemoteMemory
        self.name = ""

    def post(self, command: str, **arguments) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S):
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                assert left > 0, f"process {self.pid} did not answer within {timeout_s} s"
                if selector.select(left):
                    piece = os.read(self.process.stdout.fileno(), 1 << 20)
                    assert piece, f"process {self.pid} ended with {self.process.wait(5)}"
                    self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def call(self, command: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments):
        self.post(command, **arguments)
        return self.answer(timeout_s)

    def post_open(self, backend: str, name: str, *, target: bool, host: str, **geometry) -> None:
        self.name = name
        self.post("open", backend=backend, name=name, target=target, host=host, **geometry)

    def opened(self) -> None:
        answer = self.answer()
        self.remote = decode_remote(bytes.fromhex(answer["remote"]))
        self.arena = MappedArena(msgspec.json.decode(answer["location"], type=ArenaLocation))

    def connect(self, other: "Peer"):
        return self.call("connect", peer=other.name, remote=other.encoded())

    def encoded(self) -> str:
        return encode_remote(self.remote).hex()

    def signal(self, number: signal.Signals) -> None:
        send(self.pid, number)

    def end(self) -> int:
        """Let it exit by itself, as a process does whose work is over; kill it if it does not."""
        if hasattr(self, "arena"):
            self.arena.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed by the test with a command unread
            self.process.stdin.close()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise
        finally:
            self.process.stdout.close()


def _prefixed(prefix: Sequence[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [*prefix, sys.executable, "-W", "error", "-m", __name__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT)


class _Side:
    """What the process holds."""

    def __init__(self) -> None:
        self.handles = []

    def open(
        self,
        backend,
        name,
        host,
        target,
        layers,
        pages,
        page_bytes,
        connect_timeout_s=None,
        state=(),
        state_cuts=(),
        state_rank=0,
        state_ranks=0,
        **fields,
    ):
        """`page_bytes`: of one region; `state`: item bytes of each region of the one pool, which has `pages` items;
        `state_cuts`: (outer, groups) of each, or None."""
        timeouts = Timeouts() if connect_timeout_s is None else Timeouts(backend_connect_s=connect_timeout_s)
        self.backend = open_backend(backend, name, target=target, host=host, timeouts=timeouts)
        shapes = [(page_bytes, pages)] * (2 * layers) + [(size, pages) for size in state] + [(96, 8)]
        offsets = list(accumulate((size * items + GAP for size, items in shapes), initial=GAP))
        self.arena = HostArena(offsets[-1])
        regions = [self.arena.region(offset, *shape) for offset, shape in zip(offsets, shapes, strict=False)]
        kv_heads = fields.setdefault("kv_heads", 1)
        pools = ()
        if state:
            cuts = tuple(cut and StateCut(cut[0], tuple(cut[1])) for cut in state_cuts)
            share = {"rank": state_rank, "ranks": state_ranks}
            pools = (StatePool("mamba", tuple(regions[2 * layers : -1]), cuts=cuts, **share),)
        memory = KVMemory(
            kv=tuple(regions[: 2 * layers]),
            state=pools,
            aux=(regions[-1],),
            layers=layers,
            head_dim=page_bytes // 64 // kv_heads,
            dtype="float32",
            **{"model": "m", "page_tokens": 16, **fields},
        )
        self.memory, self.staging, self.plans = memory, Staging(1), {}
        descriptor = self.backend.register(memory, self.staging.region if self.backend.stages else None)
        remote = RemoteMemory(backend=backend, memory=memory, descriptor=descriptor, process=this_process())
        return {
            "remote": encode_remote(remote).hex(),
            "location": msgspec.json.encode(self.arena.location()).decode(),
        }

    def connect(self, peer, remote):
        described = decode_remote(bytes.fromhex(remote))
        self.backend.connect(peer, described)
        self.plans[peer] = PairPlan(self.memory, described.memory)
        return {}

    def disconnect(self, peer):
        self.backend.disconnect(peer)
        return {}

    def transport(self, peer):
        return {"transport": self.backend.transport(peer)}

    def submit(self, peer, local, remote, aux=None, state=None, span=None, stage=False):
        chunk = Chunk(
            np.array(local, np.int32),
            np.array(remote, np.int32),
            (tuple(aux),) if aux else (),
            (StateItems(0, *(np.array(ids, np.int32) for ids in state)),) if state else (),
            tuple(span) if span else None,
        )
        if stage:
            slot = self.staging.reserve()
            chunk = self.plans[peer].stage(chunk, slot)
            slot.release()  # the test waits for the transfer before it stages the next
        self.handles.append(self.backend.submit(peer, chunk))
        return {"handle": len(self.handles) - 1}

    def poll(self, handle, wait_s=0.0):
        """Poll until it is over or `wait_s` have passed."""
        deadline = time.monotonic() + wait_s
        while (outcome := self.backend.poll(self.handles[handle])) is Poll.PENDING and time.monotonic() < deadline:
            pass
        return {"outcome": outcome.value, "failure": self.handles[handle].failure, "at": time.monotonic()}

    def stream(self, peer, local, remote, wait_s):
        """Move the same pages again and again until it fails or `wait_s` have passed."""
        chunk = Chunk(np.array(local, np.int32), np.array(remote, np.int32))
        deadline = time.monotonic() + wait_s
        outcome, count = Poll.DONE, 0
        while outcome in (Poll.DONE, Poll.PENDING) and time.monotonic() < deadline:
            if outcome is Poll.DONE:
                handle, count = self.backend.submit(peer, chunk), count + 1
            outcome = self.backend.poll(handle)
        return {"outcome": outcome.value, "count": count, "at": time.monotonic(), "failure": handle.failure}

    def repeat(self, peer, local, remote, times):
        """Move the same pages `times` times, one after the other; the outcomes other than done."""
        failed = []
        for _ in range(times):
            self.submit(peer, local, remote)
            outcome = self.poll(len(self.handles) - 1, 10.0)
            if outcome["outcome"] != "done":
                failed.append(outcome)
            self.handles.clear()
        return {"failed": failed}

    def together(self, jobs, wait_s=20.0):
        """Each job in a thread of its own at the same time, as the runtime's workers do; stops at the first not done.

        Answers (outcome of the last chunk, seconds) of each job.
        """
        answers = [("no answer", 0.0)] * len(jobs)
        barrier = threading.Barrier(len(jobs), timeout=10)

        def work(index, job):
            try:
                chunk = Chunk(np.array(job["local"], np.int32), np.array(job["remote"], np.int32))
                barrier.wait()
                started = time.monotonic()
                outcome, count = Poll.DONE, 0
                while outcome is Poll.DONE and count < job["times"]:
                    handle, count = self.backend.submit(job["peer"], chunk), count + 1
                    while (outcome := self.backend.poll(handle)) is Poll.PENDING:
                        if time.monotonic() - started > wait_s:
                            break
                answers[index] = (outcome.value, time.monotonic() - started)
            except Exception as error:  # noqa: BLE001 - returned to the test, which fails on it
                answers[index] = (repr(error), 0.0)

        threads = [threading.Thread(target=work, args=entry) for entry in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return answers

    def beside_connect(self, stranger, remote, peer):
        """Connect `stranger` in a thread, and move a page to `peer` again and again until that has ended."""
        outcome = []

        def connect():
            try:
                self.connect(stranger, remote)
                outcome.append("connected")
            except Exception as error:  # noqa: BLE001 - returned to the test
                outcome.append(type(error).__name__)

        thread = threading.Thread(target=connect)
        thread.start()
        moved, longest_s = 0, 0.0
        while thread.is_alive():
            started = time.monotonic()
            self.submit(peer, [0], [0])
            if self.poll(len(self.handles) - 1, 20.0)["outcome"] == "done":
                moved += 1
            longest_s = max(longest_s, time.monotonic() - started)
            self.handles.clear()
        return {"connect": outcome[0], "moved": moved, "longest_s": longest_s}

    def usage(self):
        status = Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "threads": int(fields["Threads"]),
            "rss_anon_kib": int(fields["RssAnon"].split()[0]),
            "cpu_s": time.process_time(),
        }

    def close(self):
        self.handles.clear()
        self.backend.close()
        self.arena.close()
        return {}


def main() -> None:
    # UCX logs to stdout, so the answers get a descriptor of their own.
    answers = os.dup(1)
    os.dup2(2, 1)
    if STAND_INS in os.environ:
        recorded_packages.install()
    side = _Side()
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(side, arguments.pop("command"))(**arguments)
        except BackendError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
