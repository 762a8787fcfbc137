"""Collects the words that pdpool gives while a drill runs: conditions, events, and alerts that fire."""

import json
import threading
import time
from types import TracebackType
from typing import Any, Self

import urllib3.exceptions

from dev.prometheus import deploy
from dev.shell import CommandError
from proof.drills.words import KINDS, alert_words, condition_words, event_word
from tests.cluster.stack import Stack, ask

LOOK_S = 1.0
ANSWER_S = 5.0
"""Longest wait for one answer, in seconds. The API server may be frozen."""
UNREACHABLE = (CommandError, OSError, urllib3.exceptions.HTTPError, json.JSONDecodeError)
PROMETHEUS_PORT = 9090


class Witness:
    """Watches while the block runs. Times are seconds since its start."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness")
        self._began = time.monotonic()
        self._earlier = {_version(event) for event in self._events()}
        address = stack.get("service", "prometheus", within=deploy.NAMESPACE)["spec"]["clusterIP"]
        self._alerts = f"http://{address}:{PROMETHEUS_PORT}/api/v1/alerts"
        self._failure: Exception | None = None
        self.first: dict[str, float] = {}
        """When each word was first given."""
        self.looks = 0
        self.unanswered = 0
        """Reads that the API server or Prometheus did not answer."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(len(KINDS) * ANSWER_S + 2 * ANSWER_S + 10)
        if self._failure and error is None:
            raise self._failure

    @property
    def words(self) -> tuple[str, ...]:
        """Words so far, in their order."""
        return tuple(dict(self.first))

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for read in (self._conditions, self._news, self._firing):
                try:
                    read()
                except UNREACHABLE:
                    self.unanswered += 1
                except Exception as error:  # noqa: BLE001 -- raised by the block's end, in the drill's own thread
                    self._failure = error
                    return
            self.looks += 1

    def _record(self, word: str) -> None:
        self.first.setdefault(word, round(time.monotonic() - self._began, 1))

    def _conditions(self) -> None:
        for short in KINDS:
            for word in condition_words(short, self._stack.look(short, "chat", timeout_s=ANSWER_S)):
                self._record(word)

    def _news(self) -> None:
        for event in self._events():
            word = event_word(event)
            if word and _version(event) not in self._earlier:
                self._record(word)

    def _firing(self) -> None:
        for word in alert_words(ask(self._alerts, timeout_s=ANSWER_S)["data"]["alerts"]):
            self._record(word)

    def _events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._stack.look("event", timeout_s=ANSWER_S)["items"]
        return found


def _version(event: dict[str, Any]) -> tuple[str, str]:
    """Return what changes when an event happens again."""
    return event["metadata"]["uid"], event["metadata"]["resourceVersion"]
