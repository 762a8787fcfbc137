"""The prompts of `tokens`, and the comparison of their answers. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from proof.engines.client import Reply, Tokens

NEW_TOKENS: Final = 12
TOKEN_IDS: Final = range(100, 49_000)
"""Ordinary tokens of the vocabulary."""
SHORT: Final = (1, 2, 3, 7, 11, 14)
BOUNDARIES: Final = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
"""Around the ends of pages of 16 tokens."""
CHUNKS: Final = (127, 128, 129, 200, 255, 256, 257, 400, 600, 1300)
"""Around the ends of chunks of 128 tokens, and over many."""
REPEATED: Final = 144
"""Tokens of the beginning that several prompts share: nine pages."""


@dataclass(frozen=True)
class Prompt:
    """One request: its kind, for messages, and the body of `/generate`."""

    kind: str
    body: dict[str, Any]


def body_of(input_ids: Any, new_tokens: int = NEW_TOKENS, **sampling: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the body of a greedy request for exactly `new_tokens` tokens."""
    return {
        "input_ids": input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling},
    }


def make(count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts of all kinds in mixed order; the same ones for a seed."""
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return rng.choices(TOKEN_IDS, k=length)

    common, again = tokens(REPEATED), tokens(70)
    lengths = [*SHORT, *BOUNDARIES, *CHUNKS]
    found = [Prompt(f"{length} tokens", body_of(tokens(length))) for length in lengths]
    found += [Prompt(f"repeated prefix and {n}", body_of(common + tokens(n))) for n in (1, 15, 16, 17, 300)]
    found += [Prompt("repeated", body_of(again))] * 4
    found += [Prompt(f"n=2, {n} tokens", body_of(tokens(n), n=2)) for n in (20, 150)]
    found += [Prompt("list of three", body_of([tokens(n) for n in (5, 40, 140)]))]
    while len(found) < count:
        length = rng.randrange(1, 500)
        found.append(Prompt(f"{length} tokens", body_of(tokens(length))))
    rng.shuffle(found)
    return found[:count]


def difference(expected: Tokens, reply: Reply) -> str | None:
    """Return how an answer differs from the unified server's; None where it is identical."""
    got = reply.tokens
    if got is None:
        return f"status {reply.status}: {str(reply.body)[:300]}"
    if len(got) != len(expected):
        return f"{len(got)} samples, must be {len(expected)}"
    for number, ((ours, why), (theirs, reason)) in enumerate(zip(got, expected, strict=True)):
        if ours != theirs:
            first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            return f"sample {number}: {len(ours)} tokens, which differ from {len(theirs)} at token {first}"
        if why != reason:
            return f"sample {number} ended by {why!r}, must be {reason!r}"
    return None


def identical(prompts: Sequence[Prompt], expected: Sequence[Tokens], replies: Sequence[Reply]) -> tuple[int, list[str]]:
    """Return how many answers are identical, and a line for each that is not."""
    lines = []
    for number, (prompt, right, reply) in enumerate(zip(prompts, expected, replies, strict=True)):
        if (found := difference(right, reply)) is not None:
            lines.append(f"prompt {number} ({prompt.kind}): {found}")
    return len(prompts) - len(lines), lines
