"""Llama over the paged KV cache, with logits that do not depend on batch, chunking or placement, bit for bit.

Three rules ensure that. Matrix products go through `products`, which gives each row the same bits in any place.
Everything else between them is elementwise or reduces one row. Attention is cut by absolute position: a query at
position p is always row p mod QUERY_TILE of its tile. It attends to keys in blocks of KEY_BLOCK, from position 0 to its
own. So the shapes, and with them the order of every sum, depend on p alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdpool_reference.config import ModelConfig
from pdpool_reference.kv import PAGE_TOKENS, PagedKV
from pdpool_reference.products import BLOCK, Floats, choose_tiles, product
from pdpool_reference.weights import Layer, Weights

QUERY_TILE: Final = 4
"""Positions that attend together: more would waste work in decode steps, which fill one of them."""
KEY_BLOCK: Final = 128
"""Keys of one product; a multiple of QUERY_TILE and of PAGE_TOKENS."""


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens of one request to run: `tokens` int32 (n,) at positions start..start+n-1; n is 1 for a decode step.

    `pages` int32 is the request's page table: entry i holds positions 16 i .. 16 i + 15. It covers start + n positions
    at least, and the cache holds what lies before `start`.
    """

    tokens: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


Gather = Callable[[Floats], Floats]
"""Takes a rank's own heads of an attention, (tokens, own heads * head_dim); returns those of all ranks of its stage."""


class Model:
    """One rank's shard of a model, on its cache. Not thread-safe. Limits BLAS to one thread, for the whole process.

    A stage's ranks divide attention and cache by heads, and each computes the rest in full. These are the products of
    one rank alone, in the same shapes, so that they give the same bits.

    Raises BatchVariantError when this machine cannot compute independently of the batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kv: PagedKV) -> None:
        self._config = config
        self._weights = weights
        self._kv = kv
        matrices = [tensor for _, tensor in weights.tensors() if tensor.ndim == 4]
        self._tiles = choose_tiles(tuple(sorted({matrix.shape[2] for matrix in matrices})))
        self._cos, self._sin = _rotary(config)

    def forward(self, steps: Sequence[Step]) -> Floats:
        """Run steps of different requests in one batch: prompts, chunks of prompts, single tokens.

        For the one rank that holds the whole model. Writes keys and values of all tokens into the cache. Returns the
        logits of each step's last token, float32 (len(steps), vocab). Raises ValueError for a step that does not fit
        the model, its page table or the cache; nothing is written then.
        """
        if not steps:
            return np.empty((0, self._config.vocab), np.float32)
        self.check(steps)
        return self.logits(steps, self.stage(steps, self.embed(steps), lambda own: own))

    def check(self, steps: Sequence[Step]) -> None:
        """Raise ValueError for a step that does not fit the model, its page table or the cache."""
        for step in steps:
            self._check(step)

    def embed(self, steps: Sequence[Step]) -> Floats:
        """What the first stage begins with: float32 (tokens of all steps, hidden)."""
        return self._embed(np.concatenate([step.tokens for step in steps]))

    def stage(self, steps: Sequence[Step], hidden: Floats, gather: Gather) -> Floats:
        """Run this rank's layers over checked steps; takes and returns float32 (tokens of all steps, hidden)."""
        positions = np.concatenate([np.arange(step.start, step.end) for step in steps])
        slots = np.concatenate([_slots(step) for step in steps])
        shard = self._kv.shard
        layers = self._weights.layers[shard.first_layer : shard.first_layer + shard.layers]
        for index, layer in enumerate(layers):
            own = self._attention(index, layer, hidden, positions, slots, steps)
            hidden = hidden + product(gather(own), layer.attention_out, self._tiles)[:, : self._config.hidden]
            hidden += self._ffn(layer, hidden)
        return hidden

    def logits(self, steps: Sequence[Step], hidden: Floats) -> Floats:
        """What the last stage ends with: float32 (len(steps), vocab), of each step's last token."""
        last = np.cumsum([len(step.tokens) for step in steps]) - 1
        normed = _rms_norm(hidden[last], self._weights.final_norm, self._config.rms_eps)
        return product(normed, self._weights.embedding, self._tiles)[:, : self._config.vocab]

    def _check(self, step: Step) -> None:
        if len(step.tokens) == 0:
            raise ValueError("tokens of a step are none, must be at least one")
        low, high = int(step.tokens.min()), int(step.tokens.max())
        if low < 0 or high >= self._config.vocab:
            raise ValueError(f"tokens of a step are {low}..{high}, must be within 0..{self._config.vocab - 1}")
        if step.start < 0 or step.end > self._config.max_context:
            raise ValueError(f"a step ends at position {step.end}, must be at most {self._config.max_context}")
        if len(step.pages) * PAGE_TOKENS < step.end:
            raise ValueError(f"page table has {len(step.pages)} pages, too few for {step.end} tokens")
        used = step.pages[: -(-step.end // PAGE_TOKENS)]
        if used.min() < 0 or used.max() >= self._kv.pages:
            raise ValueError(f"page ids are {used.min()}..{used.max()}, must be within 0..{self._kv.pages - 1}")

    def _embed(self, tokens: NDArray[np.int32]) -> Floats:
        rows = self._weights.embedding[:, tokens // BLOCK, :, tokens % BLOCK]
        return np.ascontiguousarray(rows).reshape(len(tokens), self._config.hidden)

    def _ffn(self, layer: Layer, hidden: Floats) -> Floats:
        ffn = self._config.ffn
        both = product(_rms_norm(hidden, layer.ffn_norm, self._config.rms_eps), layer.gate_up, self._tiles)
        gate, up = both[:, :ffn], both[:, ffn : 2 * ffn]
        return product(_silu(gate) * up, layer.down, self._tiles)[:, : self._config.hidden]

    def _attention(
        self,
        index: int,
        layer: Layer,
        hidden: Floats,
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        steps: Sequence[Step],
    ) -> Floats:
        """This rank's heads of an attention: float32 (tokens of all steps, own query heads * head_dim)."""
        config, shard = self._config, self._kv.shard
        count, dim = len(hidden), config.head_dim
        mixed = product(_rms_norm(hidden, layer.attention_norm, config.rms_eps), layer.qkv, self._tiles)
        heads = mixed[:, : config.qkv].reshape(count, config.heads + 2 * config.kv_heads, dim)
        turned = config.heads + config.kv_heads
        rotated = _rotate(heads[:, :turned], self._cos[positions], self._sin[positions])
        group = config.heads // config.kv_heads
        own = slice(shard.first_head, shard.first_head + shard.kv_heads)
        queries = rotated[:, own.start * group : own.stop * group] * np.float32(dim**-0.5)
        keys, values = self._kv.k[index], self._kv.v[index]
        keys.reshape(-1, shard.kv_heads, dim)[slots] = rotated[:, config.heads :][:, own]
        values.reshape(-1, shard.kv_heads, dim)[slots] = heads[:, turned:][:, own]
        out = np.empty((count, shard.kv_heads * group * dim), np.float32)
        first = 0
        for step in steps:
            behind = first + len(step.tokens)
            context = _gather(keys, step), _gather(values, step)
            _attend(queries[first:behind], *context, step.start, out[first:behind])
            first = behind
        return out


def _attend(queries: Floats, keys: Floats, values: Floats, start: int, out: Floats) -> None:
    """Causal attention of one request: queries (n, heads, dim) at positions from `start`; fills `out` (n, heads * dim).

    keys, values: (kv_heads, blocks, KEY_BLOCK, dim), position 0 first.
    """
    count, heads, dim = queries.shape
    kv_heads = len(keys)
    group = heads // kv_heads
    first_tile, tiles = start // QUERY_TILE, -(-(start + count) // QUERY_TILE)
    padded = np.zeros(((tiles - first_tile) * QUERY_TILE, heads, dim), np.float32)
    lead = start - first_tile * QUERY_TILE
    padded[lead : lead + count] = queries
    # A tile's rows are (position, head of the group): all heads that share keys and values meet them together.
    rows = padded.reshape(-1, QUERY_TILE, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(-1, kv_heads, 1, QUERY_TILE * group, dim)
    mixed = np.empty((len(rows), kv_heads, QUERY_TILE * group, dim), np.float32)
    for index, tile in enumerate(rows):
        position = (first_tile + index) * QUERY_TILE
        blocks = position // KEY_BLOCK + 1
        scores = tile @ keys[:, :blocks].swapaxes(2, 3)
        future = np.arange(KEY_BLOCK) > (position % KEY_BLOCK + np.arange(QUERY_TILE))[:, None]
        scores[:, -1, np.repeat(future, group, axis=0)] = -np.inf
        shares = np.exp(scores - scores.max(axis=(1, 3), keepdims=True))
        weighted = (shares @ values[:, :blocks]).sum(axis=1)
        mixed[index] = weighted / shares.sum(axis=3).sum(axis=1)[:, :, None]
    by_position = mixed.reshape(-1, kv_heads, QUERY_TILE, group, dim).transpose(0, 2, 1, 3, 4)
    out[:] = by_position.reshape(-1, heads * dim)[lead : lead + count]


def _gather(pages: Floats, step: Step) -> Floats:
    """The cache of one request: a view (kv_heads, blocks, KEY_BLOCK, dim) of a copy, zeros behind its end.

    What other requests left in the last page must not come near a product: 0 times NaN is NaN.
    """
    _, _, kv_heads, dim = pages.shape
    blocks = -(-step.end // KEY_BLOCK)
    context = np.empty((blocks * KEY_BLOCK, kv_heads, dim), np.float32)
    used = -(-step.end // PAGE_TOKENS)
    by_page = context.reshape(-1, PAGE_TOKENS, kv_heads, dim)
    by_page[:used] = pages[step.pages[:used]]
    context[step.end :] = 0
    return context.reshape(blocks, KEY_BLOCK, kv_heads, dim).transpose(2, 0, 1, 3)


def _slots(step: Step) -> NDArray[np.int64]:
    """Where the step's tokens lie in a buffer seen as (pages * PAGE_TOKENS, ...)."""
    positions = np.arange(step.start, step.end)
    return step.pages[positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS


def _rotary(config: ModelConfig) -> tuple[Floats, Floats]:
    """Cosine and sine, each (max_context, 1, head_dim / 2)."""
    half = config.head_dim // 2
    frequencies = config.rope_base ** (-np.arange(half) / half)
    angles = np.arange(config.max_context)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(heads: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn each pair (element i, element i + half) of each head by its position's angle."""
    left, right = np.split(heads, 2, axis=-1)
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)


def _rms_norm(rows: Floats, gain: Floats, eps: float) -> Floats:
    mean_square = np.square(rows).mean(axis=-1, keepdims=True)
    normed: Floats = rows / np.sqrt(mean_square + np.float32(eps)) * gain
    return normed


def _silu(x: Floats) -> Floats:
    # exp(-x) of a strongly negative x overflows to infinity, and the quotient to the right limit, -0.
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-x))
    return y
