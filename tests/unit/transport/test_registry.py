"""The bootstrap registry: who is registered, for how long, and what decode receives. Time is given by the tests."""

import asyncio
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.layout.memory import LayoutError
from pdpool_connector.layout.pairing import shard_model
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport import lease
from pdpool_connector.transport.bootstrap import (
    BOOTSTRAP_PATH,
    RANKS_PATH,
    BootstrapClient,
    BootstrapError,
    BootstrapInfo,
    RankInfo,
    Refusal,
    Registration,
)
from pdpool_connector.transport.curve import CurveKey, make_key
from pdpool_connector.transport.http import MAX_BODY_BYTES, Asked, HttpServer
from pdpool_connector.transport.lease import LeaseKeeper
from pdpool_connector.transport.registry import REMEMBERED, RegistrationError, Registry, RegistryEndpoint
from pdpool_connector.transport.tokens import sign_registration

from tests.clock import Clock

LOOPBACK = ("127.0.0.0/8",)
TIMEOUTS = Timeouts(lease_retry_s=0.01, registry_s=60.0)
PARTS = shard_model([2, 1], 4)
FACTS = {"dp_size": "8"}
LEASE_S = 5.0


def info(rank: int, life: int = 0, **changes) -> RankInfo:
    whole = {
        "rank": rank,
        "incarnation": f"{rank * 100 + life:032x}",
        "control": f"127.0.0.1:{9000 + rank}",
        "shard": PARTS[min(rank, 1)],
        "protocol": (1, 1),
    }
    return RankInfo(**whole | changes)


def registration(rank: int, life: int = 0, *, ranks: int = 2, **changes) -> Registration:
    return Registration(info=info(rank, life, **changes), ranks=ranks)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(PARTS, info(0), FACTS, LEASE_S, clock)


def test_single_rank_is_complete_at_once() -> None:
    parts = shard_model([3], 4)
    alone = info(0, shard=parts[0])
    assert Registry(parts, alone, {}, LEASE_S).ranks() == BootstrapInfo((alone,))


def test_ranks_are_served_once_complete(registry, clock) -> None:
    refusal = registry.ranks()
    assert isinstance(refusal, Refusal)
    assert (refusal.missing, refusal.error) == ((1,), "of 2 ranks, these are missing: 1 (never registered)")
    clock.now += 3.0
    assert registry.incomplete_s() == 3.0
    assert registry.register(registration(1)).lease_s == LEASE_S
    assert registry.incomplete_s() is None
    assert registry.ranks() == BootstrapInfo((info(0), info(1)), FACTS)


def test_expired_lease_makes_instance_incomplete(registry, clock) -> None:
    registry.register(registration(1))
    clock.now += LEASE_S - 0.1
    registry.register(registration(1))
    clock.now += LEASE_S - 0.1
    assert isinstance(registry.ranks(), BootstrapInfo)
    clock.now += 1.1
    refusal = registry.ranks()
    assert isinstance(refusal, Refusal)
    assert (refusal.missing, refusal.error) == ((1,), "of 2 ranks, these are missing: 1 (not renewed for 6.0 s)")
    assert registry.incomplete_s() == pytest.approx(1.0)
    registry.register(registration(1))
    assert isinstance(registry.ranks(), BootstrapInfo)


def test_new_process_replaces_the_former(registry) -> None:
    registry.register(registration(1, life=1))
    registry.register(registration(1, life=2))
    assert registry.ranks().ranks[1] == info(1, life=2)


def test_replaced_process_stays_out(registry) -> None:
    for life in range(REMEMBERED + 1):
        registry.register(registration(1, life))
    for life in range(REMEMBERED):
        with pytest.raises(RegistrationError, match="rank 1 was taken over by another process"):
            registry.register(registration(1, life))
    assert registry.ranks().ranks[1] == info(1, life=REMEMBERED)


def test_waking_process_holds_one_lease_only(registry, clock) -> None:
    """The registry was restarted, and cannot know which of the two came first."""
    successor, former = registration(1, life=2), registration(1, life=1)
    registry.register(successor)
    registry.register(former)
    clock.now += LEASE_S - 0.1
    with pytest.raises(RegistrationError, match="rank 1 was taken over by another process"):
        registry.register(successor)
    clock.now += 0.1
    registry.register(successor)
    assert registry.ranks() == BootstrapInfo((info(0), successor.info), FACTS)
    with pytest.raises(RegistrationError, match="rank 1 was taken over by another process"):
        registry.register(former)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (registration(1, ranks=3), "ranks is 3, this instance has 2"),
        (registration(0), "rank is 0, must be 1..1"),
        (registration(2), "rank is 2, must be 1..1"),
        (registration(1, shard=PARTS[0]), "shard of rank 1 is"),
    ],
)
def test_rank_of_another_instance_is_refused(registry, wrong: Registration, why: str) -> None:
    with pytest.raises(RegistrationError, match=why):
        registry.register(wrong)
    assert isinstance(registry.ranks(), Refusal)


def test_incomplete_model_is_refused() -> None:
    with pytest.raises(LayoutError, match="layers of prefill: from 2 to 2 no rank holds them"):
        Registry(PARTS[:1], info(0), {}, LEASE_S)


class Served:
    """A registry behind real HTTP."""

    def __init__(self, clock: Clock, networks: tuple[str, ...] = LOOPBACK, keys: Sequence[CurveKey] = ()) -> None:
        self.refused: list[str] = []
        self.registry = Registry(PARTS, info(0), FACTS, LEASE_S, clock)
        self.http = HttpServer("127.0.0.1")
        endpoint = RegistryEndpoint(self.registry, networks, self.refused.append, keys)
        self.address = f"127.0.0.1:{self.http.serve(0, {}, endpoint.handlers())}"

    def put(self, body: bytes, authorization: str = "") -> tuple[int, dict]:
        return self.call("PUT", RANKS_PATH, body, {"Authorization": authorization} if authorization else {})

    def get(self) -> tuple[int, dict]:
        return self.call("GET", BOOTSTRAP_PATH, None)

    def call(self, method: str, path: str, body: bytes | None, headers: dict | None = None) -> tuple[int, dict]:
        request = urllib.request.Request(f"http://{self.address}{path}", body, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {}


@pytest.fixture
def served(clock: Clock) -> Iterator[Served]:
    served = Served(clock)
    yield served
    served.http.close()


def test_missing_ranks_answer_503(served) -> None:
    assert served.get() == (503, {"error": "of 2 ranks, these are missing: 1 (never registered)", "missing": [1]})
    assert served.put(msgspec.json.encode(registration(1))) == (200, {"lease_s": LEASE_S})
    status, answer = served.get()
    assert (status, [rank["control"] for rank in answer["ranks"]]) == (200, ["127.0.0.1:9000", "127.0.0.1:9001"])
    assert answer["ranks"][1]["shard"]["first_layer"] == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{}",
        b"[" * 10_000,
        b"\xff\xfe",
        msgspec.json.encode(registration(1)).replace(b'"rank":1', b'"rank":"1"'),
        msgspec.json.encode(registration(1)).replace(b'"layers":1', b'"layers":2'),
        msgspec.json.encode(registration(1)).replace(b"00", b"zz"),
    ],
)
def test_wrong_body_changes_nothing(served, body: bytes) -> None:
    status, answer = served.put(body)
    assert (status, "not a registration" in answer["error"]) == (400, True)
    assert served.get()[0] == 503
    assert len(served.refused) == 1


_VALID = msgspec.json.encode(registration(1, life=5))


@st.composite
def bodies(draw) -> bytes:
    """Noise, or a registration with a stretch of it replaced by noise."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=600))
    at = draw(st.integers(0, len(_VALID)))
    return _VALID[:at] + draw(st.binary(max_size=40)) + _VALID[at + draw(st.integers(0, 40)) :]


@given(bodies())
def test_no_body_breaks_the_registry(body: bytes) -> None:
    registry = Registry(PARTS, info(0), FACTS, LEASE_S, Clock())
    reply = RegistryEndpoint(registry, LOOPBACK, lambda _: None)._put(Asked(body, "127.0.0.1"))
    assert reply.status in (200, 400, 409)
    seated = registry.ranks()
    assert isinstance(seated, BootstrapInfo) == (reply.status == 200)
    if isinstance(seated, BootstrapInfo):
        assert seated.ranks[0] == info(0)
        assert seated.ranks[1].shard == PARTS[1]


def test_oversized_body_is_refused_unread(served) -> None:
    assert served.put(b" " * (MAX_BODY_BYTES + 1))[0] == 413
    assert served.get()[0] == 503


def test_registration_from_outside_networks_is_refused(clock) -> None:
    served = Served(clock, networks=("10.0.0.0/8",))
    status, answer = served.put(msgspec.json.encode(registration(1)))
    served.http.close()
    assert (status, answer["error"]) == (403, "127.0.0.1 is in none of the allowed networks")
    assert served.refused == [f"registration from 127.0.0.1: {answer['error']}"]


@pytest.mark.parametrize(
    ("control", "status", "message"),
    [
        ("10.0.0.1:9001", 403, "control='10.0.0.1:9001' is in none of the allowed networks"),
        ("nowhere", 400, "control: 'nowhere' is no address"),
    ],
)
def test_control_address_outside_networks_is_refused(served, control, status, message) -> None:
    answered, answer = served.put(msgspec.json.encode(registration(1, control=control)))
    assert (answered, message in answer["error"]) == (status, True)
    assert served.get()[0] == 503


def test_control_host_may_be_a_name(served) -> None:
    assert served.put(msgspec.json.encode(registration(1, control="rank-1.engines:9001")))[0] == 200


OLD, NEW, STRANGE = make_key(), make_key(), make_key()
RANK_1 = msgspec.json.encode(registration(1))
ANOTHER = msgspec.json.encode(registration(1, life=2, control="127.0.0.1:6666"))
"""A registration that would take the place of rank 1."""


@pytest.fixture
def keyed(clock: Clock) -> Iterator[Served]:
    served = Served(clock, keys=(OLD, NEW))
    yield served
    served.http.close()


@pytest.mark.parametrize("seated", [False, True], ids=["an empty seat", "a seat that is taken"])
@pytest.mark.parametrize(
    ("sign", "why"),
    [
        (lambda: "", "a token is needed"),
        (lambda: sign_registration(STRANGE, ANOTHER, "1", time.time()), "InvalidSignatureError"),
        (lambda: sign_registration(OLD, RANK_1, "2", time.time()), "the token is for another registration"),
        (lambda: sign_registration(OLD, ANOTHER, "3", time.time() - 3600), "the clock here says"),
    ],
    ids=["unsigned", "signed by another key", "signed for another body", "signed an hour ago"],
)
def test_registration_without_known_key_is_refused(keyed, sign: Callable[[], str], why: str, seated: bool) -> None:
    if seated:
        assert keyed.put(RANK_1, sign_registration(OLD, RANK_1, "2", time.time()))[0] == 200
    before = keyed.get()
    status, answer = keyed.put(ANOTHER, sign())
    assert (status, why in answer["error"]) == (401, True)
    assert keyed.refused == [f"registration from 127.0.0.1: {answer['error']}"]
    assert keyed.get() == before
    assert before[0] == (200 if seated else 503)


def test_replayed_registration_is_refused(keyed) -> None:
    signed = sign_registration(OLD, RANK_1, "once", time.time())
    assert keyed.put(RANK_1, signed)[0] == 200
    status, answer = keyed.put(RANK_1, signed)
    assert (status, answer["error"]) == (401, "the token was used before")


@pytest.mark.parametrize("keys", [(OLD,), (NEW, OLD)], ids=["the first", "the second"])
def test_client_signs_with_its_first_key(keyed, keys) -> None:
    assert asyncio.run(BootstrapClient(LOOPBACK, keys).register(keyed.address, registration(1), 30.0)) == LEASE_S
    assert keyed.get()[0] == 200


@pytest.mark.parametrize("keys", [(), (STRANGE,), (STRANGE, OLD)], ids=["no key", "another key", "another key first"])
def test_client_without_key_gets_the_reason(keyed, keys) -> None:
    with pytest.raises(BootstrapError, match="token"):
        asyncio.run(BootstrapClient(LOOPBACK, keys).register(keyed.address, registration(1), 30.0))
    assert keyed.get()[0] == 503


def test_client_registers_or_gets_the_reason(served) -> None:
    client = BootstrapClient(LOOPBACK)
    with pytest.raises(BootstrapError, match="ranks is 3, this instance has 2"):
        asyncio.run(client.register(served.address, registration(1, ranks=3), 30.0))
    assert asyncio.run(client.register(served.address, registration(1), 30.0)) == LEASE_S
    assert asyncio.run(client.ask(served.address, 30.0)) == BootstrapInfo((info(0), info(1)), FACTS)


def test_rank_retries_and_logs_once(served, clock, caplog) -> None:
    caplog.set_level(logging.INFO)
    for life in (0, 1):
        served.registry.register(registration(1, life))
    keeper = LeaseKeeper(BootstrapClient(LOOPBACK), served.address, registration(1), TIMEOUTS)
    task = served.http.submit(keeper.run())
    wait_until(lambda: len(served.refused) >= 3)
    assert "was taken over" in keeper.failure
    clock.now += LEASE_S
    wait_until(lambda: not keeper.failure)
    assert isinstance(served.registry.ranks(), BootstrapInfo)
    task.cancel()
    messages = [record.message for record in caplog.records if record.name == lease.__name__]
    assert ["not registered" in message for message in messages] == [True, False]


def test_lease_is_renewed_in_time(served, clock, monkeypatch) -> None:
    monkeypatch.setattr(lease, "RENEWALS", LEASE_S / 0.02)
    keeper = LeaseKeeper(BootstrapClient(LOOPBACK), served.address, registration(1), TIMEOUTS)
    task = served.http.submit(keeper.run())
    for _ in range(3):
        wait_until(lambda: isinstance(served.registry.ranks(), BootstrapInfo))
        clock.now += LEASE_S + 1
    wait_until(lambda: isinstance(served.registry.ranks(), BootstrapInfo))
    task.cancel()


def test_lease_outlives_an_unexpected_error(served, monkeypatch) -> None:
    client = BootstrapClient(LOOPBACK)
    keeper = LeaseKeeper(client, served.address, registration(1), TIMEOUTS)
    with monkeypatch.context() as broken:
        broken.setattr(client, "register", raising(RuntimeError("can't start new thread")))
        task = served.http.submit(keeper.run())
        wait_until(lambda: keeper.failure == "RuntimeError: can't start new thread")
    wait_until(lambda: not keeper.failure)
    assert isinstance(served.registry.ranks(), BootstrapInfo)
    task.cancel()


def raising(error: Exception):
    async def fail(*_: object) -> float:
        raise error

    return fail


def wait_until(condition, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)
