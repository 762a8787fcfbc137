"""Parses the answer of a connector's `/v1/state`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from ..engines.answers import MAX_COUNT, MAX_HOLDS, MAX_RANKS, Answer, Count, Name, Seconds, Version
from .http import Unanswered, invalid
from .samples import HANDOFF_QUEUES, ConnectorSample, HoldSample, PeerSample, QueueSample, Tally

UNSETTLED = frozenset({"aborting", "quiescing", "held"})
"""States of hand-offs that have failed while their memory may still be accessed."""
MAX_PEERS = 4096
"""Limit of peers per rank."""

MAX_SILENT = 1024
"""Silent prefills that are read per rank: as many as a connector remembers."""


class _Queue(Answer):
    reqs: Count
    oldest_s: Seconds | None = None
    moved_total: Count | None = None


class _Hold(Answer):
    incarnation: Name
    pod_uid: Name = ""
    container: Annotated[str, Field(max_length=256)] = ""


class _Peer(Answer):
    incarnation: Name
    backend: Name = ""
    transport: Name = ""


class _Link(Answer):
    address: Annotated[str, Field(max_length=300)]


def _silent(links: Any) -> Any:  # noqa: ANN401 - any JSON, validated next
    if not isinstance(links, list):
        return links
    return [link for link in links if isinstance(link, dict) and link.get("state") == "silent"][:MAX_SILENT]


def _first_holds(holds: Any) -> Any:  # noqa: ANN401 - any JSON, validated next
    return holds[:MAX_HOLDS] if isinstance(holds, list) else holds


class _State(Answer):
    incarnation: Name
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    pod_uid: Name = ""
    container: Annotated[str, Field(max_length=256)] = ""
    engine_beat_age_s: Seconds | None = None
    engine_paused: bool = False
    loop_lag_s: Seconds = 0.0
    queues: Annotated[dict[Name, _Queue], Field(max_length=16)]
    holds: Count = 0
    held_bytes: Count = 0
    held_oldest_s: Seconds | None = None
    held_for: Annotated[list[_Hold], BeforeValidator(_first_holds)] = Field(default_factory=list)
    engine: Version = ""
    connector_version: Version = ""
    peers: list[_Peer] = Field(default_factory=list, max_length=MAX_PEERS)
    links: Annotated[list[_Link], BeforeValidator(_silent)] = Field(default_factory=list)
    engine_queues: Annotated[dict[Name, _Queue], Field(max_length=16)] = Field(default_factory=dict)
    attempts: Annotated[dict[Name, _Queue], Field(max_length=16)] = Field(default_factory=dict)
    outcomes: dict[Name, Count] | None = Field(default=None, max_length=16)
    causes: dict[Name, Count] = Field(default_factory=dict, max_length=64)


NOT_OURS = frozenset({"aborted", "peer_aborted", "purged", "too_long", "invalid"})
"""Causes that are the client's fault or intention, or a person's. None says anything against an engine."""
OTHER_SIDES = frozenset({"timed_out", "peer_lost"})
"""Causes of a half whose other half did not come or was lost. They say nothing against this instance."""
_EXCUSED = NOT_OURS | OTHER_SIDES


def parse_state(body: bytes) -> ConnectorSample:
    """Parse the answer of a connector's `/v1/state`; raises Unanswered if it is invalid."""
    try:
        state = _State.model_validate_json(body)
    except ValidationError as error:
        raise Unanswered(invalid(error)) from error
    return ConnectorSample(
        incarnation=state.incarnation,
        beat_age_s=state.engine_beat_age_s,
        paused=state.engine_paused,
        loop_lag_s=state.loop_lag_s,
        queues=_queues(state.queues),
        engine_queues=_queues(state.engine_queues),
        unsettled=sum(state.attempts[name].reqs for name in UNSETTLED & state.attempts.keys()),
        ranks=state.ranks,
        holds=state.holds,
        held_bytes=state.held_bytes,
        held_oldest_s=state.held_oldest_s,
        held_for=tuple(HoldSample(h.incarnation, h.pod_uid, h.container) for h in state.held_for),
        pod_uid=state.pod_uid,
        container=state.container,
        engine=state.engine,
        version=state.connector_version,
        peers=tuple(PeerSample(peer.incarnation, peer.backend, peer.transport) for peer in state.peers),
        silent=tuple(link.address for link in state.links),
        ended=_ended(state),
    )


def _queues(queues: dict[str, _Queue]) -> dict[str, QueueSample]:
    return {
        name: QueueSample(queue.reqs, queue.oldest_s, queue.moved_total)
        for name, queue in queues.items()
        if name in HANDOFF_QUEUES
    }


def _ended(state: _State) -> Tally | None:
    if state.outcomes is None:
        return None
    failed = sum(number for cause, number in state.causes.items() if cause not in _EXCUSED)
    return Tally(state.outcomes.get("done", 0), min(failed, MAX_COUNT))
