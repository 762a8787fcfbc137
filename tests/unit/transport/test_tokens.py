import itertools

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pdpool_connector.transport.curve import make_key
from pdpool_connector.transport.tokens import (
    MAX_LIFE_S,
    SKEW_S,
    TokenError,
    TokenVerifier,
    check_registration,
    sign_operation,
    sign_registration,
)

from tests.clock import Clock

NOW = 1_800_000_000.0
IDS = itertools.count()


def key_pair() -> tuple[str, str]:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


PRIVATE, PUBLIC = key_pair()


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture
def gate(clock) -> TokenVerifier:
    return TokenVerifier(PUBLIC, "pod-uid", clock)


def token(private=PRIVATE, audience="pod-uid", operation="fence", now=NOW) -> str:
    return sign_operation(private, audience, operation, "operator", f"id-{next(IDS)}", now)


def claims(**changes) -> str:
    body = {"aud": "pod-uid", "op": "fence", "sub": "operator", "jti": "x", "iat": NOW, "exp": NOW + 60} | changes
    return "Bearer " + jwt.encode({k: v for k, v in body.items() if v is not None}, PRIVATE, algorithm="EdDSA")


def test_a_token_opens_its_operation_once_and_tells_who_signed(gate):
    one = token()
    assert gate.admit(one, "fence") == "operator"
    with pytest.raises(TokenError, match="used before"):
        gate.admit(one, "fence")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: "", "a token is needed"),
        (lambda: "Basic abc", "a token is needed"),
        (lambda: "Bearer abc", "not valid: DecodeError"),
        (lambda: token(private=key_pair()[0]), "InvalidSignatureError"),
        (lambda: token(audience="another pod"), "InvalidAudienceError"),
        (lambda: token(operation="drain"), "not for fence"),
        (lambda: token(now=NOW - 120), "the clock here says"),
        (lambda: token(now=NOW + 30), "the clock here says"),
        (lambda: claims(exp=NOW + 3600), "valid for 3600 s, must be"),
        (lambda: claims(jti=None), "needs the claims sub and jti"),
        (lambda: claims(exp=None), "MissingRequiredClaimError"),
        (lambda: claims(iat="today"), "not valid: ValueError"),
        (lambda: "Bearer " + jwt.encode({"aud": "pod-uid"}, None, algorithm="none"), "not valid"),
        (lambda: "Bearer " + jwt.encode({"aud": "pod-uid"}, "x" * 32, algorithm="HS256"), "not valid"),
    ],
)
def test_any_other_token_opens_nothing(gate, make, why):
    with pytest.raises(TokenError, match=why):
        gate.admit(make(), "fence")


def test_used_tokens_are_forgotten_only_when_they_are_too_old_to_be_used(gate, clock):
    one = token()
    gate.admit(one, "fence")
    clock.now += 64
    with pytest.raises(TokenError, match="used before"):
        gate.admit(one, "fence")
    clock.now += 5
    with pytest.raises(TokenError, match="the clock here says"):
        gate.admit(one, "fence")


@pytest.mark.parametrize("step", [0.0, 0.01], ids=["at", "just past"])
def test_a_used_token_opens_nothing_again_in_the_last_moment_of_its_life(gate, clock, step):
    """The clock goes on while the token is judged."""
    one = token()
    gate.admit(one, "fence")
    times = itertools.count()
    gate._clock = lambda: NOW + MAX_LIFE_S + SKEW_S + step * next(times)
    with pytest.raises(TokenError, match="used before"):
        gate.admit(one, "fence")


def test_a_key_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Ed25519 public key in PEM"):
        TokenVerifier("nonsense", "pod-uid")


def test_a_registration_is_signed_with_any_key_of_the_set_and_for_its_body_alone():
    old, new, other = make_key(), make_key(), make_key()
    signed = sign_registration(old, b"rank 1", NOW)
    check_registration([new, old], signed, b"rank 1", NOW)
    with pytest.raises(TokenError, match="another registration"):
        check_registration([new, old], signed, b"rank 2", NOW)
    with pytest.raises(TokenError, match="InvalidSignatureError"):
        check_registration([new, other], signed, b"rank 1", NOW)
    with pytest.raises(TokenError, match="the clock here says"):
        check_registration([old], signed, b"rank 1", NOW + 90)
    with pytest.raises(TokenError, match="a token is needed"):
        check_registration([old], "", b"rank 1", NOW)
