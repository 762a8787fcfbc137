"""What vLLM's scheduler knows of hand-offs: it decides what the workers do in each step. Pure: no I/O, no vLLM.

With vLLM's proxies prefill runs first. Its answer has the parameters of the hand-off, and the proxy puts them into the
request to decode:

    do_remote_prefill=True    take the cache from a prefill
    remote_bootstrap          address of that prefill's registry, "host:port"
    remote_room               number of the hand-off

sglang-router asks both sides at once (`middleware`). It has chosen the number, so prefill gets it in the request:

    do_remote_decode=True     keep the cache for a decode
    remote_room               number of the hand-off; prefill chooses one if it is not given

Prefill then computes a request only once decode has memory for it. Otherwise two full caches could wait for each other.
Prefill's would be full of requests for which decode has no memory, and decode's of those that prefill has none for.

A request's blocks stay allocated until all workers have reported its id. Prefill's are kept because `finished` says so,
and decode's because the request waits for its cache. So each id is reported exactly once, and only for these.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from pdpool_connector import prompt_digest

log = logging.getLogger(__name__)

ROOMS: Final = range(1, 1 << 63)
MAX_BOOTSTRAP: Final = 256
"""Characters of an address that is looked at."""
GIVEN_UP: Final = "the engine has given the request up"


@dataclass(frozen=True)
class Open:
    """A request has come that is handed over. `bootstrap`: address of prefill's registry; "" at prefill itself."""

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
    """Why each was given up. One of `opens` is opened all the same: only so the other side learns of it."""
    requests: int = 0
    """Requests that the engine has, running or waiting."""


class Scheduler:
    """What both sides know: the hand-offs that are open, and what is due in the next step.

    Parameters that are for the other side are ignored: they come from the client, and no worker here would end them.

    Args:
        block_tokens: Tokens of one block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._step = Step()
        self._requests = 0
        """Requests that have come and are not over."""
        self._opened: dict[str, tuple[str, int]] = {}
        """Registry and room of each request that is opened, and neither loaded nor sent."""

    def take_step(self) -> Step:
        """Return what the workers do in this step."""
        step, self._step = self._step, Step()
        step.requests = self._requests
        return step

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:  # noqa: ANN401 - vLLM's Request
        """A request has blocks. Only decode needs to know."""

    def answered(self, workers: Mapping[str, int]) -> None:
        """Workers know of decode's memory. Only prefill needs to know."""

    def received(self, ids: Iterable[str]) -> None:
        """All workers have reported that they no longer wait for these. Only decode needs to know."""

    def _open(self, request: Any, wanted: tuple[str, int] | None) -> None:  # noqa: ANN401
        """Open the hand-off of a request at once, so that the other side knows that it is wanted.

        One hand-off serves one request. The others of several that name it (`n` above 1) are computed here.
        """
        self._requests += 1
        if wanted is None:
            return
        if wanted in self._opened.values():
            request.kv_transfer_params = None
            return
        self._opened[request.request_id] = wanted
        self._step.opens[request.request_id] = Open(*wanted, _digest(request))

    def _of_prompt(self, request: Any, blocks: Sequence[int]) -> Sequence[int]:  # noqa: ANN401
        """The blocks that hold the prompt. The number is the same on both sides, whatever else they have allocated."""
        return blocks[: -(-request.num_prompt_tokens // self._block_tokens)]


class PrefillScheduler(Scheduler):
    """Prefill's side.

    Args:
        block_tokens: Tokens of one block.
        bootstrap: Address of this engine's registry, "host:port".
        new_room: Returns an unused number for a hand-off.
        workers: Of the engine.
    """

    def __init__(self, block_tokens: int, bootstrap: str, new_room: Callable[[], int], workers: int = 1) -> None:
        super().__init__(block_tokens)
        self._bootstrap, self._new_room, self._workers = bootstrap, new_room, workers
        self._answered: Counter[str] = Counter()
        """Workers that know of decode's memory, or that there will be none, by request that is opened."""

    def arrived(self, request: Any) -> None:  # noqa: ANN401
        """A request has come."""
        self._open(request, remote_decode(request))

    def remote_tokens(self, request: Any, computed: int) -> int | None:  # noqa: ANN401, ARG002
        """Return 0: nothing comes from elsewhere. None: the request must wait."""
        waits = request.request_id in self._opened and self._answered[request.request_id] < self._workers
        return None if waits else 0

    def answered(self, workers: Mapping[str, int]) -> None:
        """So many further workers know of decode's memory for these requests, or that there will be none."""
        for request_id, count in workers.items():
            if request_id in self._opened:
                self._answered[request_id] += count

    def finished(self, request: Any, blocks: Sequence[int], *, complete: bool) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """A request is over.

        Args:
            request: vLLM's.
            blocks: Its blocks.
            complete: It ended by itself: neither its client nor an error has ended it.

        Returns:
            Whether its blocks are kept until the workers report it as sent, and the parameters for decode.
        """
        self._requests -= 1
        request_id, params = request.request_id, request.kv_transfer_params or {}
        self._answered.pop(request_id, None)
        if not (params.get("do_remote_decode") and complete and blocks):
            if self._opened.pop(request_id, None) is not None:
                self._step.aborts[request_id] = GIVEN_UP
            return False, None
        room = self._opened.pop(request_id, ("", 0))[1] or self._new_room()
        self._step.sends[request_id] = Send(room, _digest(request), self._of_prompt(request, blocks))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap": self._bootstrap,
            "remote_room": room,
        }


class DecodeScheduler(Scheduler):
    """Decode's side.

    Args:
        block_tokens: Tokens of one block.
    """

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._loading: set[str] = set()
        """Requests that wait for their cache."""

    def arrived(self, request: Any) -> None:  # noqa: ANN401
        """A request has come."""
        self._open(request, remote_prefill(request))

    def remote_tokens(self, request: Any, computed: int) -> int | None:  # noqa: ANN401
        """Return how many tokens of the prompt come from prefill, beyond the `computed` ones that are here already."""
        return 0 if remote_prefill(request) is None else max(int(request.num_prompt_tokens) - computed, 0)

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
            self._opened.pop(request.request_id, None)
            self._step.aborts[request.request_id] = "decode has the whole prompt in its cache"

    def received(self, ids: Iterable[str]) -> None:
        """All workers have reported that they no longer wait for these."""
        for request_id in ids:
            self._loading.discard(request_id)
            self._opened.pop(request_id, None)

    def finished(self, request: Any, blocks: Sequence[int], *, complete: bool) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401, ARG002
        """A request is over. Its blocks are not kept: vLLM itself keeps those of a request that is loading."""
        self._requests -= 1
        if request.request_id in self._opened:
            self._step.aborts[request.request_id] = GIVEN_UP
            if request.request_id not in self._loading:
                del self._opened[request.request_id]
        return False, None


def remote_prefill(request: Any) -> tuple[str, int] | None:  # noqa: ANN401
    """Return registry and room of the prefill that has a request's cache. None if it is to be computed here.

    The parameters come from the client. A request whose parameters are not valid is computed here.
    """
    params = request.kv_transfer_params or {}
    if not params.get("do_remote_prefill"):
        return None
    bootstrap, room = params.get("remote_bootstrap"), params.get("remote_room")
    if isinstance(bootstrap, str) and 0 < len(bootstrap) <= MAX_BOOTSTRAP and _is_room(room):
        return bootstrap, room
    log.warning(
        "request %s is computed here: remote_bootstrap must be host:port, remote_room 1 to 2**63 - 1; they come from "
        "the answer of a prefill with PdpoolConnector",
        request.request_id,
    )
    params["do_remote_prefill"] = False
    return None


def remote_decode(request: Any) -> tuple[str, int] | None:  # noqa: ANN401
    """Return ("", room) of a request that prefill computes for a decode that is asked at the same time."""
    params = request.kv_transfer_params or {}
    room = params.get("remote_room")
    return ("", room) if params.get("do_remote_decode") and _is_room(room) else None


def _is_room(value: object) -> TypeGuard[int]:
    return type(value) is int and value in ROOMS


def _digest(request: Any) -> bytes:  # noqa: ANN401
    """Digest of the prompt, the same on both sides; empty for a prompt of embeddings."""
    return prompt_digest(request.prompt_token_ids) if request.prompt_token_ids else b""
