"""Keys that are derived from the operator's seed. None is stored, and no Secret is ever read.

With the seed, the operator signs requests that change engines. Engines have the public key. All pods of a namespace
share one key of the control channel. They trust each other anyway: a user who may create pods there may mount its
Secrets.
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
"""Longest validity that connectors accept."""


class Signer:
    """Signs requests to connectors: JWT with EdDSA, valid once, for one operation on one pod."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(_derive(seed, "admin tokens"))

    @property
    def public(self) -> str:
        """Return the public key in PEM."""
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")

    def authorization(self, operation: str, pod_uid: str, who: str) -> str:
        """Return the Authorization header for one operation on one pod."""
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
    """Return the key file of a namespace's engines: a JSON list with one CURVE pair, each half 40 characters."""
    secret = z85.encode(_derive(seed, f"control channel/{namespace}"))
    return json.dumps([{"public": zmq.curve_public(secret).decode("ascii"), "secret": secret.decode("ascii")}])


def _derive(seed: bytes, purpose: str) -> bytes:
    return hmac.new(seed, f"pdpool/{purpose}".encode(), hashlib.sha256).digest()
