"""One connector in a process of its own: obeys one JSON command a line on stdin, and answers each with one line.

`Side` is the parent's end of such a process. Tests look into the memory of both sides themselves: what a process under
test says about bytes proves nothing.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import numpy as np
from pdpool_connector import (
    Cause,
    ConnectorConfig,
    DecodeConnector,
    HostArena,
    KVMemory,
    PrefillConnector,
    StatePool,
)
from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import BackendError, Poll, prompt_submit
from pdpool_connector.layout import pool
from pdpool_connector.layout.arena import ArenaLocation, MappedArena
from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.protocol import frames
from pdpool_connector.protocol.fence import ConnectionsEnded, ContainerTerminated
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.parts import new_identity
from pdpool_connector.transport.tokens import TokenVerifier

from dev import inside
from dev.processes import send
from tests.integration import long_step
from tests.integration.forked import Forked
from tests.integration.real_failures import end_connections, register_half
from tests.integration.shards import kv_fields, shards_of
from tests.state_kinds import Kind

ANSWER_S = 60.0
START_S = 90.0  # a process that loads NIXL or Mooncake beside much other work
LAYERS, HEADS, PAGES, AUX_ROWS, AUX_BYTES = 2, 2, 64, 64, 64
TOKENS = 16
HEAD_BYTES = 4 * 4  # head_dim, float32
STATE_ITEMS = 8


def first_row(pages: list[int]) -> int:
    """The aux row of a hand-off into these pages."""
    return pages[0] if pages else 0


class Plan:
    """Where everything lies in the arena of one rank; the same in the process and in the test.

    `state`: for each state pool by name, the fields of the `Kind`s that every layer has.
    """

    def __init__(self, shard: ModelShard, aux: list[int], state: dict[str, list]) -> None:
        self.shard, self.aux = shard, aux
        self.page_bytes = TOKENS * shard.kv_heads * HEAD_BYTES
        self.kinds = {name: [Kind(*fields) for fields in kinds] * shard.layers for name, kinds in state.items()}
        self._sizes = [
            *[(self.page_bytes, PAGES)] * (2 * shard.layers),
            *[(item, AUX_ROWS) for item in aux],
            *[(kind.item_bytes(shard.state_ranks), STATE_ITEMS) for kinds in self.kinds.values() for kind in kinds],
        ]
        self._starts = list(accumulate((item * items for item, items in self._sizes), initial=0))
        self.nbytes = self._starts[-1]

    def memory(self, arena: HostArena, model: str) -> KVMemory:
        """The registered view of the arena."""
        regions = [arena.region(start, *size) for start, size in zip(self._starts, self._sizes, strict=False)]
        kv = 2 * self.shard.layers
        rest = iter(regions[kv + len(self.aux) :])
        return KVMemory(
            kv=tuple(regions[:kv]),
            aux=tuple(regions[kv : kv + len(self.aux)]),
            page_tokens=TOKENS,
            head_dim=4,
            dtype="float32",
            model=model,
            state=tuple(
                StatePool(
                    name,
                    rank=self.shard.state_rank,
                    ranks=self.shard.state_ranks,
                    regions=tuple(next(rest) for _ in kinds),
                    cuts=tuple(kind.cut(self.shard.state_ranks) for kind in kinds),
                    layers=tuple(
                        self.shard.first_layer + index // (len(kinds) // self.shard.layers)
                        for index in range(len(kinds))
                    ),
                )
                for name, kinds in self.kinds.items()
            ),
            **kv_fields(self.shard),
        )

    def arrays(self, view: np.ndarray) -> list[np.ndarray]:
        """Each region as an array, uint8 (items, bytes)."""
        bounds = zip(pairwise(self._starts), self._sizes, strict=True)
        return [view[start:stop].reshape(items, item) for (start, stop), (item, items) in bounds]


class Side:
    """A process with one connector. Every answer has a deadline; `signal` is real.

    `pages` (region, page, byte) and `cells` (layer, K or V, page, token, head, byte) look into its memory.
    `shard`: which part of the model that is. `aux`: rows of the first aux region; `aux_regions`: of each.
    `state`: for each state pool by name, its regions (item, byte).
    """

    def __init__(self, role: str, backend: str, **options) -> None:
        self.process = Forked(__name__, {**os.environ, "UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo"})
        self._buffer = b""
        self.backend = backend
        try:
            facts = self.call("start", role=role, backend=backend, options=options, answer_s=START_S)
        except BaseException:
            self.process.kill()
            self.process.communicate()
            raise
        self.facts = facts
        self.incarnation: str = facts["incarnation"]
        self.bootstrap: str = facts["bootstrap"]
        self.control: str = facts["control"]
        self.admin: str = facts["admin"]
        self.shard = msgspec.convert(facts["shard"], ModelShard)
        self._arena = MappedArena(msgspec.json.decode(facts["location"], type=ArenaLocation))
        plan = Plan(self.shard, options.get("aux", [AUX_BYTES]), options.get("state", {}))
        kv = 2 * self.shard.layers
        arrays = plan.arrays(self._arena.view)
        pages = kv * PAGES * plan.page_bytes
        self.pages = self._arena.view[:pages].reshape(kv, PAGES, plan.page_bytes)
        self.cells = self.pages.reshape(self.shard.layers, 2, PAGES, TOKENS, self.shard.kv_heads, HEAD_BYTES)
        self.aux_regions = arrays[kv : kv + len(plan.aux)]
        self.aux = self.aux_regions[0]
        rest = iter(arrays[kv + len(plan.aux) :])
        self.state = {name: [next(rest) for _ in kinds] for name, kinds in plan.kinds.items()}

    def call(self, command: str, *, answer_s: float = ANSWER_S, **arguments):
        self.post(command, **arguments)
        return self.answer(answer_s)

    def post(self, command: str, **arguments) -> None:
        """Send a command and do not wait; take its `answer` before the next command."""
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, answer_s: float = ANSWER_S):
        deadline = time.monotonic() + answer_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                assert left > 0, f"process {self.process.pid} did not answer within {answer_s} s"
                if selector.select(left):
                    piece = os.read(self.process.stdout.fileno(), 1 << 20)
                    assert piece, f"process {self.process.pid} ended with {self.process.wait(5)}"
                    self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def open(self, name: str, room: int, **arguments) -> None:
        """Open a hand-off under a name of the test's. With `pages`, decode offers its memory at once."""
        self.call("open", name=name, room=room, **arguments)

    def offer(self, name: str, pages, *, aux_slot: int | None = None, **more) -> None:
        """The aux row has the number of the first page unless another is given: no two hand-offs may have the same."""
        pages = list(pages)
        self.call("offer", name=name, pages=pages, aux_slot=first_row(pages) if aux_slot is None else aux_slot, **more)

    def send(self, name: str, pages, *, start: int = 0, last: bool = True, aux_slot: int | None = 0, **more) -> None:
        aux_slot = aux_slot if last else None
        self.call("send", name=name, pages=list(pages), start=start, last=last, aux_slot=aux_slot, **more)

    def abort(self, name: str, **more) -> None:
        self.call("abort", name=name, **more)

    def status(self, name: str) -> dict:
        return self.call("status", name=name)

    def until(self, name: str, what: str, within_s: float = 30.0) -> dict:
        """Wait for a phase, or `ended`, or `releasable`; fail when it does not come in time. `at`: when it had come."""
        status = self.call("until", name=name, what=what, within_s=within_s, answer_s=within_s + ANSWER_S)
        assert status["met"], f"{name} is not {what} after {within_s} s: {status}"
        return status

    def stats(self) -> dict:
        return self.call("stats")

    def settle(self, check, within_s: float = 30.0) -> dict:
        """Wait until `check(stats)` holds."""
        deadline = time.monotonic() + within_s
        while not check(stats := self.stats()):
            assert time.monotonic() < deadline, f"not so after {within_s} s: {stats}"
            time.sleep(0.05)
        return stats

    def lose(self, *kinds: str) -> None:
        """Drop all frames of these kinds from now on; none of them, to end that."""
        self.call("faults", delays=dict.fromkeys(kinds))

    def signal(self, number: signal.Signals) -> None:
        send(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> int:
        """Close the connector and let the process exit by itself; kill it if it does not."""
        self.pages = self.cells = self.aux = self.aux_regions = self.state = None
        self._arena.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(ANSWER_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            self.process.stdout.close()


class _Gate:
    """A transfer backend whose writes can be held back after they were submitted: then they land late."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self.open = threading.Event()
        self.open.set()
        self.held = 0
        self.freed: set[int] = set()
        """Of the writes held back, counted from 1, those that may go on before the others."""
        self.swapped = None
        self.staged = 0
        self.failures: list[str] = []
        """What the backend itself said of each transfer that it began and that failed."""
        self.failing: set[int] = set()

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def submit(self, peer, chunk):
        if self.swapped is not None:
            chunk = replace(chunk, local_pages=np.full_like(chunk.local_pages, self.swapped))
        self.staged += chunk.staged is not None
        if not self.failing.isdisjoint(chunk.local_pages.tolist()):
            raise BackendError("the test lets this write fail")
        if self.open.is_set():
            return self._backend.submit(peer, chunk)
        self.held += 1
        return _Late(self.held, peer, chunk)

    def submit_at_once(self, *chunk):
        """As the backend's, where it has one, while nothing is held back."""
        at_once = prompt_submit(self._backend)
        free = self.open.is_set() and self.swapped is None and not self.failing
        return at_once(*chunk) if at_once is not None and free else None

    def poll(self, handle):
        if not isinstance(handle, _Late):
            return self._note(handle, self._backend.poll(handle))
        if handle.inner is None:
            if handle.number not in self.freed and not self.open.wait(0.002):
                return Poll.PENDING
            handle.inner = self._backend.submit(handle.peer, handle.chunk)
        outcome = self._note(handle.inner, self._backend.poll(handle.inner))
        handle.failure = handle.inner.failure
        return outcome

    def _note(self, handle, outcome):
        if outcome in (Poll.FAILED_SETTLED, Poll.FAILED_UNSETTLED):
            self.failures.append(handle.failure)
        return outcome


class _Late:
    def __init__(self, number, peer, chunk) -> None:
        self.number, self.peer, self.chunk, self.inner, self.failure = number, peer, chunk, None, ""


class _Commands:
    """What the process holds, and a method for each command."""

    def __init__(self, answer) -> None:
        self._answer = answer

    def start(self, role, backend, options):
        instance = shards_of(**options.pop("shape", {"layers": [LAYERS], "heads": HEADS}))
        plan = Plan(instance[options.get("rank", 0)], options.pop("aux", [AUX_BYTES]), options.pop("state", {}))
        self.arena = HostArena(plan.nbytes)
        memory = plan.memory(self.arena, options.pop("model", "m"))
        self.changed = threading.Event()
        self.delays: dict[str, float | None] = {}
        self.losing: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.transfers = {}
        host = options.pop("host", "127.0.0.1")
        if options.pop("half_registered", False):
            register_half(PAGES * plan.page_bytes)
        frames.VERSION_MIN, frames.VERSION_MAX = options.pop("versions", (frames.VERSION_MIN, frames.VERSION_MAX))
        pool.MAX_CHUNK_BYTES = options.pop("chunk_bytes", pool.MAX_CHUNK_BYTES)
        logging.basicConfig(level=options.pop("log", "WARNING"))
        flight_dir = options.pop("flight_dir", None)
        elsewhere = options.pop("elsewhere", True)
        operator_key = options.pop("operator_key", None)
        config = ConnectorConfig(
            host,
            flight_dir=None if flight_dir is None else Path(flight_dir),
            admin_port=0,
            admin_gate=None if operator_key is None else TokenVerifier(operator_key, "pod"),
            backend=backend,
            timeouts=Timeouts(**options.pop("timeouts", {})),
            frame_filter=self._delay,
            allowed_networks=tuple(options.pop("networks", ["127.0.0.0/8", "::1/128"])),
            instance=instance,
            **options,
        )
        identity = new_identity("")
        if elsewhere:
            # As in a pod of its own, whose end the kernel does not show: tests see holds, and fence by hand.
            process = msgspec.structs.replace(identity.process, pid_namespace="pid:[1]")
            identity = identity._replace(process=process)
        self.gate = _Gate(open_backend(backend, identity.incarnation, target=role == "decode", host=host))
        make = PrefillConnector if role == "prefill" else DecodeConnector
        self.connector = make(config, memory, self.changed.set, backend=self.gate, identity=identity)
        signal.signal(signal.SIGUSR1, lambda *_: self.gate.open.set())
        self.connector.start()
        return {
            "incarnation": self.connector.incarnation,
            "bootstrap": self.connector.bootstrap_address if role == "prefill" else "",
            "control": self.connector.control_address,
            "admin": self.connector.admin_address,
            "shard": msgspec.to_builtins(plan.shard),
            "location": msgspec.json.encode(self.arena.location()).decode(),
        }

    def _delay(self, frame):
        kind = type(frame).__name__
        delay = self.delays.get(kind, 0.0)
        if self.losing[kind] > 0:
            self.losing[kind] -= 1
            delay = None
        if delay is None:
            self.lost[kind] += 1
        return delay

    def open(self, name, room, prefill=None, rid=None, prompt="", deadline_s=None, **memory):
        where = (room, name if rid is None else rid)
        more = {"prompt": prompt.encode(), "deadline_s": deadline_s}
        at_decode = prefill is not None
        self.transfers[name] = self.connector.open(*((prefill, *where) if at_decode else where), **more)
        if memory:
            self.offer(name, **memory)
        return {}

    def offer(self, name, **memory):
        self.transfers[name].offer(**memory)
        return {}

    def send(self, name, **what):
        self.transfers[name].send(**what)
        return {}

    def many(self, calls):
        """A list of commands in one go, each [command, arguments]."""
        for command, arguments in calls:
            getattr(self, command)(**arguments)
        return {}

    def forget(self, within_s):
        """Wait until all hand-offs are releasable; how many of each cause there were, "" for those done."""
        causes: Counter[str] = Counter()
        deadline = time.monotonic() + within_s
        for name, transfer in list(self.transfers.items()):
            status = transfer.wait_released(max(deadline - time.monotonic(), 0))
            causes[status.cause or ""] += 1
            del self.transfers[name]
        return dict(causes)

    def abort(self, name, cause="aborted"):
        self.transfers[name].abort("test", Cause(cause))
        return {}

    def drain(self):
        self.connector.drain()
        return {}

    def fence(self, incarnation, connections=True):
        proofs = [ContainerTerminated(pod_uid="pod", container_id="container", seen_by="the test")]
        if connections:
            proofs.append(ConnectionsEnded(seen_by="the test"))
        self.connector.fence(incarnation, *proofs)
        return {}

    def status(self, name):
        return msgspec.to_builtins(self.transfers[name].status)

    def until(self, name, what, within_s):
        transfer = self.transfers[name]
        waits = {"ended": transfer.wait, "releasable": transfer.wait_released}
        try:
            waits.get(what, lambda timeout_s: self._wait_for_phase(transfer, what, timeout_s))(within_s)
            met = True
        except TimeoutError:
            met = False
        return {"met": met, "at": time.monotonic(), **self.status(name)}

    def _wait_for_phase(self, transfer, phase, timeout_s):
        deadline = time.monotonic() + timeout_s
        while transfer.status.phase.value != phase:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.changed.wait(min(0.5, left))
            self.changed.clear()

    def stats(self):
        stats = self.connector.stats()
        return msgspec.to_builtins(stats) | {
            "rows": inside.rows(self.connector),
            "kept": inside.kept(self.connector),
            "free_slots": inside.free_slots(self.connector),
            "drained": stats.drained,
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
            "held_writes": self.gate.held,
            "staged_writes": self.gate.staged,
            "failed_writes": self.gate.failures,
            "lost": dict(self.lost),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
        }

    def tables(self):
        return inside.tables(self.connector)

    def faults(self, delays, count=None):
        """Frames by kind: seconds of delay, or None to drop them; `count`: drop only so many of each kind."""
        self.delays = {} if count else delays
        self.losing = Counter(dict.fromkeys(delays, count)) if count else Counter()
        return {}

    def hold_writes(self):
        self.gate.held = 0
        self.gate.freed.clear()
        self.gate.open.clear()
        return {}

    def release_writes(self, number=None):
        """All that are held back, or the one with this number; the first is 1. SIGUSR1 releases all of them."""
        if number is None:
            self.gate.open.set()
        else:
            self.gate.freed.add(number)
        return {}

    def cut_data_plane(self, but):
        """End the TCP connections that do not lead from or to one of these ports."""
        return {"ended": end_connections(set(but))}

    def break_writes(self, pages):
        """Writes that take anything from these pages of prefill's fail."""
        self.gate.failing = set(pages)
        return {}

    def corrupt_writes(self, page):
        """Every write from now on takes the bytes of this page."""
        self.gate.swapped = page
        return {}

    def step(self, within_s):
        """A long forward step on this thread: answers when it begins, and once more when the next command ends it."""
        self._answer({"stepping": True})
        return long_step.compute(within_s)

    def close(self, timeout_s=5.0):
        begun = time.monotonic()
        self.connector.close(timeout_s)
        return {
            "seconds": time.monotonic() - begun,
            "threads": threading.active_count(),
            "lost": dict(self.lost),
            "halves": {name: msgspec.to_builtins(one.status) for name, one in self.transfers.items()},
        }


def main() -> None:
    # Libraries print to stdout: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(document) -> None:
        answers.write(json.dumps(document).encode() + b"\n")
        answers.flush()

    commands = _Commands(answer)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answered = getattr(commands, request.pop("command"))(**request)
        except Exception as error:  # noqa: BLE001 - every fault is the test's to judge
            answered = {"error": f"{type(error).__name__}: {error}"}
        answer(answered)
    commands.gate.open.set()
    commands.connector.close()
    answers.close()
