from typing import Any

import pytest
from pdpool_operator.api.base import Condition
from pdpool_operator.api.pools import InstanceStatus, PoolStatus
from pdpool_operator.plan.model import EventType
from pdpool_operator.status.transition import REFRESH, should_write, transition_events

from tests.unit.operator.plan.makers import T0, seconds


def condition(kind: str, status: str, reason: str, message: str = "words") -> Condition:
    return Condition.model_validate(
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": T0}
    )


def status(**changes: Any) -> PoolStatus:
    instance = InstanceStatus(index=0, ready=True, updated=True, verdict="Flowing", message="requests run")
    before = PoolStatus(
        ready="1/1",
        queues="Flowing",
        oldest_waiting_since=T0,
        instances=(instance,),
        conditions=(condition("Ready", "True", "Ready"), condition("QueuesHealthy", "False", "QueuesStuck")),
    )
    return before.model_copy(update=changes)


NUMBERS_ONLY: list[dict[str, Any]] = [
    {"instances": (status().instances[0].model_copy(update={"message": "requests wait for memory"}),)},
    {"instances": (status().instances[0].model_copy(update={"verdict": "Idle"}),)},
    {"queues": "Idle"},
    {"oldest_waiting_since": T0 + seconds(60)},
    {"oldest_waiting_since": None},
]
NEWS: list[dict[str, Any]] = [
    {"ready": "0/1"},
    {"queues": "Stuck (instance 0)"},
    {"instances": (status().instances[0].model_copy(update={"verdict": "Stuck"}),)},
    {"instances": ()},
    {"conditions": (condition("Ready", "True", "Ready", "other words"), status().conditions[1])},
    {"conditions": (status().conditions[0], condition("QueuesHealthy", "False", "QueuesBlocked"))},
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
        (("QueuesHealthy", "Unknown", "NotJudged"), ("QueuesHealthy", "True", "QueuesFlowing"), None),
        (("QueuesHealthy", "False", "QueuesStuck"), ("QueuesHealthy", "Unknown", "NotJudged"), None),
        (("Available", "True", "Serving"), ("Available", "False", "Updating"), EventType.WARNING),
        (("Available", "True", "Serving"), ("Available", "False", "ScaledToZero"), None),
        (("Available", "False", "Starting"), ("Available", "True", "Serving"), EventType.NORMAL),
        (None, ("Available", "False", "NoPods"), None),
        (None, ("Stalled", "True", "TemplateInvalid"), None),
        (None, ("RepairStopped", "True", "ManyAtFault"), EventType.WARNING),
        (None, ("PeersUnreachable", "True", "PeerSilent"), EventType.WARNING),
        (("PeersUnreachable", "True", "PeerSilent"), ("PeersUnreachable", "True", "PeerSilent"), None),
        (("RepairStopped", "True", "ManyAtFault"), ("RepairStopped", "True", "RestartDidNotHelp"), EventType.WARNING),
        (("RepairStopped", "True", "ManyAtFault"), ("RepairStopped", "True", "ManyAtFault"), None),
        (("Reconciling", "True", "Starting"), ("Reconciling", "True", "Updating"), None),
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
        assert event.message == "words"


def test_one_cause_in_two_conditions_is_one_event() -> None:
    broken = [condition(kind, "False", "CrashLoop") for kind in ("Available", "Ready")]
    assert [event.reason for event in transition_events([], broken)] == ["CrashLoop"]


def test_conditions_of_other_writers_are_not_compared() -> None:
    before = status(conditions=(*status().conditions, condition("Audited", "True", "Checked")))
    assert not should_write(before, status(), None, T0 + seconds(3600))


def test_network_words_alone_are_written_rarely() -> None:
    before = status(conditions=(condition("Ready", "False", "ApiFailing", "port 4711"),))
    after = status(conditions=(condition("Ready", "False", "ApiFailing", "port 4712"),))
    assert not should_write(before, after, T0, T0 + seconds(1))
    assert should_write(before, after, T0, T0 + REFRESH)
