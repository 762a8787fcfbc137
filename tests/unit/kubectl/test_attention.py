"""A pool with `Ready` False needs attention if its reason needs a person, and not while work is in progress."""

import json

import pytest
from pdpool_operator.api.condition_docs import NEEDS_PERSON, REASONS
from pdpool_operator.api.reasons import Reason

from tests.fake_api import FakeApi

from .conftest import Kubectl, condition, instance, put_pool, put_service

MESSAGE = "chat-decode-1-0: words of Kubernetes"
PASSES = (Reason.NO_PODS, Reason.STARTING, Reason.SCALING_UP, Reason.UPDATING, Reason.DRAINING, Reason.ADOPTING)
SENTENCES = {reason: text for reasons in REASONS.values() for reason, text in reasons.items()}


def put_unready(api: FakeApi, reason: Reason) -> None:
    """The decode pool serves, but `Ready` is False."""
    fine = condition("Available", "True", "Serving"), condition("QueuesHealthy", "True", "QueuesFlowing")
    put_pool(api, "prefill", [instance("prefill", 0, "Idle")], *fine)
    unready = condition("Ready", "False", reason, MESSAGE), condition("Reconciling", "True", reason, MESSAGE)
    put_pool(api, "decode", [instance("decode", 0, "Flowing")], *fine, *unready)
    put_service(api, *fine)


@pytest.mark.parametrize("command", ["status", "explain", "queues"])
@pytest.mark.parametrize("reason", sorted(NEEDS_PERSON))
async def test_reason_that_needs_a_person_exits_one(
    api: FakeApi, kubectl: Kubectl, command: str, reason: Reason
) -> None:
    put_unready(api, reason)
    assert (await kubectl(command)).exit_code == 1


@pytest.mark.parametrize("command", ["status", "explain", "queues"])
@pytest.mark.parametrize("reason", PASSES)
async def test_work_in_progress_exits_zero(api: FakeApi, kubectl: Kubectl, command: str, reason: Reason) -> None:
    put_unready(api, reason)
    assert (await kubectl(command)).exit_code == 0


@pytest.mark.parametrize("reason", sorted(NEEDS_PERSON))
async def test_explain_prints_sentence_and_message(api: FakeApi, kubectl: Kubectl, reason: Reason) -> None:
    put_unready(api, reason)
    result = await kubectl("explain")
    assert result.stdout.startswith("DisaggregatedService/chat: needs attention\n  DecodePool/chat: Ready is False for")
    assert f", reason {reason}.\n    {SENTENCES[reason]}\n    {MESSAGE}\n" in result.stdout


async def test_status_marks_the_condition(api: FakeApi, kubectl: Kubectl) -> None:
    put_unready(api, Reason.CRASH_LOOP)
    assert f"    ! Ready: {MESSAGE}\n" in (await kubectl("status")).stdout


@pytest.mark.parametrize(("reason", "needs"), [(Reason.CRASH_LOOP, True), (Reason.STARTING, False)])
async def test_json_agrees_with_the_exit_code(api: FakeApi, kubectl: Kubectl, reason: Reason, *, needs: bool) -> None:
    put_unready(api, reason)
    assert json.loads((await kubectl("explain", "-o", "json")).stdout)["needsAttention"] is needs
    (service,) = json.loads((await kubectl("status", "-o", "json")).stdout)["services"]
    assert [pool["needsAttention"] for pool in service["pools"]] == [False, needs]
