"""Keys of the control channel and tokens of the admin endpoint, on live connectors."""

import contextlib
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pdpool_connector import DecodeConnector, Phase, PrefillConnector, Timeouts
from pdpool_connector.layout.pairing import shard_model
from pdpool_connector.protocol import frames as f
from pdpool_connector.transport.bootstrap import BOOTSTRAP_PATH, RANKS_PATH, RankInfo, Registration
from pdpool_connector.transport.curve import CurveKey, connect_with, make_key
from pdpool_connector.transport.tokens import TokenVerifier, sign_operation, sign_registration

from tests.integration.small_side import Side, offer
from tests.waiting import until

IDS = itertools.count(1)
FENCE = {"incarnation": "0" * 32, "proofs": [{"kind": "process_exited", "pid": 1, "seen_by": "test"}]}
SIGNER = Ed25519PrivateKey.generate()
PRIVATE = SIGNER.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
PUBLIC = SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@contextlib.contextmanager
def sides(prefill: dict, decode: dict) -> Iterator[tuple[Side, Side]]:
    with contextlib.ExitStack() as stack:
        made = [Side(PrefillConnector, **prefill), Side(DecodeConnector, **decode)]
        for side in made:
            stack.callback(side.close)
        yield made[0], made[1]


def begin(source: Side, target: Side):
    room = next(IDS)
    source.cache[:, 3] = room % 255 + 1
    sent = source.connector.open(room, "r")
    got = offer(target, source, room, [5])
    sent.send([3], start=0, last=True, aux_slot=1)
    return got


def hand_over(source: Side, target: Side):
    got = begin(source, target)
    until(lambda: got.status.ended)
    return got, np.array_equal(target.cache[:, 5], source.cache[:, 3])


def keys(*pairs: CurveKey) -> dict:
    return {"curve": pairs}


OLD, NEW, STRANGE = make_key(), make_key(), make_key()
UNKEYED = ("did not answer hello", "ended before it was paired")
"""How decode's link shows that no key fits."""


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((OLD,), (OLD,)), ((OLD, NEW), (NEW, OLD)), ((NEW, OLD), (OLD, NEW)), ((OLD, NEW), (OLD,))],
    ids=["one key", "decode is ahead", "prefill is ahead", "the new one is only known"],
)
def test_hand_offs_go_on_during_key_rotation(prefill, decode):
    with sides(keys(*prefill), keys(*decode)) as (source, target):
        got, same = hand_over(source, target)
        assert got.status.phase is Phase.DONE
        assert same


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((OLD,), (STRANGE,)), ((OLD,), ()), ((), (OLD,))],
    ids=["another key", "decode has none", "prefill has none"],
)
def test_wrong_key_pairs_nothing_and_shows_why(prefill, decode):
    with sides(keys(*prefill), keys(*decode)) as (source, target):
        got = begin(source, target)
        until(lambda: any(words in link.failure for link in target.connector.stats().links for words in UNKEYED))
        if prefill:
            until(lambda: source.connector.stats().drops.get("unauthenticated", 0) > 0)
        assert source.connector.stats().peers == ()
        got.abort("nothing comes")
        until(lambda: got.status.ended)
        assert got.status.phase is Phase.FAILED
        assert got.status.releasable, "no peer knows the pages"
        assert not target.cache[:, 5].any()


def test_public_key_alone_opens_nothing():
    """The public key of a service is no secret: a client needs a secret key of the set."""
    with sides(keys(OLD), keys(OLD)) as (source, target):
        hand_over(source, target)
        until(lambda: source.connector.stats().peers)
        (victim,) = source.connector.stats().peers
        with zmq.Context() as context, context.socket(zmq.DEALER) as impostor:
            impostor.setsockopt(zmq.LINGER, 0)
            connect_with(impostor, STRANGE)
            impostor.curve_serverkey = OLD.public
            impostor.connect(f"tcp://{source.connector.control_address}")
            impostor.send(f.encode(f.Goodbye(version=1, sender=victim.incarnation, reason="lies")))
            until(lambda: source.connector.stats().drops.get("unauthenticated", 0) > 0)
            assert [peer.incarnation for peer in source.connector.stats().peers] == [victim.incarnation]
            assert hand_over(source, target)[0].status.phase is Phase.DONE


TWO = shard_model([1], 2, tp=2)
(BOTH,) = shard_model([1], 2)


@contextlib.contextmanager
def first_rank(*pairs: CurveKey, **config: Any) -> Iterator[Side]:
    with contextlib.closing(Side(PrefillConnector, shard=TWO[0], instance=TWO, **keys(*pairs), **config)) as side:
        yield side


@contextlib.contextmanager
def second_rank(first: Side, *pairs: CurveKey) -> Iterator[Side]:
    where = {"rank": 1, "registry": first.connector.bootstrap_address}
    with contextlib.closing(Side(PrefillConnector, shard=TWO[1], instance=TWO, **where, **keys(*pairs))) as side:
        yield side


def registry_of(first: Side) -> str:
    (link,) = first.connector.stats().links
    return link.state


def ask(side: Side, method: str, path: str, body: bytes | None = None, authorization: str = "") -> tuple[int, dict]:
    url = f"http://{side.connector.bootstrap_address}{path}"
    headers = {"Authorization": authorization} if authorization else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize(
    ("second", "decode"),
    [((OLD, NEW), (OLD, NEW)), ((NEW, OLD), (NEW, OLD))],
    ids=["the same keys", "the others are ahead"],
)
def test_ranks_with_keys_make_a_whole_instance(second, decode):
    with first_rank(OLD, NEW) as first, second_rank(first, *second) as other:
        until(lambda: registry_of(first) == "whole")
        with contextlib.closing(Side(DecodeConnector, shard=BOTH, **keys(*decode))) as target:
            room = next(IDS)
            got = offer(target, first, room, [5])
            for rank, source in enumerate((first, other)):
                source.cache[:, 3] = 11 + rank
                source.connector.open(room, "r").send([3], start=0, last=True, aux_slot=1)
            until(lambda: got.status.ended)
            assert got.status.phase is Phase.DONE
            heads = target.cache[:, 5].reshape(2, 16, 2, -1)
            assert [np.unique(heads[:, :, head]).tolist() for head in (0, 1)] == [[11], [12]]
            assert "registration" not in first.connector.stats().drops


def taking_the_place_of_rank_1() -> bytes:
    info = RankInfo(rank=1, incarnation="6" * 32, control="127.0.0.1:6666", shard=TWO[1], protocol=(1, 1))
    return msgspec.json.encode(Registration(info=info, ranks=2))


@pytest.mark.parametrize(
    "sign",
    [
        lambda _: "",
        lambda body: sign_registration(STRANGE, body, "1", time.time()),
        lambda body: sign_registration(OLD, body.replace(b"6666", b"6667"), "2", time.time()),
    ],
    ids=["unsigned", "signed by another key", "signed for another body"],
)
def test_unsigned_registration_is_refused_and_counted(sign: Callable[[bytes], str]):
    body = taking_the_place_of_rank_1()
    # On a slow machine too, no lease ends between two requests.
    with first_rank(OLD, timeouts=Timeouts(lease_s=600.0)) as first:
        missing = ask(first, "GET", BOOTSTRAP_PATH)
        assert (missing[0], missing[1]["missing"]) == (503, [1])
        assert ask(first, "PUT", RANKS_PATH, body, sign(body))[0] == 401
        assert ask(first, "GET", BOOTSTRAP_PATH) == missing
        until(lambda: first.connector.stats().drops.get("registration") == 1)
        with second_rank(first, OLD) as other:
            until(lambda: registry_of(first) == "whole")
            whole = ask(first, "GET", BOOTSTRAP_PATH)
            assert whole[1]["ranks"][1]["incarnation"] == other.connector.incarnation
            assert ask(first, "PUT", RANKS_PATH, body, sign(body))[0] == 401
            assert ask(first, "GET", BOOTSTRAP_PATH) == whole
            until(lambda: first.connector.stats().drops.get("registration") == 2)


def test_rank_with_another_key_is_left_out():
    with first_rank(OLD) as first, second_rank(first, STRANGE) as other:
        until(lambda: first.connector.stats().drops.get("registration", 0) > 0)
        until(lambda: "the token is not valid" in other.connector.stats().links[0].failure)
        assert other.connector.stats().links[0].state == "registering"
        assert registry_of(first) == "incomplete"


def post(side: Side, operation: str, body: dict, authorization: str = "") -> tuple[int, dict]:
    request = urllib.request.Request(
        f"http://{side.connector.admin_address}/v1/{operation}",
        json.dumps(body).encode(),
        {"Authorization": authorization},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def token(operation: str, audience: str = "pod") -> str:
    return sign_operation(PRIVATE, audience, operation, "operator", f"id-{next(IDS)}", time.time())


@pytest.fixture
def guarded() -> Iterator[Side]:
    side = Side(PrefillConnector, admin_gate=TokenVerifier(PUBLIC, "pod"))
    yield side
    side.close()


def test_weak_proof_fences_nothing_and_names_a_better(guarded, caplog):
    weak = {**FENCE, "proofs": [{"kind": "connections_ended", "seen_by": "test"}]}
    status, answer = post(guarded, "fence", weak, token("fence"))
    assert status == 422
    assert "ProcessExited" in answer["error"]
    assert post(guarded, "fence", FENCE, token("fence"))[0] == 200
    until(lambda: fence_lines(caplog, "fence of "))
    proof = "ProcessExited(pid=1, seen_by='test')"
    assert fence_lines(caplog, "fence of ") == [f"fence of {'0' * 32}: {proof}"], "one for the one that sufficed"
    until(lambda: fence_lines(caplog, "fence by "))
    assert fence_lines(caplog, "fence by ") == [f"fence by operator: {'0' * 32} is to be fenced: {proof}"]


def fence_lines(caplog, begin: str) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith(begin)]


@pytest.mark.parametrize(
    ("body", "signed_for", "status"),
    [
        (FENCE, None, 401),
        (FENCE, ("fence", "another pod"), 401),
        (FENCE, ("drain", "pod"), 401),
        ({"incarnation": "x", "proofs": []}, ("fence", "pod"), 400),
        ({"incarnation": "0" * 32, "proofs": [{"kind": "hearsay"}]}, ("fence", "pod"), 400),
    ],
)
def test_bad_fence_request_changes_nothing(guarded, caplog, body, signed_for, status):
    assert post(guarded, "fence", body, token(*signed_for) if signed_for else "")[0] == status
    assert not fence_lines(caplog, "fence of ")


def test_without_operator_key_admin_is_read_only():
    with sides({}, {}) as (source, _):
        status, answer = post(source, "fence", FENCE, token("fence"))
        assert status == 403
        assert "read only" in answer["error"]
