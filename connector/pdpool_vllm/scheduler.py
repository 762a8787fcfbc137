"""What vLLM's scheduler knows of hand-offs: it decides what the workers do in each step. Pure: no I/O, no vLLM.

vLLM runs prefill first. Prefill's answer has the parameters of the hand-off, and the proxy puts them into the request
to decode:

    do_remote_prefill=True    take the cache from a prefill
    remote_bootstrap          address of that prefill's registry, "host:port"
    remote_room               number of the hand-off

A request's blocks stay allocated until all workers have reported its id. Prefill's are kept because `finished` says so,
and decode's because the request waits for its cache. So each id is reported exactly once, and only for these.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pdpool_connector import prompt_digest

log = logging.getLogger(__name__)

ROOMS: Final = range(1, 1 << 63)
MAX_BOOTSTRAP: Final = 256
"""Characters of an address that is looked at."""


@dataclass(frozen=True)
class Open:
    """Decode has a request whose cache a prefill holds."""

    bootstrap: str
    room: int
    prompt: bytes


@dataclass(frozen=True)
class Offer:
    """Decode has memory for a request: `pages` take logical pages `prefix_pages` onward."""

    pages: Sequence[int]
    prefix_pages: int


@dataclass(frozen=True)
class Send:
    """Prefill has computed a request: `pages` are its logical pages from 0 on."""

    room: int
    prompt: bytes
    pages: Sequence[int]


@dataclass
class Step:
    """What the workers do in one step, by id of the request."""

    opens: dict[str, Open] = field(default_factory=dict)
    offers: dict[str, Offer] = field(default_factory=dict)
    sends: dict[str, Send] = field(default_factory=dict)
    aborts: dict[str, str] = field(default_factory=dict)
    """Why each was given up."""
    running: int = 0
    """Requests that the engine has under way."""


class SchedulerSide:
    """The hand-offs that vLLM's scheduler has begun.

    Args:
        block_tokens: Tokens of one block.
        bootstrap: Address of this engine's registry, "host:port"; "" at decode.
        new_room: Returns an unused number for a hand-off.
    """

    def __init__(self, block_tokens: int, bootstrap: str, new_room: Callable[[], int]) -> None:
        self._block_tokens, self._bootstrap, self._new_room = block_tokens, bootstrap, new_room
        self._step = Step()
        self._loading: set[str] = set()
        """Requests that wait for their cache."""

    def arrived(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request
        """A request has come. Decode opens its hand-off now, so that prefill knows that its pages are wanted."""
        if (wanted := remote_prefill(request)) is not None:
            bootstrap, room = wanted
            self._step.opens[request.request_id] = Open(bootstrap, room, _digest(request))

    def remote_tokens(self, request: Any, computed: int) -> int:  # noqa: ANN401
        """Return how many tokens of the prompt come from prefill, beyond the `computed` ones that are here already."""
        return max(request.num_prompt_tokens - computed, 0) if remote_prefill(request) is not None else 0

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:  # noqa: ANN401
        """A request has blocks, of which the last `external` tokens of the prompt come from prefill.

        vLLM calls this again when the request is scheduled after the load; that changes nothing.
        """
        if remote_prefill(request) is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        if external:
            prefix = (request.num_prompt_tokens - external) // self._block_tokens
            self._step.offers[request.request_id] = Offer(self._of_prompt(request, blocks)[prefix:], prefix)
            self._loading.add(request.request_id)
        else:
            self._step.aborts[request.request_id] = "decode has the whole prompt in its cache"

    def received(self, ids: Sequence[str]) -> None:
        """All workers have reported that they no longer wait for these."""
        self._loading.difference_update(ids)

    def finished(self, request: Any, blocks: Sequence[int], *, complete: bool) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """A request is over.

        Args:
            request: vLLM's.
            blocks: Its blocks.
            complete: It ended by itself: neither its client nor an error has ended it.

        Returns:
            Whether its blocks are kept until the workers report it as sent, and the parameters for decode.
        """
        request_id, params = request.request_id, request.kv_transfer_params or {}
        if request_id in self._loading or remote_prefill(request) is not None:
            # vLLM keeps the blocks of a request that is loading by itself.
            self._step.opens.pop(request_id, None)
            self._step.aborts[request_id] = "decode's engine has given the request up"
            return False, None
        if not (params.get("do_remote_decode") and complete and blocks):
            return False, None
        room = self._new_room()
        pages = self._of_prompt(request, blocks)
        self._step.sends[request_id] = Send(room, _digest(request), pages)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap": self._bootstrap,
            "remote_room": room,
        }

    def take_step(self, running: int) -> Step:
        """Return what the workers do in this step."""
        step, self._step = self._step, Step()
        step.running = running
        return step

    def _of_prompt(self, request: Any, blocks: Sequence[int]) -> Sequence[int]:  # noqa: ANN401
        """The blocks that hold the prompt. Both sides count alike, whatever else they have allocated."""
        return blocks[: -(-request.num_prompt_tokens // self._block_tokens)]


def remote_prefill(request: Any) -> tuple[str, int] | None:  # noqa: ANN401
    """Return registry and room of the prefill that has a request's cache. None if it is to be computed here.

    The parameters come from the client. A request whose parameters are not valid is computed here.
    """
    params = request.kv_transfer_params or {}
    if not params.get("do_remote_prefill"):
        return None
    bootstrap, room = params.get("remote_bootstrap"), params.get("remote_room")
    if isinstance(bootstrap, str) and 0 < len(bootstrap) <= MAX_BOOTSTRAP and type(room) is int and room in ROOMS:
        return bootstrap, room
    log.warning(
        "request %s is computed here: remote_bootstrap must be host:port, remote_room 1 to 2**63 - 1; they come from "
        "the answer of a prefill with PdpoolConnector",
        request.request_id,
    )
    params["do_remote_prefill"] = False
    return None


def _digest(request: Any) -> bytes:  # noqa: ANN401
    """Digest of the prompt, the same on both sides; empty for a prompt of embeddings."""
    return prompt_digest(request.prompt_token_ids) if request.prompt_token_ids else b""
