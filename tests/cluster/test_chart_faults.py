"""Pods and processes are killed. The service recovers, and the routers' lists follow."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from pdpool_connector.protocol import frames
from pdpool_connector.transport.curve import connect_with, make_key

from dev.processes import send
from dev.shell import wait_for
from tests.cluster.stack import ADMIN_PORT, HTTP_PORT, POOLS, Stack, ask, condition, listed, refused_with, service
from tests.cluster.stack_processes import process_of
from tests.cluster.stack_traffic import PROMPTS, Traffic, generate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

PATIENCE_S = 10.0
"""Longest wait of a client, in seconds.

A request that loses one of its two engines may wait at the other, which cannot know of the loss. The router waits for
both, until the client leaves or the engines' own deadline of 300 s is over.
"""


def pod_named(stack: Stack, name: str) -> dict:
    return stack.look("pod", name)


def url_of(pod: dict) -> str:
    return f"http://{pod['status']['podIP']}:{HTTP_PORT}"


def recovered(stack: Stack, traffic: Traffic) -> None:
    """Wait until everything is Ready and listed again, and requests succeed."""
    stack.settle()
    stack.until_listed(1)
    traffic.more()
    wrong = [error for error in traffic.errors if "instead of" in error]
    assert wrong == [], "a request was answered with other tokens"


def free_again(stack: Stack) -> None:
    """Wait until all queues are empty and nothing is held: the operator has proved the end of the killed processes."""
    wait_for("all queues to be empty and nothing held", stack.work_left, deadline_s=60)


def empty_again(stack: Stack) -> None:
    """Wait until all queues are empty.

    Memory stays held if a force-deleted pod may still write to it, because no kubelet reported its end. The hold ends
    with the decode engines, whose drain would wait for it in later tests.
    """
    wait_for("all queues to be empty", stack.queues_left, deadline_s=90)
    if stack.work_left():
        holders = stack.pods("decode")
        for pod in holders:
            stack.kubectl("delete", "pod", pod["metadata"]["name"], "-n", POOLS, "--grace-period=0", "--force")
        succeeded(stack, *holders)
        stack.settle()


def succeeded(stack: Stack, *former: dict) -> None:
    """Wait until other pods have replaced these, and are Ready."""
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in former}

    def missing() -> str | None:
        living = {pod["metadata"]["name"]: pod for pod in stack.pods("prefill", "decode")}
        fresh = {name for name, pod in living.items() if pod["metadata"]["uid"] != uids.get(name)}
        ready = {name for name in fresh if condition(living[name], "Ready").get("status") == "True"}
        return ", ".join(uids.keys() - ready) or None

    wait_for(f"new pods {', '.join(uids)}", missing, deadline_s=60)


@pytest.mark.parametrize("name", ["chat-decode-0-0", "chat-prefill-0-0"])
def test_after_an_engines_process_was_killed_its_list_entry_goes_and_comes_back(serving: Stack, expected, name):
    # Kubelet restarts the container. The operator, which might restart the pod, must see no fault.
    serving.apply(service(router={"replicas": 1}, repair={"mode": "Enforce"}))
    pod = pod_named(serving, name)
    (router,) = serving.pods("router")
    key, url = serving.router_key(), url_of(pod)
    assert url in listed(router["status"]["podIP"], key)
    with Traffic(serving.router_url(), expected, patience_s=PATIENCE_S) as traffic:
        os.kill(process_of(serving, pod), signal.SIGKILL)
        if "decode" in name:
            # The only prefill engine stays listed, because routers check its health themselves.
            wait_for(
                f"{url} to leave the router's list",
                lambda: f"it lists {url}" if url in listed(router["status"]["podIP"], key) else None,
                deadline_s=60,
                interval_s=0.05,
            )

        def restarted() -> str | None:
            (status,) = pod_named(serving, name)["status"]["containerStatuses"]
            return None if status["restartCount"] and status["ready"] else f"{name} is not back: {status['state']}"

        wait_for(f"the container of {name} to be started again", restarted, deadline_s=60)
        recovered(serving, traffic)
    assert pod_named(serving, name)["metadata"]["uid"] == pod["metadata"]["uid"]
    repairs = [serving.look(kind, "chat")["status"].get("repairs", []) for kind in ("ppool", "dpool")]
    assert repairs == [[], []]
    free_again(serving)


@pytest.fixture
def held_for(serving: Stack) -> Iterator[Callable[[], str]]:
    """Make decode engines hold memory for the prefill engine, which is stopped with accepted requests.

    End the process or the pod of that engine, then call the result. It returns the incarnation for which memory is
    held.
    """
    pod = pod_named(serving, "chat-prefill-0-0")
    process = process_of(serving, pod)
    incarnation = state_of(pod)["incarnation"]
    serving.until_listed(1)
    url = serving.router_url()
    wait_for("decode engines to know it", lambda: not_paired(serving, url, incarnation), deadline_s=30)
    handle = os.pidfd_open(process)  # the process number may belong to another process at the end
    send(process, signal.SIGSTOP)
    told: list[str] = []
    clients = [threading.Thread(target=ask_in_vain, args=(url, prompt, told)) for prompt in PROMPTS[:3]]
    for client in clients:
        client.start()

    def not_offered() -> str | None:
        attempts = attempts_at_decode(serving)
        return None if attempts >= len(clients) else f"{attempts} hand-offs are under way, and clients got {told}"

    try:
        wait_for("decode engines to have offered memory", not_offered, deadline_s=30)

        def held() -> str:
            def not_held() -> str | None:
                holds = held_at_decode(serving)
                # An event about the process shows that memory was held. It may have been released between two readings.
                return None if incarnation in holds or told_of(serving, incarnation) else f"held for {holds}"

            wait_for("decode engines to hold memory", not_held, deadline_s=60, interval_s=0.05)
            return incarnation

        yield held
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
        for client in clients:
            client.join(60)


def not_paired(stack: Stack, url: str, incarnation: str) -> str | None:
    """Request an answer. Return which decode engines have not paired with this prefill engine, and so offer it no
    memory.
    """
    generate(url, PROMPTS[0])
    known = {pod["metadata"]["name"]: state_of(pod)["peers"] for pod in stack.pods("decode")}
    names = [name for name, peers in known.items() if incarnation not in {peer["incarnation"] for peer in peers}]
    return ", ".join(names) or None


def ask_in_vain(url: str, prompt: tuple[int, ...], told: list[str]) -> None:
    try:
        told.append(f"tokens {generate(url, prompt, timeout_s=20)}")
    except OSError as error:
        told.append(repr(error))


def state_of(pod: dict) -> dict:
    return ask(f"http://{pod['status']['podIP']}:{ADMIN_PORT}/v1/state", timeout_s=5)


def attempts_at_decode(stack: Stack) -> int:
    return sum(queue["reqs"] for pod in stack.pods("decode") for queue in state_of(pod)["attempts"].values())


def held_at_decode(stack: Stack) -> set[str]:
    return {row["incarnation"] for pod in stack.pods("decode") for row in state_of(pod)["held_for"]}


def told_of(stack: Stack, incarnation: str) -> set[str]:
    """Return the kinds of objects whose events say that this process was fenced."""
    events = stack.look("event")["items"]
    told = [event for event in events if event.get("reason") == "FencedPeer" and incarnation[:8] in event["note"]]
    return {event["regarding"]["kind"] for event in told}


def fenced(stack: Stack, incarnation: str) -> None:
    """Wait until nothing is held and the decode pool's events say why. The event follows the fence."""

    def left() -> str | None:
        return ", ".join(held_at_decode(stack)) or None

    wait_for("nothing to be held", left, deadline_s=60)
    wait_for("an event to say so", lambda: None if told_of(stack, incarnation) else "there is none", deadline_s=30)
    assert told_of(stack, incarnation) == {"DecodePool"}


def test_what_is_held_for_an_engine_whose_process_was_killed_is_freed_when_its_container_has_ended(
    serving: Stack, held_for
):
    pod = pod_named(serving, "chat-prefill-0-0")
    os.kill(process_of(serving, pod), signal.SIGKILL)
    fenced(serving, held_for())
    assert pod_named(serving, "chat-prefill-0-0")["metadata"]["uid"] == pod["metadata"]["uid"]
    serving.settle()


def test_what_is_held_for_an_engine_whose_pod_was_deleted_is_freed_by_what_the_kubelet_said_before_it_went(
    serving: Stack, held_for
):
    serving.kubectl("delete", "pod", "chat-prefill-0-0", "-n", POOLS, "--grace-period=1", "--wait=false")
    fenced(serving, held_for())
    serving.settle()


def test_an_engine_without_the_keys_of_its_namespace_gets_nothing(serving: Stack):
    """The impostor is in the pods' network, knows every address and speaks the protocol, with a key of its own."""
    (prefill,) = serving.pods("prefill")
    for secured in (False, True):
        before = state_of(prefill)["drops"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as impostor:
            impostor.setsockopt(zmq.LINGER, 0)
            if secured:
                connect_with(impostor, make_key())
            impostor.connect(f"tcp://{prefill['status']['podIP']}:8999")
            impostor.send(frames.encode(frames.Goodbye(version=1, sender="0" * 32, reason="lies")))

            def unheard(before: dict = before) -> str | None:
                drops = state_of(prefill)["drops"]
                return None if drops.get("unauthenticated", 0) > before.get("unauthenticated", 0) else str(drops)

            wait_for("the impostor to be turned away", unheard, deadline_s=60)
            assert state_of(prefill)["drops"].get("unpaired", 0) == before.get("unpaired", 0)
            assert impostor.poll(0) == 0
    change = {"incarnation": "0" * 32, "proofs": [{"kind": "process_exited", "pid": 1, "seen_by": "an impostor"}]}
    assert refused_with(f"http://{prefill['status']['podIP']}:{ADMIN_PORT}/v1/fence", change) == 401


@pytest.mark.parametrize("name", ["chat-decode-1-0", "chat-prefill-0-0"])
def test_after_an_engine_pod_was_deleted_at_once_its_successor_takes_its_place(serving: Stack, expected, name):
    pod = pod_named(serving, name)
    with Traffic(serving.router_url(), expected, patience_s=PATIENCE_S) as traffic:
        serving.kubectl("delete", "pod", name, "-n", POOLS, "--grace-period=0", "--force", "--wait=false")
        succeeded(serving, pod)
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
        key, engines = serving.router_key(), serving.engine_urls()

        def lacking() -> str | None:
            # It is Ready with one engine of each side, and still registers others.
            return ", ".join(engines ^ listed(address, key)) or None

        wait_for("the new router to list the engines from its file", lacking, deadline_s=30)
        direct = f"http://{address}:8000"
        assert {prompt: generate(direct, prompt) for prompt in expected} == expected
        url = serving.router_url()
        assert {prompt: generate(url, prompt) for prompt in expected} == expected
        assert time.monotonic() - began < 60
    finally:
        serving.scale_operator(1)
