"""Keys that are derived from the operator's seed, so that none is stored and no Secret is ever read.

Who holds the seed can sign what changes engines; engines hold the public half. The key of the control channel is one
for each namespace, whose pods trust each other anyway: whoever may make pods there may mount its Secrets.
"""

import hashlib
import hmac
import json
import time
import uuid
from typing import Final

import jwt
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from zmq.utils import z85

TOKEN_LIFE_S: Final = 60
"""The longest that connectors accept."""


class Signer:
    """Signs what the operator asks of connectors: JWT with EdDSA, each for one operation on one pod, once."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(_derive(seed, "admin tokens"))

    @property
    def public(self) -> str:
        """The public half, PEM."""
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")

    def authorization(self, operation: str, pod_uid: str, who: str) -> str:
        """The header Authorization for one operation on one pod."""
        now = int(time.time())
        claims = {
            "aud": pod_uid,
            "op": operation,
            "sub": who,
            "jti": uuid.uuid4().hex,
            "iat": now,
            "exp": now + TOKEN_LIFE_S,
        }
        return "Bearer " + jwt.encode(claims, self._key, algorithm="EdDSA")


def control_keys(seed: bytes, namespace: str) -> str:
    """The file of keys that engines of a namespace read: a JSON list with one CURVE pair, each half 40 characters."""
    secret = z85.encode(_derive(seed, f"control channel/{namespace}"))
    return json.dumps([{"public": zmq.curve_public(secret).decode("ascii"), "secret": secret.decode("ascii")}])


def _derive(seed: bytes, purpose: str) -> bytes:
    return hmac.new(seed, f"pdpool/{purpose}".encode(), hashlib.sha256).digest()
