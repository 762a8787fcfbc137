"""Questions to the model through the official `openai` client."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import openai

FIRST_QUESTION = "What is the capital of France?"
STREAM_TOKENS = 48
ANSWER_TOKENS = 24
STREAM_S = 90.0
BATCH_S = 300.0
EXAMPLE = 1
"""Index of the question that is shown with its answer: the small model knows Japan's capital."""

_CAPITALS = ("Italy", "Japan", "Egypt", "Canada", "Peru", "Kenya", "Norway", "Greece")
_TOPICS = ("photosynthesis", "gravity", "the water cycle", "an eclipse", "volcanoes", "magnets", "rainbows", "tides")


def questions() -> list[str]:
    """Return 32 chat messages, from a few tokens to several pages of 16."""
    asked = [f"What is the capital of {country}?" for country in _CAPITALS]
    asked += [f"Explain {topic} to a child in two sentences." for topic in _TOPICS]
    asked += [f"Count upwards from {start}." for start in (1, 7, 20, 99, 250, 500, 1000, 4000)]
    # A common prefix of several pages, like the standing instructions of a system.
    rules = "You help the staff of a small library. Be brief and polite. " * 4
    asked += [f"{rules}A reader asks for a book about {topic}." for topic in _TOPICS]
    return asked


@dataclass(frozen=True)
class Answer:
    """One answer: its text and why it ended, or an error as text."""

    text: str = ""
    finish: str = ""
    tokens: int = 0
    error: str = ""


def stream(url: str, model: str, question: str, show: Callable[[str], None]) -> tuple[str, float]:
    """Ask one question and show the answer as it arrives. Return its text and the seconds to the first token.

    Raises:
        openai.OpenAIError: the request failed.
        TimeoutError: the model did not answer.
    """
    began, first, text = time.monotonic(), None, ""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STREAM_S) as client:
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=STREAM_TOKENS,
            stream=True,
        )
        for chunk in chunks:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first = first or time.monotonic()
                text += piece
                show(piece)
    if first is None:
        raise TimeoutError(f"the stream of {url} ended without a token")
    return text, first - began


def ask_all(
    url: str, model: str, asked: Iterable[str], deadline_s: float = BATCH_S, each: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Ask all questions at once and return the answers in their order. None takes longer than the deadline.

    `each` is called for each answer or error on arrival.
    """
    return asyncio.run(_ask_all(url, model, list(asked), deadline_s, each))


async def _ask_all(url: str, model: str, asked: list[str], deadline_s: float, each: Callable[[], None]) -> list[Answer]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=deadline_s) as client:

        async def ask(question: str) -> Answer:
            answer = await _ask(client, model, question, deadline_s)
            each()
            return answer

        return await asyncio.gather(*map(ask, asked))


async def _ask(client: openai.AsyncOpenAI, model: str, question: str, deadline_s: float) -> Answer:
    try:
        async with asyncio.timeout(deadline_s):
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=ANSWER_TOKENS,
            )
    except TimeoutError:
        return Answer(error=f"{HUNG} after {deadline_s:.0f} s")
    except openai.OpenAIError as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    choice = answer.choices[0]
    tokens = answer.usage.completion_tokens if answer.usage else 0
    return Answer(choice.message.content or "", choice.finish_reason, tokens)


HUNG = "no answer"


def model_name(url: str) -> str:
    """Return the name of the one model served at `url`.

    Raises:
        openai.OpenAIError: the request failed.
    """
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STREAM_S) as client:
        return next(iter(client.models.list())).id
