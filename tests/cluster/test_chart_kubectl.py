"""`kubectl pdpool` against a real release: a frozen decode engine is named as the side at fault."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dev.paths import CHECKOUT
from dev.shell import wait_for
from tests.cluster.stack import DRAIN_S, HTTP_PORT, POOL_KINDS, POOLS, SYSTEM, Stack, ask, pool, service
from tests.cluster.stack_traffic import PROMPTS, generate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]
OPERATOR = ("--operator-namespace", SYSTEM)


def pdpool(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as kubectl runs it."""
    command = (sys.executable, "-m", "pdpool_kubectl", *words, "-n", POOLS)
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT / "operator")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.fixture
def frozen(stack: Stack) -> Iterator[Stack]:
    """A service whose only decode engine's scheduler is frozen while a request waits."""
    template = {"spec": {"containers": [{"name": "engine", "args": ["--enable-faults"]}]}}
    pools = [pool(kind, 1, drainTimeoutSeconds=DRAIN_S, template=template) for kind in POOL_KINDS]
    stack.apply(*pools, service(stuckAfterSeconds=5, router={"replicas": 1}))
    stack.settle()
    stack.until_listed(1)
    (decode,) = stack.pods("decode")
    faults, url = f"http://{decode['status']['podIP']}:{HTTP_PORT}/faults", stack.router_url()
    ask(faults, {"freeze_scheduler": True})

    def wait_for_tokens() -> None:
        with contextlib.suppress(OSError):
            generate(url, PROMPTS[0], timeout_s=60)

    client = threading.Thread(target=wait_for_tokens)
    client.start()
    try:
        yield stack
    finally:
        ask(faults, {"freeze_scheduler": False})
        client.join(70)
        stack.serve()


def test_explain_names_the_frozen_engine(frozen: Stack) -> None:
    def not_named() -> str | None:
        text = pdpool("explain", "chat").stdout
        return None if "=> DecodePool/chat instance 0 is at fault (Stuck)." in text else text

    wait_for("explain to name the decode engine", not_named, deadline_s=60, interval_s=1)

    def nothing_waits() -> str | None:
        queues = json.loads(pdpool("queues", "chat", "-o", "json", *OPERATOR).stdout)
        live = queues["live"] and any(queue["reqs"] for one in queues["instances"] for queue in one["queues"])
        return None if live else str(queues)

    wait_for("a request to wait", nothing_waits, deadline_s=20, interval_s=1)
    doctor = json.loads(pdpool("doctor", "-o", "json", *OPERATOR).stdout)
    assert [check for check in doctor["checks"] if check["outcome"] != "ok"] == []


def test_restart_of_an_instance_that_does_not_exist_fails_and_names_those_that_do(serving: Stack) -> None:
    try:
        result = pdpool("restart", "chat-decode-9")
    finally:
        serving.kubectl("delete", "pooloperations", "--all", "-n", POOLS)
    assert result.returncode == 1
    assert "DecodePool chat has no instance chat-decode-9; it has chat-decode-0" in result.stdout


def test_fence_of_a_node_in_service_is_refused(serving: Stack) -> None:
    node = serving.pods("decode")[0]["spec"]["nodeName"]
    try:
        result = pdpool("fence", node, "--yes")
    finally:
        serving.kubectl("delete", "pooloperations", "--all", "-n", POOLS)
    assert result.returncode == 1
    assert f"Failed: The kubelet of the Node {node} reports (Ready is True)" in result.stdout


def test_plan_shows_what_a_file_would_do_and_does_none_of_it(serving: Stack, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"

    def planned(replicas: int = 2, **spec: Any) -> dict[str, Any]:
        file.write_text(json.dumps(pool("DecodePool", replicas, **{"drainTimeoutSeconds": DRAIN_S} | spec)))
        (one,) = json.loads(pdpool("plan", "-f", str(file), "-o", "json").stdout)["objects"]
        return dict(one)

    def steps(one: dict[str, Any]) -> list[tuple[str, str]]:
        return [(step["name"], step["action"]) for step in one["steps"]]

    before = serving.get("dpool", "chat")["metadata"]["generation"], serving.uids()
    assert (steps(planned()), planned()["notes"]) == ([], [])
    restarts = [("chat-decode-1", "restart"), ("chat-decode-0", "restart")]
    assert steps(planned(drainTimeoutSeconds=DRAIN_S + 1)) == restarts
    assert steps(planned(replicas=3)) == [("chat-decode-2", "add")]
    assert "spec.replicas" in planned(replicas=-1)["refusals"][0]
    assert 'unknown field "spec.replica"' in planned(replica=1)["refusals"][0]
    after = serving.get("dpool", "chat")["metadata"]["generation"], serving.uids()
    assert after == before
