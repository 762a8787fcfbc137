"""The watch over processes of the same host, with real ones."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import threading
from concurrent.futures import Future
from functools import partial

import msgspec
import pytest
from pdpool_connector.layout.process import started_at, this_process
from pdpool_connector.protocol.fence import ConnectionsEnded, ProcessExited
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import process_watch as module
from pdpool_connector.runtime.process_watch import ProcessWatch
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.sockets import Holder

from tests.descriptors import descriptors


class MachineDriver:
    """Its turns, one by one; `ends` is what the kernel's table says of who holds the other ends of our connections."""

    def __init__(self, engine: str = "nixl", timeouts: Timeouts | None = None) -> None:
        self.readers: dict[int, object] = {}
        self.timers: list = []
        self.soon_lost: list = []
        self.lost: list[str] = []
        self.ends: list[frozenset[Holder]] = [frozenset()]
        self.looks = 0
        self.concerns: set[str] = set()
        self.fenced: list[tuple[str, set[type]]] = []
        self.watch_ = ProcessWatch(
            engine,
            sending=False,
            who="the test",
            reactor=self,
            submit=self.submit,
            lost=self.lost.append,
            fence=lambda peer, proofs: self.fenced.append((peer, {type(proof) for proof in proofs})),
            wanted=lambda peer: peer in self.concerns,
            timeouts=timeouts or Timeouts(),
        )

    def look(self, _pid: int) -> list[frozenset[Holder]]:
        self.looks += 1
        return self.ends

    def watch(self, fd, call) -> None:
        self.readers[fd] = call

    def unwatch(self, fd) -> None:
        del self.readers[fd]

    def at(self, key, _when, call) -> None:
        (self.soon_lost if key[0] is self.watch_ else self.timers).append(call)

    def now(self) -> float:
        return 0.0

    def post(self, call) -> None:
        call()

    def submit(self, look) -> Future:
        done: Future = Future()
        try:
            done.set_result(asyncio.run(look))
        except OSError as error:
            done.set_exception(error)
        return done

    def process_ends(self, process: subprocess.Popen) -> None:
        process.kill()
        process.wait(60)
        (fd,), _, _ = select.select(list(self.readers), [], [], 60)
        self.readers[fd]()

    def time_passes(self) -> None:
        due, self.timers = self.timers, []
        for call in due:
            call()


@pytest.fixture
def owner(monkeypatch):
    made: list[MachineDriver] = []
    monkeypatch.setattr(module, "other_ends", lambda pid: made[0].look(pid))
    made.append(MachineDriver())
    yield made[0]
    made[0].watch_.close()


@pytest.fixture
def process(owner):
    with subprocess.Popen(["sleep", "60"]) as started:
        name = msgspec.structs.replace(this_process(), pid=started.pid, started=started_at(started.pid))
        owner.watch_.watch("peer", name)
        yield started
        started.kill()


def test_exited_peer_is_fenced_after_its_connections(owner, process):
    owner.concerns = {"peer"}
    owner.process_ends(process)
    owner.time_passes()
    assert owner.fenced == []
    owner.ends = []
    owner.time_passes()
    assert owner.fenced == [("peer", {ProcessExited, ConnectionsEnded})]
    assert owner.timers == []


def test_exited_peer_is_lost_after_grace(owner, process):
    owner.concerns = {"peer"}
    owner.process_ends(process)
    assert owner.lost == [], "what it had said is heard first"
    (call,) = owner.soon_lost
    call()
    assert (owner.lost, owner.fenced) == (["peer"], [])


def test_exit_that_is_proof_fences_after_grace(process):
    owner = MachineDriver("local")
    owner.watch_.watch(
        "peer", msgspec.structs.replace(this_process(), pid=process.pid, started=started_at(process.pid))
    )
    owner.process_ends(process)
    assert (owner.lost, owner.fenced) == ([], []), "what it had said is heard first"
    for call in owner.soon_lost:
        call()
    assert (owner.lost, owner.fenced) == ([], [("peer", {ProcessExited})])


def test_reused_descriptor_loses_no_living_peer(owner, process):
    owner.concerns = {"peer"}
    owner.ends = []
    (called,) = owner.readers.values()
    called()
    assert process.poll() is None
    assert (owner.soon_lost, owner.fenced) == ([], [])
    owner.process_ends(process)
    assert owner.fenced == [("peer", {ProcessExited, ConnectionsEnded})]


def test_frames_before_the_exit_are_read_first(process):
    said: list[str] = []
    reactor = Reactor("test", **dict.fromkeys(("after_turn", "at_rest", "at_end", "torn"), lambda: None))
    fenced = threading.Event()
    watch = ProcessWatch(
        "local",
        sending=False,
        who="the test",
        reactor=reactor,
        submit=lambda _: Future(),
        lost=said.append,
        fence=lambda *_: (said.append("fenced"), fenced.set()),
        wanted=lambda _: True,
        timeouts=Timeouts(lost_grace_s=1e-9),
    )
    watch.watch("peer", msgspec.structs.replace(this_process(), pid=process.pid, started=started_at(process.pid)))
    with contextlib.ExitStack() as undo:
        for _ in range(16):  # in any order of a turn, some of them follow the pidfd
            words = os.eventfd(1, os.EFD_NONBLOCK)
            undo.callback(os.close, words)
            reactor.watch(words, partial(hear, words, said))
        process.kill()
        process.wait(10)
        reactor.start()
        assert fenced.wait(30)
        assert reactor.stop(30)
    assert said == ["heard"] * 16 + ["fenced"]


def hear(words: int, said: list[str]) -> None:
    os.eventfd_read(words)
    said.append("heard")


def test_unreadable_table_is_logged_and_tried_again(owner, process, caplog, monkeypatch):
    def unreadable(_pid):
        raise PermissionError("not ours to read")

    owner.concerns = {"peer"}
    with monkeypatch.context() as patch:
        patch.setattr(owner, "look", unreadable)
        owner.process_ends(process)
    assert "peer are left: PermissionError: not ours to read" in caplog.text
    owner.ends = []
    owner.time_passes()
    assert owner.fenced == [("peer", {ProcessExited, ConnectionsEnded})]


def test_unwanted_peer_is_not_looked_for(owner, process):
    owner.concerns = {"peer"}
    owner.process_ends(process)
    owner.concerns.clear()
    owner.time_passes()
    looks = owner.looks
    owner.time_passes()
    assert (owner.looks, owner.timers, owner.fenced) == (looks, [], [])


def test_peer_that_left_keeps_no_descriptor(owner, process):
    assert process.poll() is None
    owner.concerns = {"peer"}
    owner.watch_.tidy()
    assert len(owner.readers) == 1
    before = descriptors()
    owner.concerns.clear()
    owner.watch_.tidy()
    assert owner.readers == {}
    assert descriptors() == before - 1


def test_forked_helper_is_waited_for(owner, process):
    owner.concerns = {"peer"}
    began = started_at(process.pid)
    owner.ends = [frozenset({Holder(1, 0)}), frozenset({Holder(process.pid + 1, began + 1)})]
    owner.process_ends(process)
    owner.time_passes()
    assert owner.fenced == []
    owner.ends.pop()
    owner.time_passes()
    assert owner.fenced == [("peer", {ProcessExited, ConnectionsEnded})]


@pytest.mark.parametrize("heir", [None, "beside it", "with its number"])
def test_connection_of_a_living_peer_is_its_own(owner, process, heir):
    began = started_at(process.pid)
    with subprocess.Popen(["sleep", "60"]) as other:
        name = msgspec.structs.replace(this_process(), pid=other.pid, started=started_at(other.pid))
        owner.watch_.watch("other", name)
        owner.concerns = {"peer", "other"}
        heirs = {
            None: {Holder(other.pid, name.started)},
            "beside it": {Holder(other.pid, name.started), Holder(other.pid + 1, began + 9)},
            "with its number": {Holder(other.pid, name.started + 9)},
        }
        owner.ends = [frozenset(heirs[heir])]
        owner.process_ends(process)
        owner.time_passes()
        assert [peer for peer, _ in owner.fenced] == ([] if heir else ["peer"])
        other.kill()


def test_forked_peer_is_waited_for(owner):
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        names = {
            peer: msgspec.structs.replace(this_process(), pid=pid, started=started_at(pid))
            for peer, pid in (("peer", parent.pid), ("child", child))
        }
        for peer, name in names.items():
            owner.watch_.watch(peer, name)
        owner.concerns = {"peer", "child"}
        owner.ends = [frozenset({Holder(child, names["child"].started)})]
        owner.process_ends(parent)
        owner.time_passes()
        assert owner.fenced == []
        os.kill(child, signal.SIGKILL)
