"""What may be changed at a running connector from outside.

`POST /v1/fence` {"incarnation": "…", "proofs": [{"kind": "container_terminated", …}]} on the admin port: see
`Connector.fence`.

`POST /v1/purge` {"older_than_s": 30, "reason": "…"} on the admin port: see `Connector.purge`. It answers
{"purged": 3}.

Each call to the admin port needs a token of its own.

`POST /drain` on the Unix socket starts the drain, and `GET /drain` does not. Both answer how far the drain is. Only the
pod's own user can connect to this socket.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Final, Protocol

import msgspec

from pdpool_connector.protocol.fence import InsufficientProofError, Proof, describe
from pdpool_connector.protocol.frames import Incarnation
from pdpool_connector.runtime.stats import ConnectorStats
from pdpool_connector.transport.bootstrap import decode_json
from pdpool_connector.transport.http import Asked, Handler, Reply
from pdpool_connector.transport.tokens import TokenError, TokenVerifier

log = logging.getLogger(__name__)

MAX_AGE_S: Final = 7 * 86400
"""Age in seconds. No hand-off lives longer."""
MAX_REASON: Final = 256
"""Characters. The reason goes to the peer in a frame."""


class Fence(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/fence`."""

    incarnation: Incarnation
    proofs: Annotated[tuple[Proof, ...], msgspec.Meta(min_length=1, max_length=8)]


class Purge(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/purge`."""

    older_than_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_AGE_S)]
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REASON)]


class Administered(Protocol):
    """A connector, as the admin endpoint needs it; all from any thread, none blocks."""

    def fence(self, incarnation: str, *proofs: Proof) -> None:
        """See `Connector`."""

    def purge(self, older_than_s: float, reason: str) -> int:
        """See `Connector`."""


class Drained(Protocol):
    """A connector, as the admin socket needs it; all from any thread, none blocks."""

    @property
    def draining(self) -> bool:
        """See `Connector`."""

    def drain(self) -> None:
        """See `Connector`."""

    def stats(self) -> ConnectorStats:
        """See `Connector`."""


class AdminEndpoint:
    """Handlers for `HttpServer.serve`. `gate` None refuses everything."""

    def __init__(self, connector: Administered, gate: TokenVerifier | None) -> None:
        self._connector, self._gate = connector, gate
        self._fences = msgspec.json.Decoder(Fence)
        self._purges = msgspec.json.Decoder(Purge)

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        """By method and path."""
        return {
            ("POST", "/v1/fence"): partial(self._change, "fence", self._fence),
            ("POST", "/v1/purge"): partial(self._change, "purge", self._purge),
        }

    def _change(self, operation: str, work: Callable[[bytes, str], Reply], asked: Asked) -> Reply:
        if self._gate is None:
            return _error(403, "no public key of an operator is configured here: this endpoint is read only")
        try:
            who = self._gate.admit(asked.authorization, operation)
            return work(asked.body, who)
        except TokenError as error:
            log.warning("%s refused to %s: %s", operation, asked.remote, error)
            return _error(401, str(error))
        except msgspec.DecodeError as error:
            return _error(400, f"the body does not fit {operation}: {error}")
        except InsufficientProofError as error:
            return _error(422, str(error))

    def _fence(self, sent: bytes, who: str) -> Reply:
        body = decode_json(self._fences, sent)
        self._connector.fence(body.incarnation, *body.proofs)
        # Where the peer's connections must also close at our end, the connector still waits for that.
        done = f"{body.incarnation} is to be fenced: {describe(body.proofs)}"
        log.warning("fence by %s: %s", who, done)
        return Reply(200, json.dumps({"done": done}).encode())

    def _purge(self, sent: bytes, who: str) -> Reply:
        body = decode_json(self._purges, sent)
        purged = self._connector.purge(body.older_than_s, f"purged by {who}: {body.reason}")
        log.warning("purge by %s: %d hand-offs older than %g s: %s", who, purged, body.older_than_s, body.reason)
        return Reply(200, json.dumps({"purged": purged}).encode())


def drain_handlers(connector: Drained, running: Callable[[], int]) -> Mapping[tuple[str, str], Handler]:
    """Handlers of the admin socket. `running`: how many requests the engine has under way."""

    def state() -> Reply:
        stats, requests = connector.stats(), running()
        document = {
            "draining": connector.draining,
            "drained": connector.draining and stats.drained and not requests,
            "running": requests,
            "queues": {name: queue.reqs for name, queue in stats.queues.items()},
            "holds": stats.holds,
        }
        return Reply(200, json.dumps(document).encode())

    def start(_: Asked) -> Reply:
        if not connector.draining:
            log.info("drain by the admin socket: no new hand-offs are taken")
            connector.drain()
        return state()

    return {("POST", "/drain"): start, ("GET", "/drain"): lambda _: state()}


def _error(status: int, message: str) -> Reply:
    return Reply(status, json.dumps({"error": message}).encode())
