"""What the HTTP side gives to the scheduler, and what it gets back: plain data without behaviour."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import prompt_digest

from pdpool_reference.handoff import Transfer

DEFAULT_DEADLINE_S = 300.0
"""Seconds within which a request must have its first token; SGLang's bootstrap and waiting timeouts have this value."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when they end.

    `temperature` 0 is greedy, `top_k` 0 is no bound. With a `seed` the tokens depend only on the model, the prompt, the
    seed and their position. Without one a seed is drawn for each sequence.
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
    """By what the two halves of a sequence find each other.

    Args:
        prefill: Bootstrap address of the prefill engine, "host:port".
        room: The router's `bootstrap_room`.
        prompt: Digest by which the two halves match (`prompt_of`); empty matches any half of the room.
    """

    prefill: str
    room: int
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

    Two requests are equal only if they are the same object. `transfer` is the sequence's hand-off, opened when the
    request arrived; None in a unified engine. `deadline` is a reading of `time.monotonic()`: without a first token by
    then the sequence fails.
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    sink: Sink
    transfer: Transfer | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + DEFAULT_DEADLINE_S)


def prompt_of(tokens: tuple[int, ...] | NDArray[np.int32], sampling: SamplingParams) -> bytes:
    """Return the digest by which the two halves of a sequence match: of everything that decides its first token."""
    drawn = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    return prompt_digest(tokens, repr(drawn).encode())


class RequestError(Exception):
    """A request that the engine refuses. The server answers with `status` and an OpenAI-style body.

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
    """A request that is too long for this engine. An engine with a larger cache may take it."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
