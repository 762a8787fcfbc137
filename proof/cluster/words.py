"""The words that pdpool gives: conditions, events and alerts as text, and which of them a drill expects.

A word is `KIND CONDITION=STATUS REASON`, `event KIND REASON`, or `alert NAME`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

KINDS: Final = {"ppool": "PrefillPool", "dpool": "DecodePool", "pdsvc": "DisaggregatedService"}
"""Kinds whose words count, by their short name."""

GOOD: Final = (
    r"\w+ Available=True Serving",
    r"\w+ Ready=True (Ready|UpdateAvailable)",
    r"\w+ QueuesHealthy=True \w+",
    r"pdsvc RouterReady=True Ready",
    r"\w+ HoldsProvable=True \w+",
    r"event \w+ (Serving|Ready|UpdateAvailable|QueuesFlowing|QueuesSaturated|NothingUnproven)",
)
"""Words that every drill may give: they say that all is well, or is well again."""


@dataclass(frozen=True)
class Expected:
    """What a drill must show. Words are regular expressions, matched against a whole word.

    Attributes:
        must: each of these words must be given.
        may: further words that are true. Any other word is wrong.
        may_lose: largest number of requests that may fail.
    """

    must: tuple[str, ...]
    may: tuple[str, ...] = ()
    may_lose: int = 0


def condition_words(short: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the words of an object's conditions.

    Args:
        short: key of `KINDS`.
        body: the object.
    """
    for one in body.get("status", {}).get("conditions", []):
        yield f"{short} {one['type']}={one['status']} {one['reason']}"


def event_word(event: dict[str, Any]) -> str | None:
    """Return the word of an event. None if it is not about an object of pdpool."""
    kind = event.get("regarding", {}).get("kind")
    short = next((short for short, long in KINDS.items() if long == kind), None)
    return f"event {short} {event.get('reason')}" if short else None


def alert_words(alerts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the words of the alerts that fire."""
    for alert in alerts:
        if alert["state"] == "firing":
            yield f"alert {alert['labels']['alertname']}"
