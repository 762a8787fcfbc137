"""What SGLang 0.5.23's schedulers were seen to call on sender and receiver of the KV transfer, in that order.

Recorded from real schedulers (a tiny model, pages of 16 tokens). `P` is prefill's scheduler, `D` decode's, `*` what
happens in between: a message that has reached prefill. A row names the call, its arguments and what it returned (for a
metric: pages moved). `poll` stands where its result changed, with the number of calls until it changed again. A
receiver's poll that spans its metadata stands after it. Calls made by other calls are left out.
"""

from typing import Any, NamedTuple

from tests.integration.sglang_order import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING_FOR_INPUT

ABORTED = "aborted"
"""What a call returned that raised the abort."""


class Call(NamedTuple):
    """One row. `passing`: a poll whose result depended on how fast the other side was."""

    side: str
    name: str
    arguments: dict[str, Any] = {}  # noqa: RUF012 - rows are read only
    returned: Any = None
    times: int = 1
    passing: bool = False


def _sent(pages: range, tokens: int, *, last: bool) -> list[Call]:
    """A chunk, as each was asked for and sent."""
    return [
        Call("P", "get_max_transfer_tokens"),
        Call("P", "should_send_kv_chunk", {"num_pages": len(pages), "last_chunk": last}, True),
        Call("P", "send", {"kv_indices": pages, "state_indices": [] if last else None, "num_kv_tokens": tokens}),
    ]


def _met(pages: int, aux_index: int) -> list[Call]:
    return [
        Call("P", "pop_decode_prefix_len", {}, 0),
        Call("P", "init", {"num_kv_indices": pages, "aux_index": aux_index}),
    ]


def _offered(pages: range, aux_index: int) -> list[Call]:
    offer = {"kv_indices": pages, "aux_index": aux_index, "state_indices": [], "decode_prefix_len": 0}
    return [Call("D", "init", {"prefill_dp_rank": 0}), _poll("D", WAITING_FOR_INPUT), Call("D", "send_metadata", offer)]


def _poll(side: str, said: int, times: int = 1, *, passing: bool = False) -> Call:
    return Call(side, "poll", {}, said, times, passing)


def _succeeded(pages: int, polls: int) -> list[Call]:
    return [
        _poll("P", TRANSFERRING, polls, passing=True),
        _poll("P", SUCCESS),
        Call("P", "clear"),
        Call("P", "get_transfer_metric", {}, pages),
        _poll("D", SUCCESS),
        Call("D", "clear"),
    ]


SHORT = [
    Call("P", "Sender", {"room": 2900557287717065343}),
    _poll("P", BOOTSTRAPPING, 1602),
    Call("D", "Receiver", {"room": 2900557287717065343}),
    *_offered(range(2, 3), aux_index=1),
    _poll("D", WAITING_FOR_INPUT, 111),
    _poll("P", WAITING_FOR_INPUT, 3),
    *_met(1, aux_index=1),
    *_sent(range(2, 3), 5, last=True),
    *_succeeded(1, polls=64),
]
"""One page; the request reaches prefill first."""

LONG = [
    Call("D", "Receiver", {"room": 1381505233352092124}),
    *_offered(range(4, 42), aux_index=2),
    _poll("D", WAITING_FOR_INPUT, 3276),
    Call("*", "metadata"),
    Call("P", "Sender", {"room": 1381505233352092124}),
    _poll("P", WAITING_FOR_INPUT, 2),
    *_met(38, aux_index=2),
    *_sent(range(4, 12), 128, last=False),
    *_sent(range(12, 20), 128, last=False),
    *_sent(range(20, 28), 128, last=False),
    *_sent(range(28, 36), 128, last=False),
    *_sent(range(36, 42), 88, last=True),
    *_succeeded(38, polls=8),
]
"""600 tokens in chunks of 128; decode's metadata is there before the sender is made."""

LONG_HIT = [
    Call("D", "Receiver", {"room": 1381505233352092124}),
    *_offered(range(42, 80), aux_index=3),
    _poll("D", WAITING_FOR_INPUT, 17),
    Call("P", "Sender", {"room": 1381505233352092124}),
    _poll("P", BOOTSTRAPPING, 42, passing=True),
    _poll("P", WAITING_FOR_INPUT, 2),
    *_met(38, aux_index=3),
    *_sent(range(4, 41), 592, last=False),
    *_sent(range(42, 43), 8, last=True),
    *_succeeded(38, polls=1),
]
"""The same prompt again, in the same room: prefill's radix cache has 37 pages, which go out before the forward pass."""

ABORT_IN_DECODE = [
    Call("D", "Receiver", {"room": 1069816822965067998}),
    *_offered(range(80, 83), aux_index=4),
    _poll("D", WAITING_FOR_INPUT, 18315),
    Call("*", "metadata"),
    Call("D", "abort"),
    _poll("D", FAILED),
    Call("D", "failure_exception", {}, ABORTED),
    Call("D", "is_abort_release_safe", {}, True),
    Call("D", "clear"),
]
"""The client leaves while decode waits; prefill never gets the request. `failure_exception` clears it, too:
the call here is the second one."""

ABORT_IN_PREFILL = [
    Call("P", "Sender", {"room": 1110109547106396266}),
    _poll("P", BOOTSTRAPPING, 20873),
    Call("P", "abort"),
    _poll("P", FAILED),
    Call("P", "failure_exception", {}, ABORTED),
]
"""The client leaves while prefill waits for decode."""
