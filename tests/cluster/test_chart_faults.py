"""Pods and processes are killed; the service recovers, and the routers' lists follow."""

import os
import signal
import time

import pytest

from dev.shell import wait_for
from tests.cluster.stack import HTTP_PORT, POOLS, Stack, condition, listed
from tests.cluster.stack_traffic import Traffic, generate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

PATIENCE_S = 10.0
"""A request that loses one of its two engines at once may wait at the other, which cannot know, and the router waits
for both: until the client leaves, or the engines' own deadline of 300 s is over."""


def pod_named(stack: Stack, name: str) -> dict:
    return stack.get("pod", name)


def process_of(stack: Stack, pod: dict) -> int:
    """PID on this machine of the container's first process."""
    (status,) = pod["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    tasks = [line.split() for line in stack.ctr(pod["spec"]["nodeName"], "tasks", "ls").splitlines()]
    return next(int(pid) for task, pid, _ in tasks[1:] if task == container)


def url_of(pod: dict) -> str:
    return f"http://{pod['status']['podIP']}:{HTTP_PORT}"


def recovered(stack: Stack, traffic: Traffic) -> None:
    """Everything is Ready and listed again, and requests succeed."""
    stack.settle()
    stack.until_listed(1)
    traffic.more()
    wrong = [error for error in traffic.errors if "instead of" in error]
    assert wrong == [], "a request was answered with other tokens"


def empty_again(stack: Stack) -> None:
    """All queues are empty. What a killed prefill may still write to stays held, for nobody vouches for its death; that
    ends with the decode engines, whose drain would wait for it in later tests.
    """
    wait_for("all queues to be empty", stack.queues_left, deadline_s=45)
    if stack.work_left():
        for pod in stack.pods("decode"):
            stack.kubectl("delete", "pod", pod["metadata"]["name"], "-n", POOLS, "--grace-period=0", "--force")
        stack.settle()


@pytest.mark.parametrize("name", ["chat-decode-0-0", "chat-prefill-0-0"])
def test_after_an_engines_process_was_killed_its_list_entry_goes_and_comes_back(serving: Stack, expected, name):
    pod = pod_named(serving, name)
    (router,) = serving.pods("router")
    key, url = serving.router_key(), url_of(pod)
    assert url in listed(router["status"]["podIP"], key)
    with Traffic(serving.router_url(), expected, patience_s=PATIENCE_S) as traffic:
        os.kill(process_of(serving, pod), signal.SIGKILL)
        if "decode" in name:
            # The only prefill engine stays listed: routers judge its health themselves.
            wait_for(
                f"{url} to leave the router's list",
                lambda: f"it lists {url}" if url in listed(router["status"]["podIP"], key) else None,
                deadline_s=20,
                interval_s=0.05,
            )

        def restarted() -> str | None:
            (status,) = pod_named(serving, name)["status"]["containerStatuses"]
            return None if status["restartCount"] and status["ready"] else f"{name} is not back: {status['state']}"

        wait_for(f"the container of {name} to be started again", restarted, deadline_s=60)
        recovered(serving, traffic)
    assert pod_named(serving, name)["metadata"]["uid"] == pod["metadata"]["uid"]
    empty_again(serving)


@pytest.mark.parametrize("name", ["chat-decode-1-0", "chat-prefill-0-0"])
def test_after_an_engine_pod_was_deleted_at_once_its_successor_takes_its_place(serving: Stack, expected, name):
    pod = pod_named(serving, name)
    with Traffic(serving.router_url(), expected, patience_s=PATIENCE_S) as traffic:
        serving.kubectl("delete", "pod", name, "-n", POOLS, "--grace-period=0", "--force", "--wait=false")

        def succeeded() -> str | None:
            living = [one for one in serving.pods("prefill", "decode") if one["metadata"]["name"] == name]
            fresh = [one for one in living if one["metadata"]["uid"] != pod["metadata"]["uid"]]
            return None if fresh and condition(fresh[0], "Ready").get("status") == "True" else f"{name} is not back"

        wait_for(f"a new pod {name}", succeeded, deadline_s=60)
        recovered(serving, traffic)
    empty_again(serving)


def test_a_router_that_starts_while_the_operator_is_away_serves_at_once(serving: Stack, expected):
    (old,) = serving.pods("router")
    serving.until_listed(1)
    serving.scale_operator(0)
    try:
        serving.kubectl("delete", "pod", old["metadata"]["name"], "-n", POOLS, "--wait=false")
        new: list[dict] = []

        def ready() -> str | None:
            new[:] = [pod for pod in serving.pods("router") if condition(pod, "Ready").get("status") == "True"]
            new[:] = [pod for pod in new if pod["metadata"]["uid"] != old["metadata"]["uid"]]
            return None if new else "the new router is not Ready"

        wait_for("the new router", ready, deadline_s=60)
        began = time.monotonic()
        address = new[0]["status"]["podIP"]
        assert listed(address, serving.router_key()) == serving.engine_urls()
        direct = f"http://{address}:8000"
        assert {prompt: generate(direct, prompt) for prompt in expected} == expected
        url = serving.router_url()
        assert {prompt: generate(url, prompt) for prompt in expected} == expected
        assert time.monotonic() - began < 15
    finally:
        serving.scale_operator(1)
