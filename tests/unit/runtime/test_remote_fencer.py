"""When the word on a peer that ended becomes a fence, and that it always does. The kernel's tables are the test's."""

import ipaddress
from collections.abc import Callable, Hashable
from concurrent.futures import Future

import pytest
from pdpool_connector.layout.process import ProcessName, this_process
from pdpool_connector.protocol.fence import (
    ConnectionsEnded,
    ContainerTerminated,
    InsufficientProofError,
    Proof,
)
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.remote_fencer import RemoteFencer

PEER = "a" * 32
PROCESS = ProcessName(pid=1, started=1, boot_id="another host", pid_namespace="1", addresses=("10.0.0.2",))
WORD = ContainerTerminated(pod_uid="uid", container_id="id", seen_by="operator")
SEEN_HERE = ConnectionsEnded(seen_by="us")
CONNECTION = (
    (ipaddress.ip_address("10.0.0.1").packed, 50_000),
    (ipaddress.ip_address("10.0.0.2").packed, 7_000),
)


class World:
    """Reactor, kernel and connector in one."""

    def __init__(self) -> None:
        self.table = frozenset({CONNECTION})
        self.owed = True
        self.fenced: list[tuple[str, tuple[Proof, ...]]] = []
        self.posted: list[Callable[[], None]] = []
        self.timers: dict[Hashable, Callable[[], None]] = {}

    def now(self) -> float:
        return 0.0

    def post(self, call) -> None:
        self.posted.append(call)

    def at(self, key, _when, call) -> None:
        self.timers[key] = call

    def submit(self, look) -> Future:
        look.close()
        seen: Future = Future()
        seen.set_result(self.table)
        return seen

    def look(self) -> None:
        """The next look is due, and its result arrives."""
        timers, self.timers = self.timers, {}
        for call in timers.values():
            call()
        posted, self.posted = self.posted, []
        for call in posted:
            call()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def vouchers(world) -> RemoteFencer:
    """One peer of another host is paired, over a data plane for which the word alone does not suffice."""
    made = RemoteFencer(
        "nixl",
        sending=False,
        who="us",
        reactor=world,
        submit=world.submit,
        fence=lambda peer, proofs: world.fenced.append((peer, proofs)),
        owed=lambda _: world.owed,
        here=this_process(),
        timeouts=Timeouts(),
    )
    made.note(PEER, "10.0.0.2:8999", PROCESS)
    return made


def test_peer_is_fenced_when_its_connections_end(world, vouchers) -> None:
    vouchers.check(PEER, (WORD,))
    vouchers.take(PEER, (WORD,))
    world.look()
    world.look()
    assert not world.fenced
    world.table = frozenset()
    world.look()
    assert world.fenced == [(PEER, (WORD, SEEN_HERE))]


def test_peer_without_holds_is_fenced_at_once(world, vouchers) -> None:
    world.owed = False
    vouchers.check(PEER, (WORD,))
    vouchers.take(PEER, (WORD,))
    world.look()
    assert world.fenced == [(PEER, (WORD,))], "nobody saw its connections end, and nobody says so"


@pytest.mark.parametrize("known", [True, False])
def test_accepted_proof_outlives_the_holds(world, vouchers, known) -> None:
    vouchers.take(PEER, (WORD,))
    world.look()
    world.owed = False
    vouchers.keep([PEER] if known else [])
    world.look()
    assert world.fenced == [(PEER, (WORD,))]
    assert not world.timers
    assert not world.posted


def test_proof_for_unknown_process_does_not_suffice(vouchers) -> None:
    with pytest.raises(InsufficientProofError):
        vouchers.check("b" * 32, (WORD,))


@pytest.mark.parametrize(
    ("given", "message"), [((SEEN_HERE,), "ConnectionsEnded is no proof"), ((), "give at least one")]
)
def test_refusal_names_given_proofs_only(vouchers, given, message) -> None:
    with pytest.raises(InsufficientProofError, match=f"^{message}"):
        vouchers.check(PEER, given)
