import hashlib
import itertools

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pdpool_connector.transport.curve import make_key
from pdpool_connector.transport.tokens import (
    MAX_LIFE_S,
    REGISTRATION_LIFE_S,
    SKEW_S,
    RegistrationVerifier,
    TokenError,
    TokenVerifier,
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


def test_token_opens_its_operation_once(gate):
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
        (lambda: claims(jti=None), "needs the claim jti"),
        (lambda: claims(sub=None), "needs the claim sub"),
        (lambda: claims(exp=None), "MissingRequiredClaimError"),
        (lambda: claims(iat="today"), "not valid: ValueError"),
        (lambda: "Bearer " + jwt.encode({"aud": "pod-uid"}, None, algorithm="none"), "not valid"),
        (lambda: "Bearer " + jwt.encode({"aud": "pod-uid"}, "x" * 32, algorithm="HS256"), "not valid"),
    ],
)
def test_other_token_opens_nothing(gate, make, why):
    with pytest.raises(TokenError, match=why):
        gate.admit(make(), "fence")


def test_used_token_is_remembered_while_valid(gate, clock):
    one = token()
    gate.admit(one, "fence")
    clock.now += 64
    with pytest.raises(TokenError, match="used before"):
        gate.admit(one, "fence")
    clock.now += 5
    with pytest.raises(TokenError, match="the clock here says"):
        gate.admit(one, "fence")


@pytest.mark.parametrize("step", [0.0, 0.01], ids=["at", "just past"])
def test_used_token_is_refused_in_its_last_moment(step):
    """The clock goes on while the token is judged."""
    times = itertools.chain([NOW], (NOW + MAX_LIFE_S + SKEW_S + step * count for count in itertools.count()))
    gate = TokenVerifier(PUBLIC, "pod-uid", lambda: next(times))
    one = token()
    gate.admit(one, "fence")
    with pytest.raises(TokenError, match="used before"):
        gate.admit(one, "fence")


def test_wrong_key_is_refused():
    with pytest.raises(ValueError, match="Ed25519 public key in PEM"):
        TokenVerifier("nonsense", "pod-uid")


@pytest.mark.parametrize(
    ("keys", "body", "later_s", "message"),
    [
        ("new old", b"rank 2", 0, "another registration"),
        ("new other", b"rank 1", 0, "InvalidSignatureError"),
        ("old", b"rank 1", REGISTRATION_LIFE_S + SKEW_S + 1, "the clock here says"),
    ],
)
def test_registration_of_another_kind_is_refused(clock, keys, body, later_s, message):
    made = {name: make_key() for name in ("old", "new", "other")}
    signed = sign_registration(made["old"], b"rank 1", "id", NOW)
    clock.now += later_s
    with pytest.raises(TokenError, match=message):
        RegistrationVerifier([made[name] for name in keys.split()], clock).check(signed, body)


def test_registration_without_token_is_refused(clock):
    with pytest.raises(TokenError, match="a token is needed"):
        RegistrationVerifier([make_key()], clock).check("", b"rank 1")


def test_registration_is_accepted_once_by_any_key(clock):
    old, new = make_key(), make_key()
    verifier = RegistrationVerifier([new, old], clock)
    for token_id in ("one", "two"):
        signed = sign_registration(old, b"rank 1", token_id, NOW)
        verifier.check(signed, b"rank 1")
        with pytest.raises(TokenError, match="used before"):
            verifier.check(signed, b"rank 1")


def test_registration_token_of_longer_life_is_refused(clock):
    key = make_key()
    signed = sign_registration(key, b"rank 1", "id", NOW).removeprefix("Bearer ")
    secret = hashlib.blake2b(key.secret, digest_size=32, person=b"pdpool-ranks").digest()
    claims = jwt.decode(signed, secret, algorithms=["HS256"], options={"verify_exp": False, "verify_iat": False})
    longer = "Bearer " + jwt.encode(claims | {"exp": NOW + REGISTRATION_LIFE_S + 1}, secret, algorithm="HS256")
    with pytest.raises(TokenError, match=r"valid for 6 s, must be 0\.\.5"):
        RegistrationVerifier([key], clock).check(longer, b"rank 1")
