"""The model computes Llama, and a request's logits have the same bits in any batch."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pdpool_reference import weights
from pdpool_reference.kv import PAGE_TOKENS, PagedKV
from pdpool_reference.model import KEY_BLOCK, Model, Step

CONFIG, WEIGHTS = weights.tiny()
PAGES = 128
TOKENS = np.random.default_rng(7).integers(0, CONFIG.vocab, (4, 400), np.int32)
"""Token sequences of four requests; the longest cover several blocks of keys."""


def fresh_model():
    kv = PagedKV(CONFIG, PAGES)
    for buffer in (*kv.k, *kv.v):
        buffer[:] = np.nan  # a read of unwritten bytes shows
    return Model(CONFIG, WEIGHTS, kv), kv


def alone(tokens, pages=None):
    """Logits of the last token, the whole sequence in one step on an engine of its own."""
    table = np.arange(PAGES, dtype=np.int32) if pages is None else pages
    return fresh_model()[0].forward([Step(tokens, 0, table)])[0]


def unpacked(packed, outputs):
    depths, _, depth, _ = packed.shape
    return packed.transpose(0, 2, 1, 3).reshape(depths * depth, -1)[:, :outputs].astype(np.float64)


def textbook_logits(tokens):
    """Llama as written down in the papers: dense, float64, whole sequence at once, no cache."""
    c = CONFIG
    embedding = unpacked(WEIGHTS.embedding, c.vocab)
    x = embedding.T[tokens]

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_eps) * gain

    def rope(x):
        half = c.head_dim // 2
        angle = np.arange(len(x))[:, None] / c.rope_base ** (np.arange(half) / half)
        turn = np.exp(1j * angle)[:, None, :]
        pair = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate((pair.real, pair.imag), -1)

    for layer in WEIGHTS.layers:
        heads = (norm(x, layer.attention_norm) @ unpacked(layer.qkv, c.qkv)).reshape(len(x), -1, c.head_dim)
        q, k, v = np.split(heads, (c.heads, c.heads + c.kv_heads), axis=1)
        q, k = rope(q), rope(k)
        k, v = (np.repeat(each, c.heads // c.kv_heads, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1)
        x = x + mixed @ unpacked(layer.attention_out, c.hidden)
        gate, up = np.split(norm(x, layer.ffn_norm) @ unpacked(layer.gate_up, 2 * c.ffn), 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ unpacked(layer.down, c.hidden)
    return norm(x[-1], WEIGHTS.final_norm) @ embedding


@pytest.mark.parametrize("length", [1, 2, PAGE_TOKENS, 100, KEY_BLOCK, KEY_BLOCK + 1, 300])
def test_logits_are_those_of_the_textbook(length):
    tokens = TOKENS[0, :length]
    np.testing.assert_allclose(alone(tokens), textbook_logits(tokens), rtol=0, atol=2e-4)


@st.composite
def schedules(draw):
    """A few requests, cut into chunks anywhere, the chunks interleaved into batches at random."""
    count = draw(st.integers(1, 4))
    batches, left = [], []
    for _ in range(count):
        length = draw(st.sampled_from([1, 3, 17, 40, KEY_BLOCK, KEY_BLOCK + 5, 200]) | st.integers(1, 260))
        cuts = draw(st.lists(st.integers(1, max(1, length - 1)), max_size=4, unique=True).map(sorted))
        ends = [cut for cut in cuts if cut < length] + [length]
        # A tail of single tokens, as decode computes them.
        tail = draw(st.integers(0, 5))
        left.append(ends + [length + i + 1 for i in range(tail)])
    while any(left):
        waiting = [i for i in range(count) if left[i]]
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        batches.append([(i, left[i].pop(0)) for i in chosen])
    return count, batches, draw(st.integers(0, 2**32 - 1))


@given(schedules())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bits_are_independent_of_batch_and_pages(schedule):
    count, batches, seed = schedule
    model, _ = fresh_model()
    placed = np.random.default_rng(seed).permutation(PAGES).astype(np.int32).reshape(4, -1)
    position, logits = [0] * count, [None] * count
    for batch in batches:
        steps = [Step(TOKENS[i, position[i] : end], position[i], placed[i]) for i, end in batch]
        for (i, end), row in zip(batch, model.forward(steps), strict=True):
            position[i], logits[i] = end, row
    for i in range(count):
        assert logits[i].tobytes() == alone(TOKENS[i, : position[i]]).tobytes()


def test_batch_of_many_single_tokens_keeps_the_bits():
    count = 37
    kv = PagedKV(CONFIG, count)
    model = Model(CONFIG, WEIGHTS, kv)
    steps = [Step(TOKENS[0, i : i + 1], 0, np.array([i], np.int32)) for i in range(count)]
    together = model.forward(steps)
    for step, row in zip(steps, together, strict=True):
        assert row.tobytes() == model.forward([step])[0].tobytes()


def test_moved_cache_continues_with_same_bits():
    here, from_kv = fresh_model()
    there, to_kv = fresh_model()
    source, target = np.arange(5, 9, dtype=np.int32), np.array([90, 3, 41, 77, 2], np.int32)
    here.forward([Step(TOKENS[0, :50], 0, source)])
    for from_buffer, to_buffer in zip((*from_kv.k, *from_kv.v), (*to_kv.k, *to_kv.v), strict=True):
        to_buffer[target[:4]] = from_buffer[source]
    moved = there.forward([Step(TOKENS[0, 50:51], 50, target)])[0]
    assert moved.tobytes() == alone(TOKENS[0, :51]).tobytes()


def test_old_content_of_page_changes_no_bits():
    model, kv = fresh_model()
    for buffer in (*kv.k, *kv.v):
        buffer[:] = np.inf
    logits = model.forward([Step(TOKENS[0, :21], 0, np.arange(PAGES, dtype=np.int32))])[0]
    assert logits.tobytes() == alone(TOKENS[0, :21]).tobytes()


def test_cache_decides_the_logits():
    model, kv = fresh_model()
    table = np.arange(8, dtype=np.int32)
    model.forward([Step(TOKENS[0, :40], 0, table)])
    kv.v[0][1] += 1
    changed = model.forward([Step(TOKENS[0, 40:41], 40, table)])[0]
    assert changed.tobytes() != alone(TOKENS[0, :41]).tobytes()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(np.array([], np.int32), 0, np.array([0], np.int32)), "at least one"),
        (Step(np.array([CONFIG.vocab], np.int32), 0, np.array([0], np.int32)), "tokens of a step are 259..259"),
        (Step(np.array([-1], np.int32), 0, np.array([0], np.int32)), "must be within 0..258"),
        (Step(np.array([1], np.int32), CONFIG.max_context, np.arange(600, dtype=np.int32)), "at most 8192"),
        (Step(np.array([1], np.int32), PAGE_TOKENS, np.array([0], np.int32)), "page table has 1 pages"),
        (Step(np.array([1], np.int32), 0, np.array([PAGES], np.int32)), "must be within 0..127"),
        (Step(np.array([1], np.int32), 0, np.array([-1], np.int32)), "page ids are -1"),
    ],
)
def test_step_that_does_not_fit_writes_nothing(step, message):
    model, kv = fresh_model()
    good = Step(TOKENS[0, :3], 0, np.array([1], np.int32))
    with pytest.raises(ValueError, match=message):
        model.forward([good, step])
    assert np.isnan(kv.k[0]).all()


BITS = """
import hashlib
import numpy as np
from pdpool_reference import weights
from pdpool_reference.kv import PagedKV
from pdpool_reference.model import Model, Step

config, loaded = weights.tiny()
model = Model(config, loaded, PagedKV(config, 64))
tokens = np.arange(150, dtype=np.int32)
tables = np.arange(60, dtype=np.int32).reshape(5, 12)
whole = model.forward([Step(tokens, 0, tables[0])])[0]
model.forward([Step(tokens[:37], 0, tables[1]), Step(tokens[:99], 0, tables[2])])
parts = model.forward([Step(tokens[99:], 99, tables[2]), Step(tokens[37:], 37, tables[1]), Step(tokens, 0, tables[3])])
print({hashlib.sha256(row.tobytes()).hexdigest() for row in (whole, *parts)}.__len__())
"""


@pytest.mark.parametrize(("core", "needs"), [("SkylakeX", "avx512vl"), ("Haswell", "avx2"), ("Nehalem", "sse4_2")])
def test_bits_hold_with_kernels_of_other_processors(core, needs):
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needs}")
    environment = {**os.environ, "OPENBLAS_CORETYPE": core, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_tiny_model_depends_on_its_seed():
    def digest(seed):
        config, loaded = weights.tiny(seed)
        tensors = b"".join(tensor.tobytes() for _, tensor in loaded.tensors())
        return config.name, hashlib.sha256(tensors).hexdigest()

    assert digest(0) == digest(0)
    assert digest(0)[0] != digest(1)[0]
    assert digest(0)[1] != digest(1)[1]
