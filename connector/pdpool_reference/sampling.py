"""From logits to one token."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_SEED_MASK: Final = 2**64 - 1


def sample(
    logits: NDArray[np.float32],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    position: int = 0,
) -> int:
    """Choose a token from logits (vocab,).

    Temperature 0 is greedy: the largest logit, the lowest token among equals. Otherwise the token is drawn from the
    softmax of logits / temperature. The draw covers the `top_k` likeliest tokens (0 or less: all), and of these the
    fewest that together have at least the share `top_p`.

    With a seed the result depends only on logits, seed and `position`, the number of the token in the answer. So an
    answer continues in another engine as it would here.

    Raises:
        ValueError: the temperature is negative, or top_p is outside 0..1.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, must be above 0 and at most 1")
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64)
    # The largest first: a tiny temperature would otherwise overflow.
    with np.errstate(over="ignore"):  # of the smallest temperatures: minus infinity then, a weight of 0
        scaled = (scaled - scaled.max()) / temperature
    weights = np.exp(scaled)
    tokens = np.arange(len(weights))
    if top_p < 1 or 0 < top_k < len(weights):
        tokens = np.argsort(-weights, kind="stable")
        tokens = tokens[: top_k if top_k > 0 else None]
        shares = np.cumsum(weights[tokens])
        tokens = tokens[: int(np.searchsorted(shares, top_p * shares[-1])) + 1]
    sums = np.cumsum(weights[tokens])
    drawn = _generator(seed, position).random() * sums[-1]
    return int(tokens[min(int(np.searchsorted(sums, drawn, side="right")), len(tokens) - 1)])


def _generator(seed: int | None, position: int) -> np.random.Generator:
    if seed is None:
        return np.random.default_rng()
    return np.random.Generator(np.random.Philox(key=np.array([seed & _SEED_MASK, position], np.uint64)))
