"""What the HTTP side asks of the scheduler, and what it gets back: plain data without behaviour."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import prompt_digest

DEFAULT_DEADLINE_S = 300.0
"""Seconds within which a request must have its first token; SGLang's bootstrap and waiting timeouts have this value."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when they end.

    `temperature` 0 is greedy, `top_k` 0 is no bound. With a `seed` the tokens depend on nothing but the model, the
    prompt, the seed and their position; without one a seed is drawn for each sequence.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Handoff:
    """Where a sequence meets the other engine.

    Args:
        prefill: bootstrap address of the prefill engine, "host:port".
        room: the router's `bootstrap_room`.
        sibling: position of the sequence in the request's body; sequences that share a room differ by it.
        traceparent: that header of the request's, where it has one.
        prompt: by what the two halves of the sequence know each other, see `prompt_of`; empty where the prompt was not
            read.
    """

    prefill: str
    room: int
    sibling: int
    traceparent: str | None = None
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended: `stop`, `length` or `abort`. `matched` is the stop string or token that ended it."""

    reason: str
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a sequence with the text that they complete (it may lag behind: a stop string may be under way)."""

    ids: tuple[int, ...]
    text: str
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that ended without a result. `status` is the HTTP status, `code` a word for programs."""

    status: int
    code: str
    message: str


Output = Tokens | Failure
Sink = Callable[[Output], None]
"""Takes the outputs of one sequence in order, up to the first that is a Failure or carries a Finish.

Called on the scheduler's thread, and, with a Failure, on one that stops it: it must not block.
"""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One sequence to generate. An HTTP request makes one for each prompt and sample; they share its `rid`.

    Two requests are equal only if they are the same object. `deadline` is a reading of `time.monotonic()`: without a
    first token by then the sequence fails.
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    sink: Sink
    handoff: Handoff | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + DEFAULT_DEADLINE_S)


def prompt_of(tokens: tuple[int, ...] | NDArray[np.int32], sampling: SamplingParams) -> bytes:
    """By what the two halves of a sequence know each other: what its cache and its first token come from."""
    drawn = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    return prompt_digest(tokens, repr(drawn).encode())


class RequestError(Exception):
    """A request that cannot be taken. The server answers with `status` and an OpenAI-style body.

    Args:
        message: names the field, the value and what would be right.
        param: the field of the body at fault, if any.
        status: HTTP status.
        code: a word for programs.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


class TooLongError(RequestError):
    """A request that this engine can never take, though another with a larger cache may: it has room for less."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
