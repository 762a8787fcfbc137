"""What the plugin does around functions of SGLang. Each has the name of the function that it is put around.

Prefill gives pages and aux rows back in one function each, on all of its paths. So two hooks cover every path: abort in
the waiting queue, in the midst of chunked prefill, after the last chunk, and a failed transfer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from . import surface
from .holds import Hold
from .sender import Sender

Original = Callable[..., Any]


def create_sender(queue: Any, req: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401, ARG001
    """Before: SGLang's senders do not get the request, so it is put aside."""
    surface.put_aside(request=req)


def create_receiver_and_enqueue(queue: Any, req: Any, is_rebootstrap: bool = False) -> None:  # noqa: ANN401, ARG001
    """Before: the same for receivers."""
    surface.put_aside(request=req, recomputed=is_rebootstrap)


def init_kv_manager(queue: Any) -> None:  # noqa: ANN401
    """Before: the manager reads pools and scheduler of the queue that makes it."""
    surface.put_aside(queue=queue)


def prepare_abort(original: Original, req: Any, error_message: str, status_code: Any = None) -> Any:  # noqa: ANN401
    """Around: the client gets the HTTP status of the hand-off's failure, for 500 means nothing to a router."""
    return original(req, error_message, surface.answer_of(req) or status_code)


def _holding_sender(req: Any) -> Sender | None:  # noqa: ANN401
    """Return the sender of a request whose memory must be kept."""
    sender = getattr(req, "disagg_kv_sender", None)
    return sender if isinstance(sender, Sender) and sender.must_hold else None


def release_kv_cache(original: Original, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:  # noqa: ANN401
    """Around: keep the pages of a failed request until no transfer reads them."""
    if (sender := _holding_sender(req)) is None:
        original(req, tree_cache, checkpoint=checkpoint)
        return
    owner = surface.detach_kv(req)
    # The tree has every chunk of it already; it stays locked until then.
    release = partial(original, owner, tree_cache, checkpoint=False)
    surface.manager.holds.add(Hold(sender, release, owner))


def maybe_release_metadata_buffer(original: Original, req: Any, allocator: Any) -> None:  # noqa: ANN401
    """Around: the same for its aux row."""
    if (sender := _holding_sender(req)) is None or req.metadata_buffer_index < 0:
        original(req, allocator)
        return
    surface.manager.holds.add(Hold(sender, partial(allocator.free, req.metadata_buffer_index)))
    req.metadata_buffer_index = -1


def transfer_queue_init(result: None, queue: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401, ARG001
    """After: decode's scheduler waits for proof, however long that takes."""
    queue.enable_deferred_kv_release = True
    queue.deferred_kv_release_timeout = math.inf


def prealloc_queue_init(result: None, queue: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401, ARG001
    """After: ask for a prefill's facts in each turn; the question does not block. The limit in seconds stays."""
    limit_s = queue._max_ensure_retries * queue._ensure_retry_interval
    queue._ensure_retry_interval = 0.01
    queue._max_ensure_retries = round(limit_s / queue._ensure_retry_interval)


def ingest_requests(result: Any, scheduler: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401, ARG001
    """After, in each turn, also while generation is paused: report the turn and the queues, and end holds."""
    manager = surface.manager
    if manager is None:
        return
    manager.connector.beat(paused=surface.is_paused(scheduler))
    if manager.queues.is_due():
        manager.queues.sample(surface.queues(scheduler), surface.under_way(scheduler))
    manager.holds.release(partial(surface.agree, scheduler))


def is_fully_idle(original: Original, scheduler: Any, *rest: Any, **named: Any) -> bool:  # noqa: ANN401
    """Around: with holds, nothing may flush the cache, and SGLang's check for leaks would find one."""
    idle = bool(original(scheduler, *rest, **named))
    for_health = named.get("for_health_check", rest[0] if rest else False)
    return idle and (for_health or surface.manager is None or not surface.manager.holds)


def on_idle(result: None, scheduler: Any) -> None:  # noqa: ANN401, ARG001
    """After: holds may last, and need no turn of the scheduler at full speed."""
    if surface.manager is not None and surface.waits_for_holds_only(scheduler):
        scheduler.maybe_sleep_on_idle()


def requests_owning_rows(result: list[Any], checker: Any) -> list[Any]:  # noqa: ANN401, ARG001
    """After: kept pages have an owner."""
    return result + surface.manager.holds.requests if surface.manager is not None else result
