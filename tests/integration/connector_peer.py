"""One connector in a process of its own: obeys one JSON command a line on stdin, answers one on stdout.

Its process is held by `Side`, in the tests. Tests look into both arenas themselves, so no answer of a process under
test is believed about bytes.
"""

import contextlib
import gc
import json
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector
from pdpool_connector.backends.base import BackendError, Poll, prompt_submit
from pdpool_connector.layout import pool
from pdpool_connector.layout.arena import ArenaLocation, MappedArena
from pdpool_connector.layout.memory import StatePool
from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.layout.process import this_process
from pdpool_connector.protocol.fence import ConnectionsEnded, ContainerTerminated
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import connector as connector_module
from pdpool_connector.runtime import instance_connection as link_module
from pdpool_connector.runtime import peer_table as decodes_module
from pdpool_connector.runtime import rank_connection as link_rank_module
from pdpool_connector.transport.tokens import TokenVerifier

from dev import inside
from dev.processes import send
from tests.integration import long_step, older, tables
from tests.integration.forked import Forked
from tests.integration.parts import parts_of
from tests.integration.real_failures import end_connections, register_half
from tests.state_kinds import Kind

ANSWER_S = 60.0
START_S = 90.0  # a process that loads NIXL or Mooncake beside much other work
LAYERS, HEADS, PAGES, AUX_ROWS, AUX_BYTES = 2, 2, 64, 16, 64
TOKENS = 16
HEAD_BYTES = 4 * 4  # head_dim, float32
STATE_ITEMS = 8


class Side:
    """A process with one connector. Every answer has a deadline; `signal` is real.

    `pages` (region, page, byte) and `cells` (layer, K or V, page, token, head, byte) look into its memory, `part` says
    which part of the model that is. `state`: (item, byte) of each region of state, where the option `state` gave the
    fields of the `Kind`s that every layer has.
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
        self._arena = MappedArena(msgspec.json.decode(facts["location"], type=ArenaLocation))
        self.part = msgspec.convert(facts["part"], ModelShard)
        page_bytes = TOKENS * self.part.kv_heads * HEAD_BYTES
        pages = 2 * self.part.layers * PAGES * page_bytes
        self.pages = self._arena.view[:pages].reshape(2 * self.part.layers, PAGES, page_bytes)
        self.cells = self.pages.reshape(self.part.layers, 2, PAGES, TOKENS, self.part.kv_heads, HEAD_BYTES)
        aux_bytes = options.get("aux_bytes", AUX_BYTES)
        self.aux = self._arena.view[pages : pages + AUX_ROWS * aux_bytes].reshape(AUX_ROWS, aux_bytes)
        kinds = [Kind(*fields) for fields in options.get("state", ())] * self.part.layers
        bounds = list(accumulate((STATE_ITEMS * one.item_bytes(self.part.state_ranks) for one in kinds), initial=0))
        rest = self._arena.view[pages + AUX_ROWS * aux_bytes :]
        self.state = [rest[start:stop].reshape(STATE_ITEMS, -1) for start, stop in pairwise(bounds)]

    def call(self, command: str, *, answer_s: float = ANSWER_S, **arguments):
        self.post(command, **arguments)
        return self.answer(answer_s)

    def post(self, command: str, **arguments) -> None:
        """Let it do something and do not wait; its `answer` is to be taken before the next command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, answer_s: float = ANSWER_S):
        assert self.process.stdout is not None
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
        self.call("open", name=name, room=room, **arguments)

    def send(self, name: str, pages, *, start: int = 0, last: bool = True, aux_slot: int | None = 0, **more) -> None:
        aux_slot = aux_slot if last else None
        self.call("send", name=name, pages=list(pages), start=start, last=last, aux_slot=aux_slot, **more)

    def abort(self, name: str) -> None:
        self.call("abort", name=name)

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

    def signal(self, number: signal.Signals) -> None:
        send(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> int:
        """Close the connector and let the process exit by itself; kill it if it does not."""
        self.pages = self.cells = self.aux = self.state = None
        self._arena.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
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
    """An engine whose writes can be held back after they were submitted: then they land late, as real ones may."""

    def __init__(self, engine) -> None:
        self._backend = engine
        self.open = threading.Event()
        self.open.set()
        self.held = 0
        self.freed: set[int] = set()
        """Of the writes held back, counted from 1, those that may go on before the others."""
        self.swapped = None
        self.staged = 0
        self.failures: list[str] = []
        """What the engine itself said of each transfer that it began and that failed."""
        self.failing: set[int] = set()

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def submit(self, peer, chunk):
        if self.swapped is not None:
            chunk = replace(chunk, local_pages=np.full_like(chunk.local_pages, self.swapped))
        self.staged += chunk.staged is not None
        if not self.failing.isdisjoint(chunk.local_pages.tolist()):
            raise BackendError("the data plane fails, as it was told to")
        if self.open.is_set():
            return self._backend.submit(peer, chunk)
        self.held += 1
        return _Late(self.held, peer, chunk)

    def submit_at_once(self, *chunk):
        """As the engine's, where it has one, while nothing is held back."""
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


class _Connector:
    """What the process holds."""

    def start(self, role, backend, options):
        instance = parts_of(**options.pop("shape", {"layers": [LAYERS], "heads": HEADS}))
        part = instance[options.get("rank", 0)]
        page_bytes = TOKENS * part.kv_heads * HEAD_BYTES
        size = 2 * part.layers * PAGES * page_bytes
        aux_bytes = options.pop("aux_bytes", AUX_BYTES)
        kinds = [Kind(*fields) for fields in options.pop("state", ())]
        items = [kind.item_bytes(part.state_ranks) for kind in kinds] * part.layers
        starts = list(accumulate((STATE_ITEMS * count for count in items), initial=size + AUX_ROWS * aux_bytes))
        self.arena = HostArena(starts[-1])
        if kinds:
            mamba = StatePool(
                "mamba",
                tuple(self.arena.region(*at, STATE_ITEMS) for at in zip(starts, items, strict=False)),
                layers=tuple(part.first_layer + index // len(kinds) for index in range(len(items))),
                cuts=tuple(kind.cut(part.state_ranks) for kind in kinds) * part.layers,
                rank=part.state_rank,
                ranks=part.state_ranks,
            )
        memory = KVMemory(
            kv=tuple(self.arena.region(i * PAGES * page_bytes, page_bytes, PAGES) for i in range(2 * part.layers)),
            aux=(self.arena.region(size, aux_bytes, AUX_ROWS),),
            page_tokens=TOKENS,
            head_dim=4,
            dtype="float32",
            model=options.pop("model", "m"),
            state=(mamba,) if kinds else (),
            **part.geometry,
        )
        self.changed = threading.Event()
        self.delays: dict[str, float | None] = {}
        self.losing: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        if version := options.pop("speaks", None):
            older.speak(version, self.said)
        self.transfers = {}
        host = options.pop("host", "127.0.0.1")
        if options.pop("half_registered", False):
            register_half(PAGES * page_bytes)
        pool.MAX_CHUNK_BYTES = options.pop("chunk_bytes", pool.MAX_CHUNK_BYTES)
        logging.basicConfig(level=options.pop("log", "WARNING"))
        flight_dir = options.pop("flight_dir", None)
        link_module.GRACE_S = decodes_module.GRACE_S = options.pop("grace_s", link_module.GRACE_S)
        link_rank_module.HELLO_S = options.pop("hello_s", link_rank_module.HELLO_S)
        elsewhere = options.pop("elsewhere", True)
        operator_key = options.pop("operator_key", None)
        config = ConnectorConfig(
            host,
            flight_dir=None if flight_dir is None else Path(flight_dir),
            admin_port=0,
            admin_gate=None if operator_key is None else TokenVerifier(operator_key, "pod"),
            backend=backend,
            timing=Timeouts(**options.pop("timing", {})),
            frame_filter=self._delay,
            allowed_networks=tuple(options.pop("networks", ["127.0.0.0/8", "::1/128"])),
            instance=instance,
            **options,
        )
        if elsewhere:
            # As in a pod of its own, where the kernel tells nobody of its end: tests see holds, and fence by hand.
            connector_module.this_process = lambda pod_uid: msgspec.structs.replace(
                this_process(pod_uid), pid_namespace="pid:[1]"
            )
        make = PrefillConnector if role == "prefill" else DecodeConnector
        self.connector = make(config, memory, self.changed.set)
        self.gate = self.connector._backend = _Gate(self.connector._backend)
        if role == "decode":
            self.connector._reads._backend = self.gate
        self.connector.start()
        return {
            "incarnation": self.connector.incarnation,
            "bootstrap": self.connector.bootstrap_address if role == "prefill" else "",
            "control": self.connector.control_address,
            "admin": self.connector.admin_address,
            "part": msgspec.to_builtins(part),
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

    def expect(self, name, room, prefill):
        self.connector.expect(prefill, room, name)
        return {}

    def open(self, name, room, **arguments):
        for ids in arguments.keys() & {"pages", "state"}:
            arguments[ids] = np.array(arguments[ids], np.int32)
        if "prompt" in arguments:
            arguments["prompt"] = arguments["prompt"].encode()
        opener = self.connector.open
        if "prefill" in arguments:
            transfer = opener(arguments.pop("prefill"), room, arguments.pop("rid", name), **arguments)
        else:
            transfer = opener(room, arguments.pop("rid", name), **arguments)
        self.transfers[name] = transfer
        return {}

    def send(self, name, pages, start, last, aux_slot, state=None):
        state = None if state is None else np.array(state, np.int32)
        self.transfers[name].send(np.array(pages, np.int32), start=start, last=last, aux_slot=aux_slot, state=state)
        return {}

    def many(self, calls):
        """A list of commands in one go, each [command, arguments]."""
        for command, arguments in calls:
            getattr(self, command)(**arguments)
        return {}

    def forget(self, within_s):
        """Wait until all hand-offs have ended and are releasable; how many of each cause, "" for those done."""
        causes: Counter[str] = Counter()
        deadline = time.monotonic() + within_s
        for name, transfer in list(self.transfers.items()):
            while not transfer.status.releasable:
                assert time.monotonic() < deadline, f"{name} is {transfer.status}"
                self.changed.wait(0.1)
                self.changed.clear()
            causes[transfer.status.cause or ""] += 1
            del self.transfers[name]
        return dict(causes)

    def abort(self, name):
        self.transfers[name].abort("test")
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
        deadline = time.monotonic() + within_s
        while not (met := self._met(self.transfers[name].status, what)) and time.monotonic() < deadline:
            self.changed.wait(min(0.5, max(deadline - time.monotonic(), 0)))
            self.changed.clear()
        return {"met": met, "at": time.monotonic(), **self.status(name)}

    def _met(self, status, what):
        match what:
            case "ended":
                return status.ended
            case "releasable":
                return status.releasable
            case phase:
                return status.phase.value == phase

    def stats(self):
        staging = self.connector._staging
        return msgspec.to_builtins(self.connector.stats()) | {
            "rows": inside.rows(self.connector),
            "drops": self.connector._drops.counts(),
            "kept": len(self.connector._transfers),
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
            "held_writes": self.gate.held,
            "staged_writes": self.gate.staged,
            "free_slots": len(staging._free) if staging is not None else 0,
            "lost": dict(self.lost),
            "said": dict(self.said),
            "failed_writes": self.gate.failures,
            "drained": self.connector.stats().drained,
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
        }

    def tables(self):
        """Sizes of all there is in the connector; what is garbage already is collected first."""
        gc.collect()
        answer: Future[dict[str, int]] = Future()
        self.connector._reactor.post(lambda: answer.set_result(tables.sizes(self.connector)))
        return answer.result(ANSWER_S)

    def faults(self, delays):
        """Frames by name: seconds of delay, or None to drop them."""
        self.delays = delays
        return {}

    def lose(self, kind, count):
        """So many of the next frames of a kind are lost, and what follows is not: `close` needs no other command."""
        self.losing[kind] = count
        return {}

    def hold_writes(self):
        self.gate.held = 0
        self.gate.freed.clear()
        self.gate.open.clear()
        return {}

    def release_write(self, number):
        """Only this one of those that are held back, the first is 1."""
        self.gate.freed.add(number)
        return {}

    def cut_data_plane(self, but):
        """End the TCP connections that do not lead from or to one of these ports."""
        return {"ended": end_connections(set(but))}

    def break_writes(self, pages):
        """Our data plane takes nothing from these pages of prefill's."""
        self.gate.failing = set(pages)
        return {}

    def corrupt_writes(self, page):
        """Whatever is submitted from now on, this page of ours is another's when the data plane reads it."""
        self.gate.swapped = page
        return {}

    def step(self, within_s):
        """A long forward step on this thread: says that it begins, and answers when the next order ends it.

        SIGUSR1 lets held writes go on meanwhile, as `release_writes` does.
        """
        self.heed_release()
        say({"stepping": True})
        return long_step.compute(within_s)

    def release_writes(self):
        self.gate.open.set()
        return {}

    def heed_release(self):
        """From here on SIGUSR1 does what `release_writes` does, whatever this thread is at."""
        signal.signal(signal.SIGUSR1, lambda *_: self.gate.open.set())
        return {}

    def load(self, prefill, rooms):
        """Open many at once: half-way work for a close under load."""
        for room in range(rooms):
            self.open(f"load{room}", room, pages=[], prefill=prefill, aux_slot=0)
        return {}

    def close(self, timeout_s=5.0):
        begun = time.monotonic()
        self.connector.close(timeout_s)
        return {
            "seconds": time.monotonic() - begun,
            "threads": threading.active_count(),
            "lost": dict(self.lost),
            "halves": {name: msgspec.to_builtins(one.status) for name, one in self.transfers.items()},
        }


def say(answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    side = _Connector()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(side, request.pop("command"))(**request)
        except Exception as error:  # noqa: BLE001 - every fault is the test's to judge
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(answer)
    side.gate.open.set()
    side.connector.close()
