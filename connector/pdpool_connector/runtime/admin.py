"""What may be changed at a running connector over HTTP: drain, abort, purge, fence. Each needs a token of its own.

`POST /v1/drain` {}: take no new hand-offs.
`POST /v1/abort` {"room": 7}: give up the hand-offs of a room.
`POST /v1/purge` {"older_than_s": 600}: give up all hand-offs that old, whatever they wait for.
`POST /v1/fence` {"incarnation": "…", "proofs": [{"kind": "container_terminated", …}]}: see `Connector.fence`.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Protocol, TypeVar

import msgspec

from pdpool_connector.protocol.fence import InsufficientProofError, Proof, describe
from pdpool_connector.protocol.frames import Incarnation, Room
from pdpool_connector.transport.bootstrap import decode_json
from pdpool_connector.transport.http import Asked, Handler, Reply
from pdpool_connector.transport.tokens import TokenError, TokenVerifier

log = logging.getLogger(__name__)


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Abort(msgspec.Struct, forbid_unknown_fields=True):
    room: Room


class _Purge(msgspec.Struct, forbid_unknown_fields=True):
    older_than_s: Annotated[float, msgspec.Meta(ge=0, le=86400)]


class _Fence(msgspec.Struct, forbid_unknown_fields=True):
    incarnation: Incarnation
    proofs: Annotated[tuple[Proof, ...], msgspec.Meta(min_length=1, max_length=8)]


Body = TypeVar("Body", bound=msgspec.Struct)


class Administered(Protocol):
    """A connector, as this endpoint needs it; all from any thread, none blocks."""

    def drain(self) -> None:
        """See `Connector`."""

    def fence(self, incarnation: str, *proofs: Proof) -> None:
        """See `Connector`."""

    def abort_room(self, room: int, message: str) -> int:
        """See `Connector`."""

    def purge(self, older_than_s: float, message: str) -> int:
        """See `Connector`."""


class AdminEndpoint:
    """Handlers for `HttpServer.serve`. `gate` None refuses everything."""

    def __init__(self, connector: Administered, gate: TokenVerifier | None) -> None:
        self._connector, self._gate = connector, gate

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        """By method and path."""
        return {
            ("POST", "/v1/drain"): self._for("drain", _Drain, self._drain),
            ("POST", "/v1/abort"): self._for("abort", _Abort, self._abort),
            ("POST", "/v1/purge"): self._for("purge", _Purge, self._purge),
            ("POST", "/v1/fence"): self._for("fence", _Fence, self._fence),
        }

    def _for(self, operation: str, kind: type[Body], act: Callable[[Body, str], str]) -> Handler:
        decoder = msgspec.json.Decoder(kind)

        def handle(asked: Asked) -> Reply:
            if self._gate is None:
                return _error(403, "no public key of an operator is configured here: this endpoint is read only")
            try:
                who = self._gate.admit(asked.authorization, operation)
                body = decode_json(decoder, asked.body)
                done = act(body, who)
            except TokenError as error:
                log.warning("%s refused to %s: %s", operation, asked.remote, error)
                return _error(401, str(error))
            except msgspec.DecodeError as error:
                return _error(400, f"the body does not fit {operation}: {error}")
            except InsufficientProofError as error:
                return _error(422, str(error))
            log.warning("%s by %s: %s", operation, who, done)
            return Reply(200, json.dumps({"done": done}).encode())

        return handle

    def _drain(self, _: _Drain, who: str) -> str:
        del who
        self._connector.drain()
        return "no new hand-offs are taken"

    def _abort(self, body: _Abort, who: str) -> str:
        count = self._connector.abort_room(body.room, f"given up by {who}")
        return f"{count} hand-offs of room {body.room} are given up"

    def _purge(self, body: _Purge, who: str) -> str:
        count = self._connector.purge(body.older_than_s, f"purged by {who}")
        return f"{count} hand-offs older than {body.older_than_s:.0f} s are given up"

    def _fence(self, body: _Fence, who: str) -> str:
        del who
        self._connector.fence(body.incarnation, *body.proofs)
        # Where its connections must be seen to end at our end too, that is still waited for.
        return f"{body.incarnation} is to be fenced: {describe(body.proofs)}"


def _error(status: int, message: str) -> Reply:
    return Reply(status, json.dumps({"error": message}).encode())
