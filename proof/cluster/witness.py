"""Collects the words that pdpool gives while a drill runs: conditions, events, and alerts that fire."""

from types import TracebackType
from typing import Any, Final, Self

from dev.prometheus import deploy
from proof.cluster.watch import ANSWER_S, Watch
from proof.cluster.words import KINDS, alert_words, condition_words, event_word
from tests.cluster.stack import Stack, ask

LOOK_S: Final = 1.0
PROMETHEUS_PORT: Final = 9090


class Witness:
    """Watches while the block runs. Times are seconds since its start.

    Args:
        stack: Its objects and events are read.
        alerts: Read the alerts of the Prometheus of `dev.prometheus`, too.
    """

    def __init__(self, stack: Stack, *, alerts: bool = True) -> None:
        self._stack = stack
        self._earlier = {_version(event) for event in self._events()}
        self._alerts = f"{prometheus_url(stack)}/api/v1/alerts" if alerts else ""
        reads = (self._conditions, self._news, *((self._firing,) if alerts else ()))
        self._watch = Watch("witness", reads, LOOK_S)
        self.first: dict[str, float] = {}
        """When each word was first given."""

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    @property
    def words(self) -> tuple[str, ...]:
        """Words so far, in their order."""
        return tuple(dict(self.first))

    def _record(self, word: str) -> None:
        self.first.setdefault(word, self._watch.now_s)

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


def alerts(prometheus: str) -> str | None:
    """Return the alerts that are pending or firing, as text. `None` if there are none."""
    found = ask(f"{prometheus}/api/v1/alerts", timeout_s=ANSWER_S)["data"]["alerts"]
    return ", ".join(sorted(f"{one['labels']['alertname']} ({one['state']})" for one in found)) or None


def prometheus_url(stack: Stack) -> str:
    """Return the address of the Prometheus of `dev.prometheus`."""
    address = stack.get("service", "prometheus", within=deploy.NAMESPACE)["spec"]["clusterIP"]
    return f"http://{address}:{PROMETHEUS_PORT}"


def _version(event: dict[str, Any]) -> tuple[str, str]:
    """Return what changes when an event happens again."""
    return event["metadata"]["uid"], event["metadata"]["resourceVersion"]
