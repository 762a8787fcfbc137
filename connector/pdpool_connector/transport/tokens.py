"""Signed tokens (JWT): for changes through the admin endpoint, and for registrations of ranks.

The operator signs with an Ed25519 key. Pods hold only the public half, so no pod can make a token for another. Ranks of
one instance sign with the secret key of their control channel.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jwt

from pdpool_connector.transport.curve import CurveKey

MAX_LIFE_S: Final = 60
"""A token that is valid for longer than this is refused, even with a valid signature."""
SKEW_S: Final = 5
"""How far the clocks of operator and pod may differ."""
REGISTRATION_LIFE_S: Final = 5
"""A token for a registration is valid for one lease. A restarted registry does not remember which tokens were used. A
replay there must not extend a lease for longer."""
MAX_USED: Final = 4096
"""Tokens of operators remembered as used; more within their life are refused."""
MAX_USED_REGISTRATIONS: Final = 1 << 15
"""The same for registrations: 512 ranks renew every 1.7 s, and each token is remembered for 10 s."""
MAX_TOKEN_ID: Final = 128
_BEARER: Final = "Bearer "


class TokenError(Exception):
    """A token that is refused; the message says why, and never holds the token."""


class TokenVerifier:
    """Verifies tokens of the admin endpoint: each allows one operation on one pod, once, for a minute at most.

    public_key: Ed25519, PEM. audience: what tokens for this pod name, its UID. clock: seconds since the epoch.
    Thread-safe. Raises ValueError for a key that is none.
    """

    def __init__(self, public_key: str, audience: str, clock: Callable[[], float] = time.time) -> None:
        try:
            self._key = jwt.get_algorithm_by_name("EdDSA").prepare_key(public_key)
        except (jwt.InvalidKeyError, ValueError, TypeError):
            raise ValueError("public_key must be an Ed25519 public key in PEM") from None
        self._made_of = (public_key, audience)
        self._audience = audience
        self._clock = clock
        self._used = _UsedTokens(MAX_USED)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["TokenVerifier"], tuple[str, str]]:
        """Ranks are processes of their own: each gets a verifier like this one, with no token used yet."""
        return TokenVerifier, self._made_of

    def admit(self, authorization: str, operation: str) -> str:
        """Return the signer of a token for `operation` (the claim "sub"). Raises TokenError."""
        with self._lock:
            now = self._clock()  # one for both: a used token is forgotten only when it is too old to be used
            claims = _decode(authorization, self._key, "EdDSA", now, audience=self._audience)
            if claims.get("op") != operation:
                raise TokenError(f"the token is not for {operation}: its claim op says what it is for")
            name = claims.get("sub")
            if not isinstance(name, str):
                raise TokenError("the token needs the claim sub, text")
            self._used.add(claims.get("jti"), float(claims["exp"]), now)
            return name


def sign_operation(private_key: str, audience: str, operation: str, who: str, token_id: str, now: float) -> str:
    """The header Authorization for one operation on one pod; `private_key` is Ed25519 in PEM."""
    claims = {
        "aud": audience,
        "op": operation,
        "sub": who,
        "jti": token_id,
        "iat": int(now),
        "exp": int(now) + MAX_LIFE_S,
    }
    return _BEARER + jwt.encode(claims, private_key, algorithm="EdDSA")


def sign_registration(key: CurveKey, body: bytes, token_id: str, now: float) -> str:
    """The header Authorization for one registration of a rank with this body; `token_id` is another each time."""
    claims = {"body": _digest(body), "jti": token_id, "iat": int(now), "exp": int(now) + REGISTRATION_LIFE_S}
    return _BEARER + jwt.encode(claims, _rank_secret(key), algorithm="HS256")


class RegistrationVerifier:
    """Verifies that a rank with one of `keys` signed a registration. Each token is accepted once. For one thread.

    `clock`: seconds since the epoch.
    """

    def __init__(self, keys: Sequence[CurveKey], clock: Callable[[], float] = time.time) -> None:
        self._keys, self._clock = keys, clock
        self._used = _UsedTokens(MAX_USED_REGISTRATIONS)

    def check(self, authorization: str, body: bytes) -> None:
        """Raise TokenError unless one of the keys signed for this body, and the token was not used before."""
        now = self._clock()
        claims = self._decode(authorization, now)
        if claims.get("body") != _digest(body):
            raise TokenError("the token is for another registration")
        self._used.add(claims.get("jti"), float(claims["exp"]), now)

    def _decode(self, authorization: str, now: float) -> dict[str, Any]:
        reasons = []
        for key in self._keys:
            try:
                return _decode(authorization, _rank_secret(key), "HS256", now, life_s=REGISTRATION_LIFE_S)
            except TokenError as error:
                reasons.append(str(error))
        raise TokenError(reasons[0])


class _UsedTokens:
    """Tokens that were used within their life; at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: dict[str, float] = {}

    def add(self, token: object, expires: float, now: float) -> None:
        """Raise TokenError for a token without a name, one that was used before, and one too many."""
        if not isinstance(token, str) or not 1 <= len(token) <= MAX_TOKEN_ID:
            raise TokenError(f"the token needs the claim jti, 1 to {MAX_TOKEN_ID} characters")
        self._until = {one: until for one, until in self._until.items() if until + SKEW_S >= now}
        if token in self._until:
            raise TokenError("the token was used before")
        if len(self._until) >= self._most:
            raise TokenError(f"{self._most} tokens were used within their life; try again in a minute")
        self._until[token] = expires


def _decode(
    authorization: str,
    key: Any,  # noqa: ANN401 - PyJWT's own type
    algorithm: str,
    now: float,
    audience: str | None = None,
    life_s: int = MAX_LIFE_S,
) -> dict[str, Any]:
    if not authorization.startswith(_BEARER):
        raise TokenError("a token is needed: Authorization: Bearer …")
    required = ["exp", "iat"] if audience is None else ["exp", "iat", "aud"]
    # Times are judged here, by a clock that tests can turn.
    options: Any = {"require": required, "verify_exp": False, "verify_iat": False}
    try:
        claims = jwt.decode(
            authorization.removeprefix(_BEARER), key, algorithms=[algorithm], audience=audience, options=options
        )
        issued, expires = float(claims["iat"]), float(claims["exp"])
    except (jwt.InvalidTokenError, ValueError, TypeError) as error:
        raise TokenError(f"the token is not valid: {type(error).__name__}") from None
    if not issued <= expires <= issued + life_s:
        raise TokenError(f"the token is valid for {expires - issued:.0f} s, must be 0..{life_s}")
    if not issued - SKEW_S <= now <= expires + SKEW_S:
        raise TokenError(f"the token is valid from {issued:.0f} to {expires:.0f}, the clock here says {now:.0f}")
    return claims


def _rank_secret(key: CurveKey) -> bytes:
    return hashlib.blake2b(key.secret, digest_size=32, person=b"pdpool-ranks").digest()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
