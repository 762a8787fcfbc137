"""Keys that are derived from the operator's seeds. None is stored by the operator, and no Secret is ever read.

All pods of a namespace share its keys. They trust each other anyway: a user who may create pods there may mount its
Secrets. With each epoch all keys are new.
"""

import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import jwt
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from zmq.utils import z85

from ..api import names
from ..api.key_epochs import FIRST_EPOCH, KeyEpochs

TOKEN_LIFE_S: Final = 60
"""Longest validity that connectors accept."""


class Keys:
    """All keys of the operator, of engines and of routers, by epoch."""

    def __init__(self, seeds: Mapping[int, bytes], epoch: int = FIRST_EPOCH) -> None:
        """Derive keys up to `epoch`.

        Args:
            seeds: seed by the first epoch that uses it. It must have one for the first epoch.
            epoch: the newest epoch.
        """
        self._seeds = dict(seeds)
        self.epoch = epoch
        self.files = lru_cache(maxsize=256)(self._files)
        """Content of a namespace's Secret `pdpool-keys`: text by file, for every epoch."""

    def router(self, namespace: str, epoch: int) -> str:
        """Return the key of the control endpoints of a namespace's routers."""
        return self._derive(epoch, f"routers/{namespace}").hex()

    def authorization(self, epoch: int, operation: str, pod_uid: str, who: str) -> str:
        """Return the Authorization header for one operation on one pod: a JWT with EdDSA, valid once."""
        now = int(time.time())
        claims = {
            "aud": pod_uid,
            "op": operation,
            "sub": who,
            "jti": uuid.uuid4().hex,
            "iat": now,
            "exp": now + TOKEN_LIFE_S,
        }
        return "Bearer " + jwt.encode(claims, self._signing(epoch), algorithm="EdDSA")

    def public(self, epoch: int) -> str:
        """Return the public key in PEM with which engines verify what the operator has signed."""
        return self._signing(epoch).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def _files(self, namespace: str) -> Mapping[str, str]:
        files: dict[str, str] = {}
        for epoch in range(FIRST_EPOCH, self.epoch + 1):
            files[names.operator_file(epoch)] = self.public(epoch)
            files[names.router_file(epoch)] = self.router(namespace, epoch)
            files[names.curve_file(KeyEpochs(epoch))] = self._curve(namespace, epoch)
            if epoch > FIRST_EPOCH:
                both = KeyEpochs(epoch, epoch - 1)
                files[names.curve_file(both)] = self._curve(namespace, epoch, epoch - 1)
        return files

    def _curve(self, namespace: str, *epochs: int) -> str:
        """Return a key file of the control channel: a JSON list of CURVE pairs, each half 40 characters."""
        secrets = [z85.encode(self._derive(epoch, f"control channel/{namespace}")) for epoch in epochs]
        pairs = [{"public": zmq.curve_public(one).decode("ascii"), "secret": one.decode("ascii")} for one in secrets]
        return json.dumps(pairs)

    def _signing(self, epoch: int) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._derive(epoch, "admin tokens"))

    def _derive(self, epoch: int, purpose: str) -> bytes:
        seed = self._seeds[max(first for first in self._seeds if first <= epoch)]
        return hmac.new(seed, f"pdpool/{epoch}/{purpose}".encode(), hashlib.sha256).digest()
