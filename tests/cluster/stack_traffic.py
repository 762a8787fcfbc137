"""Continuous requests. Each answer is compared with that of one engine that does both phases."""

import threading
import time
import urllib.error
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dev.shell import wait_for
from tests.cluster.stack import ask

NEW_TOKENS = 6
PROMPTS = tuple(tuple(range(3, 3 + length)) for length in (1, 5, 16, 17, 33, 64))
"""Numbers of token ids: below, at and above the ends of pages of 16."""
WORKERS = 3
PAUSE_S = 0.05
LONGEST_S = 280.0
ANSWER_S = 60.0


def generate(url: str, prompt: tuple[int, ...], timeout_s: float = ANSWER_S) -> tuple[int, ...]:
    """Return greedy tokens after a prompt."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    return tuple(ask(f"{url}/generate", body, timeout_s=timeout_s)["output_ids"])


@dataclass(frozen=True)
class Outcome:
    """Result of one request. Without an error it was answered with the right tokens."""

    seconds: float
    error: str = ""


class Traffic:
    """Sends requests while the block runs, at most `longest_s`.

    `expected` maps prompt to tokens. A client gives up after `patience_s`. `workers` clients ask at the same time.
    """

    def __init__(
        self,
        url: str,
        expected: dict[tuple[int, ...], tuple[int, ...]],
        *,
        patience_s: float = ANSWER_S,
        longest_s: float = LONGEST_S,
        workers: int = WORKERS,
    ) -> None:
        self._url = url
        self._expected = expected
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._longest_s = longest_s
        self._until = time.monotonic() + longest_s
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(workers)]
        self.outcomes: list[Outcome] = []

    @property
    def errors(self) -> list[str]:
        """Errors so far."""
        return [outcome.error for outcome in self.outcomes if outcome.error]

    def more(self, answers: int = 30) -> None:
        """Wait until this number of further requests has right answers."""

        def right() -> int:
            return sum(not outcome.error for outcome in self.outcomes)

        wanted = right() + answers
        wait_for(
            f"{answers} more right answers",
            lambda: None if right() >= wanted else f"{right()} of {wanted}; last errors {self.errors[-3:]}",
            deadline_s=60,
        )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        try:
            self.more()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(max(ANSWER_S, self._patience_s) + 10)
        assert not any(thread.is_alive() for thread in self._threads), "a request neither ended nor timed out"
        assert time.monotonic() < self._until, f"the traffic reached its time limit after {self._longest_s:.0f} s"

    def _run(self, number: int) -> None:
        prompts = list(self._expected)
        while not self._stop.wait(PAUSE_S) and time.monotonic() < self._until:
            number += 1
            self.outcomes.append(self._ask(prompts[number % len(prompts)]))

    def _ask(self, prompt: tuple[int, ...]) -> Outcome:
        began = time.monotonic()
        error = ""
        try:
            tokens = generate(self._url, prompt, self._patience_s)
            if tokens != self._expected[prompt]:
                error = f"{len(prompt)} tokens: {tokens} instead of {self._expected[prompt]}"
        except urllib.error.HTTPError as answer:
            error = f"HTTP {answer.code}: {answer.read()[:300]!r}"
        except (OSError, ValueError, LookupError) as failure:
            error = repr(failure)
        return Outcome(time.monotonic() - began, error and f"{time.strftime('%H:%M:%S', time.gmtime())} {error}")
