"""Two routers, and engines that start and end under traffic. No request fails."""

import os
import secrets
from types import TracebackType
from typing import Self

import pytest

from dev.shell import wait_for
from proof.cluster.watch import Watch
from tests.cluster.stack import HTTP_PORT, MADE, POOLS, Object, Stack, condition, listed
from tests.cluster.stack_traffic import Traffic

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

LOOK_S = 0.1


class Witness:
    """Watches engines and router lists while the block runs, and records violations."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._key = stack.router_key()
        self._watch = Watch("witness", [self._look], LOOK_S)
        self.looks = 0
        self.listed_while_leaving: set[str] = set()
        """Pods that terminated while a router still listed them."""
        self.most_away: dict[str, int] = {"prefill": 0, "decode": 0}
        """Largest number of engines of a role that were not Ready, or terminated, at the same time."""

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def _look(self) -> None:
        # Pods are read first: a pod that terminates then must already be out of the lists.
        pods = self._stack.look("pod", labels=MADE)["items"]
        lists = [
            listed(pod["status"]["podIP"], self._key)
            for pod in pods
            if pod["metadata"]["labels"]["pdpool.dev/role"] == "router" and serves(pod)
        ]
        self.looks += 1
        for role, most in self.most_away.items():
            engines = [pod for pod in pods if pod["metadata"]["labels"]["pdpool.dev/role"] == role]
            self.most_away[role] = max(most, sum(not serves(pod) for pod in engines))
            for pod in engines:
                url = f"http://{pod['status'].get('podIP')}:{HTTP_PORT}"
                if "deletionTimestamp" in pod["metadata"] and any(url in urls for urls in lists):
                    self.listed_while_leaving.add(pod["metadata"]["name"])


def serves(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and condition(pod, "Ready").get("status") == "True"


def test_a_decode_engine_that_is_scaled_away_leaves_both_routers_before_it_ends(stack: Stack, expected):
    stack.serve(prefill=2, decode=2, routers=2)
    stack.until_listed(2)
    leaving = stack.look("pod", "chat-decode-1-0")
    url = f"http://{leaving['status']['podIP']}:{HTTP_PORT}"
    with Traffic(stack.router_url(), expected) as traffic, Witness(stack) as witness:
        stack.kubectl("scale", "dpool/chat", "-n", POOLS, "--replicas=1")

        def gone() -> str | None:
            labels = "pdpool.dev/instance=1,pdpool.dev/role=decode"
            found = [one for kind in ("statefulset", "pod") for one in stack.look(kind, labels=labels)["items"]]
            return "chat-decode-1 is there" if found else None

        wait_for("decode instance 1 to be gone", gone, deadline_s=90)
        stack.until_listed(2)
        traffic.more()
    assert traffic.errors == []
    assert witness.listed_while_leaving == set()
    assert witness.looks > 5
    assert not any(url in urls for urls in stack.lists(stack.router_key()).values())


def test_a_new_spec_replaces_one_engine_of_a_pool_at_a_time_and_fails_no_request(stack: Stack, expected):
    stack.serve(prefill=2, decode=2, routers=2)
    stack.until_listed(2)
    before = stack.uids()
    mark = secrets.token_hex(4)
    with Traffic(stack.router_url(), expected) as traffic, Witness(stack) as witness:
        for kind in ("ppool", "dpool"):
            stack.patch(kind, {"template": {"metadata": {"annotations": {"example.com/mark": mark}}}})
        stack.settle(deadline_s=180)
        traffic.more()
    assert traffic.errors == []
    assert witness.listed_while_leaving == set()
    assert witness.looks > 5
    assert witness.most_away == {"prefill": 1, "decode": 1}
    after = stack.uids()
    assert {name for name in before if after.get(name) == before[name]} == {name for name in before if "router" in name}
    assert {pod["metadata"]["annotations"]["example.com/mark"] for pod in stack.pods("prefill", "decode")} == {mark}
    stack.until_listed(2)
    wait_for("all queues to be empty and nothing held", stack.work_left, deadline_s=90)


def test_a_router_less_fails_no_request(stack: Stack, expected):
    stack.serve(prefill=1, decode=2, routers=2)
    with Traffic(stack.router_url(), expected) as traffic:
        stack.patch("pdsvc", {"router": {"replicas": 1}})
        labels = f"{MADE},pdpool.dev/role=router"

        def one() -> str | None:
            found = [pod["metadata"]["name"] for pod in stack.look("pod", labels=labels)["items"]]
            return None if len(found) == 1 else f"{found}"

        wait_for("one router to be gone", one, deadline_s=60)
        traffic.more()
    assert traffic.errors == []


def test_a_router_that_is_turned_off_goes_with_all_that_was_made_for_it_and_comes_back(serving: Stack, expected):
    serving.patch("pdsvc", {"router": {"enabled": False}})
    kinds = "deployments,services,poddisruptionbudgets,networkpolicies,configmaps,secrets"

    def gone() -> str | None:
        found = serving.kubectl("get", kinds, "-n", POOLS, "-l", "pdpool.dev/role=router", "-o", "name")
        return found.strip() or None

    wait_for("the router's objects to be gone", gone, deadline_s=60)
    serving.until("pdsvc", "Ready", status="True")
    serving.patch("pdsvc", {"router": {"enabled": True}})
    serving.settle()
    serving.until_listed(1)
    with Traffic(serving.router_url(), expected) as traffic:
        traffic.more()
    assert traffic.errors == []
