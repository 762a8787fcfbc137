"""`make oracle`: greedy tokens after a hand-off must equal those of one engine that does both.

100 prompts go to a unified engine, and through the router to a prefill and a decode engine, several at a time. Some are
short, some span many pages; lengths lie around page and chunk boundaries; some repeat or share a beginning. The last
line gives the number of identical answers. The exit code is 1 unless all are identical.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import click
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights_fetch
from pdpool_reference.demo.launch import Children, LaunchError, bytes_moved

from dev.progress import Progress, ticking

NEW_TOKENS = 8
CONCURRENT = 8
ANSWER_S = 280.0
BOUNDARY_LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
"""Prompt lengths in tokens around the ends of pages of 16."""
LONG_LENGTHS = (130, 200, 255, 256, 257, 400)
"""Over many pages, once each; the engine computes prompts in chunks of 256."""
WORDS = """
the of a to in is that it was for on are with as his they be at one have this from or had by hot word but what some we
can out other were all there when up use your how said an each she river stone seven copper lantern market winter engine
garden paper signal mountain harbour letter music shadow question number forest window
"""
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many legs has a spider?",
    "Write one sentence about the sea.",
    "What does a baker do?",
)


@dataclass(frozen=True)
class Prompt:
    """One request: path and body."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One response: whether it is an answer, and the parts that must agree."""

    ok: bool
    parts: tuple[Any, ...]


def make_prompts(encode: Callable[[str], list[int]], count: int, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts, the same ones every time. `encode`: text to tokens."""
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return list(encode(" ".join(rng.choices(WORDS.split(), k=length))))[:length]

    common = tokens(40)
    repeated = tokens(24)
    once = [_generate(f"long {n}", tokens(n)) for n in LONG_LENGTHS]
    makers: list[Callable[[], Prompt]] = [
        *[partial(lambda n: _generate(f"boundary {n}", tokens(n)), n) for n in BOUNDARY_LENGTHS],
        *[partial(lambda n: _generate(f"short {n}", tokens(n)), n) for n in (1, 2, 3, 7, 11)],
        *[partial(lambda n: _generate("common beginning", common + tokens(n)), n) for n in (1, 8, 9, 30)],
        lambda: _generate("repeated", repeated),
        *[partial(_chat, question) for question in QUESTIONS],
        lambda: _complete(" ".join(rng.choices(WORDS.split(), k=20))),
    ]
    ordered = once + [makers[i % len(makers)]() for i in range(count)]
    del ordered[count:]
    rng.shuffle(ordered)
    return ordered


def _generate(kind: str, ids: list[int]) -> Prompt:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return Prompt(kind, "/generate", {"input_ids": ids, "sampling_params": sampling})


def _chat(question: str) -> Prompt:
    body = {"model": "default", "messages": [{"role": "user", "content": question}]}
    return Prompt("chat", "/v1/chat/completions", {**body, "temperature": 0, "max_tokens": NEW_TOKENS})


def _complete(text: str) -> Prompt:
    body = {"model": "default", "prompt": text, "temperature": 0, "max_tokens": NEW_TOKENS}
    return Prompt("completion", "/v1/completions", body)


async def ask_all(url: str, prompts: list[Prompt], each: Callable[[], None] = lambda: None) -> list[Answer]:
    """Return the parts of each answer that must agree; an error agrees with nothing. `each` is called for each."""
    slots = asyncio.Semaphore(CONCURRENT)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:

        async def ask(prompt: Prompt) -> Answer:
            async with slots, session.post(prompt.path, json=prompt.body) as response:
                answer = await response.json()
                each()
                return _essence(answer) if response.status == 200 else Answer(False, (response.status, answer))

        return list(await asyncio.gather(*[ask(prompt) for prompt in prompts]))


async def _ask_both(unified: str, router: str, prompts: list[Prompt]) -> list[list[Answer]]:
    answered = Counter[str]()
    ways = {"unified": unified, "disaggregated": router}

    def line() -> str:
        return "answered: " + ", ".join(f"{answered[way]} of {len(prompts)} {way}" for way in ways)

    with ticking(Progress(), line):
        asked = [ask_all(url, prompts, partial(answered.update, [way])) for way, url in ways.items()]
        return list(await asyncio.gather(*asked))


def _essence(answer: dict[str, Any]) -> Answer:
    if "output_ids" in answer:
        return Answer(True, (answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]))
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(True, (text, choice["finish_reason"], answer["usage"]))


def compare(prompts: list[Prompt], unified: list[Answer], split: list[Answer]) -> int:
    """Print the differences. Returns how many answers agree."""
    identical = 0
    for number, (prompt, expected, got) in enumerate(zip(prompts, unified, split, strict=True)):
        if expected == got and expected.ok:
            identical += 1
        else:
            print(f"prompt {number} ({prompt.kind}):\n  unified       {expected.parts}\n  disaggregated {got.parts}")
    return identical


def run(model_path: str, backend: str, count: int) -> bool:
    """Start the engines, send all prompts both ways, compare. Returns whether all answers are identical."""
    prompts = make_prompts(tokenizers.load(model_path).encode, count)
    with Children(print) as children:
        modes = ("unified", "prefill", "decode")
        begun = [children.begin_engine(mode, model_path=model_path, backend=backend) for mode in modes]
        unified, prefill, decode = [children.listening(child) for child in begun]
        router = children.router([prefill], [decode])
        print(f"asking {count} prompts on both ways, {CONCURRENT} at a time on each")
        began = time.monotonic()
        answers = asyncio.run(_ask_both(unified.url, router.url, prompts))
        print(f"answered in {time.monotonic() - began:.1f} s")
        moved = bytes_moved(decode)
    print(f"{moved:,} bytes of KV cache moved")
    identical = compare(prompts, *answers)
    print(f"oracle: {identical}/{count} identical")
    return identical == count and moved > 0


@click.command()
@click.option("--model", "model", default="smollm2", show_default=True, help="`smollm2`, `tiny`, or a directory.")
@click.option(
    "--transfer-backend", "backend", type=click.Choice(("nixl", "mooncake", "local")), default="nixl", show_default=True
)
@click.option("--prompts", "count", type=click.IntRange(1, 1000), default=100, show_default=True)
def main(model: str, backend: str, count: int) -> None:
    """Compare disaggregated answers with those of a unified engine."""
    try:
        model_path = str(weights_fetch.smollm2_dir(print)) if model == "smollm2" else model
        same = run(model_path, backend, count)
    except LaunchError as error:
        sys.exit(f"oracle: {error}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
