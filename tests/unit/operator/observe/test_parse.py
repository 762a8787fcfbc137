"""Objects as the API server returns them, with their missing fields."""

from datetime import UTC, datetime

import pytest
from pdpool_operator.observe import parse
from pdpool_operator.observe.pod_events import MAX_WARNINGS, warnings

META = {"name": "chat-prefill-0-0", "uid": "u1", "creationTimestamp": "2026-01-02T03:04:05Z"}


@pytest.mark.parametrize("text", [None, "", "now", "true", "2026-13-01T00:00:00Z", "0001-01-01T00:00:00+14:00"])
def test_what_is_no_time_is_none(text):
    assert parse.moment(text) is None


def test_a_time_may_have_microseconds_and_any_zone():
    assert parse.moment("2026-01-02T05:04:05.678901+02:00") == datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def test_a_pod_that_was_just_created_has_nothing_to_say_yet():
    pod = parse.observed_pod({"metadata": META, "status": {"phase": "Pending"}})
    assert (pod.ip, pod.ready, pod.terminating, pod.waiting_reason) == (None, False, False, "")
    assert pod.created_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_pod_says_why_it_waits_init_containers_first():
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "restartCount": 2}
    config = {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}, "restartCount": 3}
    status = {"phase": "Pending", "initContainerStatuses": [config], "containerStatuses": [waiting]}
    pod = parse.observed_pod({"metadata": META, "status": status})
    assert (pod.waiting_reason, pod.waiting_message) == ("CreateContainerConfigError", "no secret")


@pytest.mark.parametrize(
    ("terminated", "told"),
    [
        (
            {"exitCode": 1, "reason": "Error", "message": "loading\nthe engine cannot start: no model\n \n"},
            "exit code 1: the engine cannot start: no model",
        ),
        ({"exitCode": 1, "reason": "Error", "message": "x" * 5000}, f"exit code 1: {'x' * 255}…"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "OOMKilled, exit code 137"),
        ({"exitCode": 2, "reason": "Error", "message": "a\x1b[31mb\x00c"}, "exit code 2: a [31mb c"),
        ({}, "exit code unknown"),
        (None, ""),
    ],
)
def test_a_pod_that_keeps_ending_says_how_the_last_run_ended_in_one_bounded_line(terminated, told):
    last = {"lastState": {"terminated": terminated}} if terminated is not None else {}
    engine = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3, **last}
    other = {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 9}}}
    pod = parse.observed_pod({"metadata": META, "status": {"containerStatuses": [other, engine]}})
    assert pod.last_end == told


@pytest.mark.parametrize("state", [{"waiting": {"reason": "CrashLoopBackOff"}}, {"terminated": {"exitCode": 3}}])
@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_a_container_that_keeps_ending_is_told_between_its_waits_and_before_what_waits_for_it(state, kind):
    failing = {"name": "fetch", "state": state, "restartCount": 2}
    engine = {"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"initContainerStatuses": [], "containerStatuses": [engine]}
    status[kind] = [failing, *(one for one in status[kind])]
    pod = parse.observed_pod({"metadata": META, "status": status})
    assert (pod.waiting_container, pod.waiting_reason, pod.keeps_ending) == ("fetch", "CrashLoopBackOff", True)


AT = "2026-11-25T10:{:02}:00Z"
AGAIN = {"exitCode": 1, "startedAt": AT.format(0), "finishedAt": AT.format(3)}


@pytest.mark.parametrize(
    ("change", "keeps_ending"),
    [
        ({}, True),
        ({"ready": True}, False),
        ({"restartCount": 1}, False),
        ({"lastState": {"terminated": {**AGAIN, "exitCode": 0}}}, False),
        ({"lastState": {"terminated": {**AGAIN, "finishedAt": AT.format(10)}}}, False),
        ({"lastState": {"terminated": {"exitCode": 1}}}, False),
        ({"lastState": {}}, False),
    ],
)
def test_container_that_runs_again_after_short_runs_keeps_ending_until_it_is_ready(change, keeps_ending):
    engine = {"name": "engine", "state": {"running": {}}, "restartCount": 2, "lastState": {"terminated": AGAIN}}
    running = {"name": "engine", "state": {"running": {"startedAt": AT.format(4)}}}
    pod = parse.observed_pod({"metadata": META, "status": {"containerStatuses": [engine | running | change]}})
    assert (pod.keeps_ending, pod.waiting_reason) == (keeps_ending, "")


@pytest.mark.parametrize("failing", [{"exitCode": 3, "restarts": 0}, {"exitCode": 0, "restarts": 2}])
def test_one_failure_and_an_end_in_order_are_no_crash_loop(failing):
    ended = {"name": "fetch", "state": {"terminated": {"exitCode": failing["exitCode"]}}}
    pod = parse.observed_pod(
        {"metadata": META, "status": {"initContainerStatuses": [ended | {"restartCount": failing["restarts"]}]}}
    )
    assert (pod.waiting_container, pod.waiting_reason) == ("", "")


def test_a_pod_that_no_node_takes_says_so_only_while_it_is_so():
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    pod = parse.observed_pod({"metadata": META, "status": {"conditions": [condition]}})
    assert pod.unschedulable == "0/3 nodes are available"
    placed = parse.observed_pod({"metadata": META, "status": {"conditions": [condition | {"status": "True"}]}})
    assert placed.unschedulable == ""


@pytest.mark.parametrize("engine", [{"running": {"startedAt": "2026-01-02T03:08:59Z"}}, {"waiting": {}}])
@pytest.mark.parametrize(
    ("status", "changed", "started", "was_ready"),
    [
        ("False", "03:09:00", "03:04:06", True),
        ("Unknown", "03:09:00", "03:04:06", True),
        ("False", "03:04:06", "03:04:06", False),
        ("False", "03:04:05", "03:04:06", False),
        ("False", "03:09:00", None, False),
        ("False", None, "03:04:06", False),
        ("True", "03:09:00", "03:04:06", False),
    ],
)
def test_a_pod_that_is_unready_was_ready_once_if_it_turned_so_after_the_kubelet_took_it_up(
    status, changed, started, was_ready, engine
):
    ready = {"type": "Ready", "status": status} | ({"lastTransitionTime": f"2026-01-02T{changed}Z"} if changed else {})
    said = {"startTime": f"2026-01-02T{started}Z"} if started else {}
    told = {"conditions": [ready], "containerStatuses": [{"restartCount": 3, "state": engine}], **said}
    pod = parse.observed_pod({"metadata": META, "status": told})
    assert pod.was_ready is was_ready


def test_a_pod_on_its_way_out_is_terminating_and_may_still_be_ready():
    meta = META | {"deletionTimestamp": "2026-01-02T03:05:00Z"}
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    pod = parse.observed_pod({"metadata": meta, "status": status})
    assert (pod.ready, pod.terminating, pod.ip) == (True, True, "10.0.0.1")


def test_warnings_come_newest_first_each_once_whoever_wrote_them():
    def event(note: str, **times: object) -> dict:
        return {"type": "Warning", "reason": "FailedMount", "note": note, "metadata": {}, **times}

    events = [
        event("old", deprecatedLastTimestamp="2026-01-01T00:00:00Z"),
        event("newest", eventTime="2026-01-01T00:00:00.000000Z", series={"lastObservedTime": "2026-01-03T00:00:00.5Z"}),
        event("middle", eventTime="2026-01-02T00:00:00.123456Z"),
        event("old", deprecatedLastTimestamp="2026-01-01T00:00:01Z"),
        event("never"),
        {"type": "Normal", "reason": "Pulled", "note": "fine", "metadata": {}},
    ]
    assert warnings(events) == ("newest", "middle", "old", "never")
    assert warnings(events, "FailedCreate") == ()
    assert len(warnings([event(str(i)) for i in range(9)])) == MAX_WARNINGS


def test_a_deployment_is_read_with_its_defaults():
    deployment = parse.observed_deployment({"metadata": {"name": "d", "uid": "u", "generation": 2}, "spec": {}}, {})
    assert (deployment.replicas, deployment.ready_replicas, deployment.failure) == (1, 0, "")
    assert deployment.observed_generation < deployment.generation


def test_a_pod_that_terminates_says_by_when_it_was_to_be_gone() -> None:
    meta = META | {"deletionTimestamp": "2026-11-22T06:01:30Z"}
    pod = parse.observed_pod({"metadata": meta, "spec": {"nodeName": "node-7"}, "status": {"phase": "Running"}})
    assert (pod.terminating, pod.gone_by, pod.node) == (True, parse.moment("2026-11-22T06:01:30Z"), "node-7")
    assert parse.observed_pod({"metadata": META}).gone_by is None
