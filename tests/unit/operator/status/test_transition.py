from typing import Any

import pytest
from pdpool_operator.api.base import Condition
from pdpool_operator.api.models import InstanceStatus, PoolStatus, RankQueue
from pdpool_operator.plan.model import EventType
from pdpool_operator.status.transition import REFRESH, should_write, transition_events

from tests.unit.operator.plan.makers import T0, seconds


def condition(kind: str, status: str, reason: str, message: str = "words") -> Condition:
    return Condition.model_validate(
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": T0}
    )


def status(**changes: Any) -> PoolStatus:
    instance = InstanceStatus(
        index=0, ready=True, updated=True, verdict="Flowing", message="2 requests",
        queues=(RankQueue(rank=0, name="prefill_bootstrap", reqs=2),),
    )  # fmt: skip
    before = PoolStatus(
        ready="1/1",
        queues="Flowing",
        oldest_waiting_since=T0,
        instances=(instance,),
        conditions=(condition("Ready", "True", "Ready"), condition("QueuesHealthy", "False", "QueuesStuck", "92 s")),
    )
    return before.model_copy(update=changes)


NUMBERS_ONLY: list[dict[str, Any]] = [
    {"instances": (status().instances[0].model_copy(update={"queues": ()}),)},
    {"instances": (status().instances[0].model_copy(update={"message": "3 requests"}),)},
    {"instances": (status().instances[0].model_copy(update={"verdict": "Idle"}),)},
    {"queues": "Idle"},
    {"oldest_waiting_since": T0 + seconds(60)},
    {"oldest_waiting_since": None},
    {"conditions": (status().conditions[0], condition("QueuesHealthy", "False", "QueuesStuck", "93 s"))},
]
NEWS: list[dict[str, Any]] = [
    {"ready": "0/1"},
    {"queues": "Stuck (instance 0)"},
    {"instances": (status().instances[0].model_copy(update={"verdict": "Stuck"}),)},
    {"instances": ()},
    {"conditions": (condition("Ready", "True", "Ready", "other words"), status().conditions[1])},
    {"conditions": (status().conditions[0], condition("QueuesHealthy", "False", "QueuesBlocked", "92 s"))},
    {"observed_generation": 2},
]


@pytest.mark.parametrize("change", NEWS)
def test_news_is_written_at_once(change: dict[str, Any]) -> None:
    assert should_write(status(), status(**change), T0, T0)


@pytest.mark.parametrize("change", NUMBERS_ONLY)
def test_numbers_are_written_at_most_every_half_minute(change: dict[str, Any]) -> None:
    before, after = status(), status(**change)
    assert not should_write(before, after, T0, T0 + REFRESH - seconds(0.001))
    assert should_write(before, after, T0, T0 + REFRESH)
    assert should_write(before, after, None, T0)


def test_what_is_the_same_is_never_written() -> None:
    assert not should_write(status(), status(), None, T0 + seconds(3600))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (None, ("Ready", "True", "Ready"), None),
        (("Ready", "False", "Starting"), ("Ready", "True", "Ready"), EventType.NORMAL),
        (("Ready", "True", "Ready"), ("Ready", "True", "Ready"), None),
        (("Ready", "True", "Ready"), ("Ready", "False", "Updating"), None),
        (("Ready", "True", "Ready"), ("Ready", "False", "CrashLoop"), EventType.WARNING),
        (("Ready", "False", "Starting"), ("Ready", "False", "ImagePullFailed"), EventType.WARNING),
        (("Ready", "False", "ImagePullFailed"), ("Ready", "False", "ImagePullFailed"), None),
        (None, ("Ready", "False", "TemplateInvalid"), EventType.WARNING),
        (None, ("Ready", "False", "NoPods"), None),
        (("QueuesHealthy", "True", "QueuesFlowing"), ("QueuesHealthy", "False", "QueuesStuck"), EventType.WARNING),
        (("QueuesHealthy", "False", "QueuesStuck"), ("QueuesHealthy", "True", "QueuesFlowing"), EventType.NORMAL),
        (("QueuesHealthy", "True", "QueuesFlowing"), ("QueuesHealthy", "True", "QueuesSaturated"), None),
        (("QueuesHealthy", "True", "QueuesFlowing"), ("QueuesHealthy", "Unknown", "QueuesUnknown"), None),
        (None, ("Progressing", "False", "TemplateInvalid"), None),
    ],
)
def test_transitions_that_matter_are_told_once(
    before: tuple[str, str, str] | None, after: tuple[str, str, str], kind: EventType | None
) -> None:
    earlier = [condition(*before)] if before else []
    events = transition_events(earlier, [condition(*after)])
    assert [event.type for event in events] == ([kind] if kind else [])
    for event in events:
        assert event.reason == after[2]
        assert event.message == f"{after[0]}: words"
