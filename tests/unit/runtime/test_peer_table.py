"""Prefill's table of decodes: connections that come and go, engines that fail, processes that are replaced."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pdpool_connector import HostArena, KVMemory
from pdpool_connector.backends.base import BackendError, IncompatiblePeerError
from pdpool_connector.layout.memory import RemoteMemory, encode_remote
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import peer_table as module
from pdpool_connector.runtime.peer_table import MAX_ROUTES, PeerTable
from pdpool_connector.transport.drops import Drops

TIMEOUTS = Timeouts()
GRACE_S = TIMEOUTS.lost_grace_s
A, B, C = "a" * 32, "b" * 32, "c" * 32
ADDRESS = {A: "h:1", B: "h:1", C: "h:2"}
"""B succeeds A at the same address, or the other way round."""
ARENA = HostArena(2 * 256 + 64)
MEMORY = KVMemory(
    kv=(ARENA.region(0, 256, 1), ARENA.region(256, 256, 1)),
    aux=(ARENA.region(512, 64, 1),),
    page_tokens=16,
    layers=1,
    kv_heads=1,
    head_dim=4,
    dtype="float32",
    model="m",
)
TOLD = encode_remote(RemoteMemory(backend="local", memory=MEMORY, descriptor=b""))


class Worker:
    closed = False

    def close(self) -> None:
        self.closed = True


class Prefill:
    """Owner, clock and timers of a table, and the events that the machine has received."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: dict[object, tuple[float, object]] = {}
        self.known: set[str] = set()
        self.fenced: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.misfits: dict[str, int] = {}
        self.sent: list[tuple[bytes, f.Frame]] = []
        self.table = PeerTable(self, "f" * 32, MEMORY, "local", self, Drops(self.now), TIMEOUTS)

    def now(self) -> float:
        return self.time

    def at(self, key, when, call) -> None:
        self.timers[key] = (when, call)

    def cancel(self, key) -> None:
        self.timers.pop(key, None)

    def is_fenced(self, peer) -> bool:
        return peer in self.fenced

    def start_worker(self, hello, _remote):
        self.time += 0.001
        self.workers[hello.sender] = Worker()
        return self.workers[hello.sender]

    def on_peer_paired(self, peer) -> None:
        self.known.add(peer.incarnation)

    def on_peer_lost(self, peer, message) -> None:
        assert message
        self.known.discard(peer.incarnation)

    def on_misfit(self, incarnation, version) -> None:
        self.misfits[incarnation] = version

    def on_misfit_gone(self, incarnation) -> None:
        del self.misfits[incarnation]

    def send_to(self, route, frame) -> None:
        self.sent.append((route, frame))

    def hello(
        self,
        sender: str,
        connection: int,
        address: str = "",
        memory: bytes = b"",
        versions: tuple[int, int] = (f.VERSION_MIN, f.VERSION_MAX),
    ) -> None:
        said = f.Hello(
            version=versions[1],
            oldest_version=versions[0],
            sender=sender,
            address=address or ADDRESS[sender],
            memory=memory or TOLD,
        )
        self.table.greet(said, b"%d" % connection, connection)

    def pair(self, sender: str, connection: int, address: str = "") -> None:
        self.hello(sender, connection, address)
        self.run(GRACE_S / 2)
        self.table.connected(sender, None)

    def gone(self, sender: str) -> None:
        del self.workers[sender]
        self.table.worker_gone(sender)

    def run(self, seconds: float) -> None:
        until = self.time + seconds
        while due := [(when, str(key), key) for key, (when, _) in self.timers.items() if when <= until]:
            when, _, key = min(due)
            self.time = max(self.time, when)
            self.timers.pop(key)[1]()
        self.time = max(self.time, until)

    def paired(self) -> set[str]:
        return {peer.incarnation for peer in self.table if peer.paired}


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_decode_back_after_failed_connect_is_kept(prefill) -> None:
    prefill.hello(A, 1)
    prefill.table.connection_ended(1)
    prefill.table.connected(A, BackendError("cannot be reached"))
    prefill.gone(A)
    prefill.pair(A, 2)
    prefill.run(2 * GRACE_S)
    assert prefill.paired() == prefill.known == {A}


def test_decode_may_pair_again_after_worker_fault(prefill) -> None:
    prefill.pair(A, 1)
    prefill.table.connection_ended(1)
    prefill.gone(A)
    assert prefill.known == set()
    prefill.pair(A, 2)
    prefill.run(2 * GRACE_S)
    assert prefill.paired() == prefill.known == {A}


def test_connection_belongs_to_one_process(prefill) -> None:
    for number in range(5):
        prefill.pair(f"{number:032x}", 1, f"h:{number + 10}")
    assert prefill.paired() == prefill.known == {f"{4:032x}"}
    prefill.table.connection_ended(1)
    prefill.run(2 * GRACE_S)
    for number in range(5):
        prefill.gone(f"{number:032x}")
    assert list(prefill.table) == []


def test_successor_gets_the_place_in_full_table(prefill, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 1)
    prefill.pair(A, 1)
    prefill.hello(B, 2)
    assert prefill.paired() == set(), "a new process at an address ends the old one there, whether it gets in or not"
    prefill.gone(A)
    prefill.pair(B, 2)
    assert prefill.paired() == {B}


def test_shut_table_refuses_waiting_hellos(prefill) -> None:
    prefill.pair(A, 1)
    prefill.hello(C, 2)
    prefill.hello(B, 3)
    assert B not in prefill.table, "it waits for its turn"
    prefill.table.shut()
    prefill.hello(A, 4)
    prefill.run(1.0)
    refused = {route for route, frame in prefill.sent if isinstance(frame, f.HelloRefused) and frame.retry}
    assert refused == {b"3", b"4"}
    assert B not in prefill.table


def test_known_decode_waits_behind_no_other(prefill) -> None:
    prefill.pair(A, 1)
    prefill.hello(C, 2)
    prefill.hello(B, 3)
    prefill.table.connection_ended(1)
    prefill.hello(A, 4)
    assert prefill.table.sender(A, b"4") is not None
    assert B not in prefill.table


def test_unpaired_sender_is_refused_at_a_rate(prefill) -> None:
    prefill.pair(A, 1)
    prefill.table.unknown(A, b"1")
    assert prefill.sent == [], "it is paired; the words came by another connection"
    prefill.table.lose(prefill.table.get(A), "gone")
    for _ in range(3):
        prefill.table.unknown(A, b"1")
        prefill.table.unknown(C, b"2")
    assert [(route, frame.retry) for route, frame in prefill.sent] == [(b"1", True), (b"2", True)]
    prefill.run(1.0)
    prefill.table.unknown(C, b"2")
    assert len(prefill.sent) == 3


def test_worker_fault_sends_goodbye(prefill) -> None:
    prefill.pair(A, 1)
    prefill.gone(A)
    ((route, goodbye),) = prefill.sent
    assert (route, type(goodbye)) == (b"1", f.Goodbye)


def test_workers_ended_by_close_are_no_fault(prefill, caplog) -> None:
    prefill.pair(A, 1)
    prefill.table.leave()
    prefill.gone(A)
    assert [type(frame) for _, frame in prefill.sent] == [f.Goodbye]
    assert "failed" not in caplog.text


def test_decode_may_use_two_connections(prefill) -> None:
    prefill.pair(A, 1)
    prefill.pair(B, 2, "h:2")
    prefill.hello(A, 3)
    for number in (1, 3, 1):
        peer = prefill.table.sender(A, b"%d" % number)
        assert (peer.incarnation, peer.route) == (A, b"3")
    assert prefill.table.sender(A, b"2") is None
    assert prefill.table.sender(A, b"4") is None
    prefill.table.connection_ended(1)
    assert not prefill.timers
    assert prefill.table.sender(A, b"1") is None
    prefill.table.connection_ended(3)
    prefill.run(2 * GRACE_S)
    assert prefill.paired() == {B}


def test_decode_lives_on_by_other_connection(prefill) -> None:
    prefill.pair(A, 1)
    prefill.hello(A, 2)
    prefill.table.connection_ended(2)
    prefill.run(GRACE_S / 2)
    ((route, asked),) = prefill.sent
    assert (route, type(asked), asked.retry) == (b"1", f.HelloRefused, True)
    assert prefill.table.sender(A, b"2") is not None, "what it had said before is heard"
    peer = prefill.table.sender(A, b"1")
    assert peer.route == b"1"
    prefill.run(2 * GRACE_S)
    assert prefill.paired() == {A}
    prefill.table.connection_ended(1)
    prefill.run(2 * GRACE_S)
    assert prefill.paired() == set()


def test_connections_of_a_decode_are_bounded(prefill) -> None:
    prefill.pair(A, 1)
    for number in range(2, 5 * MAX_ROUTES):
        prefill.hello(A, number)
    (peer,) = prefill.table
    assert len(peer.routes) == len(prefill.table._by_connection) == MAX_ROUTES
    assert prefill.table.sender(A, b"1") is None


def test_decode_that_does_not_fit_may_send_aborts(prefill) -> None:
    other = encode_remote(RemoteMemory(backend="nixl", memory=MEMORY, descriptor=b""))
    prefill.hello(A, 1, memory=other)
    prefill.run(1.0)
    ((route, refused),) = prefill.sent
    assert (route, refused.retry, "backend is 'local' at prefill and 'nixl' at decode" in refused.reason) == (
        b"1",
        False,
        True,
    )
    assert (prefill.misfits, prefill.table.route_to(A)) == ({A: f.VERSION_MAX}, b"1")
    assert prefill.table.is_misfit(A, b"1")
    assert not prefill.table.is_misfit(A, b"2")
    assert prefill.table.sender(A, b"1") is None
    prefill.table.connection_ended(1)
    assert (prefill.misfits, prefill.table.route_to(A)) == ({}, None)


def test_decode_of_other_version_may_send_aborts(prefill) -> None:
    prefill.hello(A, 1, versions=(7, 8))
    ((_, refused),) = prefill.sent
    assert (refused.version, refused.retry) == (7, False), "decode cannot read the answer"
    assert "protocol version is 1..1 at prefill and 7..8 at decode" in refused.reason
    assert prefill.misfits == {A: 7}
    assert prefill.table.is_misfit(A, b"1")


def test_decode_rejected_by_backend_may_send_aborts(prefill) -> None:
    prefill.hello(A, 1)
    prefill.run(1.0)
    prefill.table.connected(A, IncompatiblePeerError("its memory lies on device 0"))
    prefill.table.connection_ended(1)
    prefill.hello(A, 2)
    assert [(route, refused.retry) for route, refused in prefill.sent] == [(b"1", False), (b"2", False)]
    assert prefill.sent[1][1].reason == prefill.sent[0][1].reason
    assert prefill.table.is_misfit(A, b"2")
    prefill.gone(A)
    assert prefill.table.route_to(A) == b"2"


class Lives(RuleBasedStateMachine):
    """Processes A, B and C do what they can, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill = Prefill()
        self.table = self.prefill.table
        self.opened = 0
        self.open: set[int] = set()
        self.connecting: set[str] = set()
        self.said: set[tuple[int, str]] = set()

    @rule(sender=st.sampled_from([A, B, C]), again=st.booleans())
    def hello(self, sender: str, again: bool) -> None:
        if not (again and self.open):
            self.opened += 1
            self.open.add(self.opened)
        before = dict(self.prefill.workers)
        self.prefill.hello(sender, max(self.open))
        self.said.add((max(self.open), sender))
        self.note(before)

    @rule(sender=st.sampled_from([A, B, C]), choice=st.integers(0, 5))
    def speaks(self, sender: str, choice: int) -> None:
        if self.open:
            number = sorted(self.open)[choice % len(self.open)]
            peer = self.table.sender(sender, b"%d" % number)
            if peer is not None:
                assert peer.incarnation == sender
                assert (number, sender) in self.said
                assert peer.connection in self.open

    def note(self, before: dict) -> None:
        self.connecting |= {name for name, worker in self.prefill.workers.items() if before.get(name) is not worker}

    @rule(choice=st.integers(0, 5))
    def connection_ends(self, choice: int) -> None:
        if self.open:
            number = sorted(self.open)[choice % len(self.open)]
            self.open.discard(number)
            self.table.connection_ended(number)

    @rule(sender=st.sampled_from([A, B, C]), error=st.sampled_from([None, None, BackendError, IncompatiblePeerError]))
    def backend_answers(self, sender: str, error: type[BackendError] | None) -> None:
        if sender in self.connecting:
            self.connecting.discard(sender)
            self.table.connected(sender, error("cannot be reached") if error else None)

    @rule(sender=st.sampled_from([A, B, C]))
    def worker_ends(self, sender: str) -> None:
        if sender in self.prefill.workers and sender not in self.connecting:
            self.prefill.gone(sender)

    @rule(sender=st.sampled_from([A, B, C]))
    def goodbye(self, sender: str) -> None:
        if (peer := self.table.paired(sender)) is not None:
            self.table.lose(peer, "goodbye")

    @rule()
    def fence(self) -> None:
        self.prefill.fenced.add(A)
        self.prefill.known.discard(A)
        self.table.mark_lost(A, "was fenced")

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.1]))
    def time_passes(self, seconds: float) -> None:
        before = dict(self.prefill.workers)
        self.prefill.run(seconds)
        self.note(before)

    @invariant()
    def table_and_machine_agree(self) -> None:
        assert self.prefill.paired() == self.prefill.known

    @invariant()
    def who_is_present_has_a_connection_or_a_grace(self) -> None:
        for peer in self.table:
            assert peer.present or not peer.paired
            if peer.present and peer.connection in self.open:
                assert self.table._by_connection[peer.connection] is peer
            elif peer.present:
                assert ("grace", peer.incarnation) in self.prefill.timers
        assert all(self.table.get(peer.incarnation) is peer for peer in self.table._by_connection.values())

    @invariant()
    def graces_are_for_those_who_are_missing(self) -> None:
        for key in self.prefill.timers:
            if key != "hellos":
                peer = self.table.get(key[1])
                assert peer is not None
                assert peer.present
                assert peer.connection not in self.open


class TestLives(Lives.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
