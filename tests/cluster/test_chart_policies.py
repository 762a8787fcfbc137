"""NetworkPolicies of pools and routers follow the chart's setting, and no pod restarts for them."""

import os

import pytest

from dev.shell import wait_for
from tests.cluster.stack import POOLS, Stack

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

WANTED = {"chat-prefill", "chat-decode", "chat-router"}


def policies(stack: Stack) -> set[str]:
    return {policy["metadata"]["name"] for policy in stack.get("networkpolicies", within=POOLS)["items"]}


def until(stack: Stack, wanted: set[str]) -> None:
    def unmet() -> str | None:
        found = policies(stack)
        return None if found == wanted else f"{sorted(found)} beside {sorted(wanted)}"

    wait_for("the NetworkPolicies of pools and routers to follow the setting", unmet, deadline_s=90)


def test_policies_are_deleted_and_created_with_the_setting(serving: Stack):
    until(serving, WANTED)
    before = serving.uids()
    try:
        serving.install(networkPolicy={"enabled": False})
        until(serving, set())
    finally:
        serving.install()
    until(serving, WANTED)
    assert serving.uids() == before


def test_deleted_policy_is_created_again(serving: Stack):
    until(serving, WANTED)
    serving.kubectl("delete", "networkpolicy", "chat-decode", "-n", POOLS)
    until(serving, WANTED)
