"""`status`, `explain` and `queues` against a fake API server: texts, JSON, exit codes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdpool_kubectl.fleet import Fleet, PoolView
from pdpool_kubectl.queues import Place, Queue, Reading, queue_lines
from pdpool_operator.api.names import API_VERSION, Role
from pdpool_operator.api.pools import PoolStatus
from pdpool_operator.runtime.resources import PODS, PREFILL_POOLS, SERVICES_PD, Resource

from tests.fake_api import Call, FakeApi

from .conftest import Kubectl, condition, instance, put_pool, put_service, put_stuck, put_watched, put_well

METRICS = """\
# TYPE pdpool_leader gauge
pdpool_leader 1.0
# TYPE pdpool_queue_reqs gauge
pdpool_queue_reqs{instance="0",namespace="llm",pool="chat",queue="bootstrap",rank="0",role="prefill"} 14.0
# TYPE pdpool_queue_oldest_seconds gauge
pdpool_queue_oldest_seconds{instance="0",namespace="llm",pool="chat",queue="bootstrap",rank="0",role="prefill"} 92.4
# TYPE pdpool_queue_moved counter
pdpool_queue_moved_total{instance="0",namespace="llm",pool="chat",queue="bootstrap",rank="0",role="prefill"} 7.0
# TYPE pdpool_queue_reqs gauge
pdpool_queue_reqs{instance="d-1",namespace="llm",pool="service/watched",queue="prealloc",rank="0",role="decode"} 4
"""
OPERATOR = {"labels": {"app.kubernetes.io/name": "pdpool", "app.kubernetes.io/component": "operator"}}

STATUS = """\
DisaggregatedService llm/chat: 1/1 prefill, 2/2 decode, 1 router, http://chat-router.llm:8000
  CONDITION   STATUS   REASON    SINCE
  Available   True     Serving   AGE
  PrefillPool chat: 1/1 ready, queues Blocked
    CONDITION       STATUS   REASON          SINCE
    Available       True     Serving         AGE
    QueuesHealthy   False    QueuesBlocked   AGE
    ! QueuesHealthy: chat-prefill-0: 14 requests wait 92 s for bootstrap; chat-decode-1 has not polled for 88 s
    INSTANCE         READY   UPDATED   VERDICT   POD
    chat-prefill-0   yes     yes       Blocked   chat-prefill-0-0
  DecodePool chat: 2/2 ready, queues Stuck
    CONDITION       STATUS   REASON        SINCE
    Available       True     Serving       AGE
    QueuesHealthy   False    QueuesStuck   AGE
    ! QueuesHealthy: chat-decode-1: its scheduler loop has not run for 88 s
    INSTANCE        READY   UPDATED   VERDICT   POD
    chat-decode-0   yes     yes       Flowing   chat-decode-0-0
    chat-decode-1   yes     yes       Stuck     chat-decode-1-0
"""

EXPLAIN = """\
DisaggregatedService/chat: needs attention
  PrefillPool/chat: QueuesHealthy is False for AGE, reason QueuesBlocked.
    An instance waits for the other side.
    chat-prefill-0: 14 requests wait 92 s for bootstrap; chat-decode-1 has not polled for 88 s
  DecodePool/chat: QueuesHealthy is False for AGE, reason QueuesStuck.
    Nothing moves at an instance, and it is itself at fault.
    chat-decode-1: its scheduler loop has not run for 88 s
=> DecodePool/chat instance 1 is at fault (Stuck).
next:
  kubectl logs -n llm chat-decode-1-0 -c engine --tail=100
  kubectl pdpool queues chat -n llm
  kubectl get events -n llm --sort-by=.lastTimestamp
"""

QUEUES = """\
NAMESPACE   INSTANCE         RANK   QUEUE       WAITING   OLDEST   MOVED/S   VERDICT
llm         chat-prefill-0   0      bootstrap   14        92s      -         Blocked
llm         chat-decode-0    -      -           ?         ?        ?         Flowing
llm         chat-decode-1    -      -           ?         ?        ?         Stuck
"""


WATCHED = """\
DisaggregatedService llm/watched: 1/1 prefill, 1/1 decode
  CONDITION       STATUS   REASON        SINCE
  QueuesHealthy   False    QueuesStuck   AGE
  ! QueuesHealthy: decode d-1 rank 0: requests wait for memory or the handshake and nothing moves
  POD   ROLE      READY   VERDICT
  p-1   prefill   yes     Blocked
  d-1   decode    yes     Stuck
  ! p-1 is Blocked: prefill p-1 rank 0: requests wait for bootstrap and nothing moves; d-1 also has overdue requests
"""

WATCHED_QUEUES = """\
NAMESPACE   INSTANCE   RANK   QUEUE      WAITING   OLDEST   MOVED/S   VERDICT
llm         p-1        -      -          ?         ?        ?         Blocked
llm         d-1        0      prealloc   4         -        -         Stuck
"""


def steady(text: str) -> str:
    """Replace ages, and leave out the path of the kubeconfig."""
    text = re.sub(r" --kubeconfig \S+", "", text)
    return re.sub(r"(?m)(\s|for )(\d+d)(?=$|,)", r"\1AGE", text)


def serve_metrics(api: FakeApi, status: int = 200, text: str = METRICS) -> None:
    api.put(PODS, "pdpool-system", "pdpool-operator-x", {"metadata": OPERATOR})

    async def proxy(_: web.Request, call: Call) -> web.StreamResponse | None:
        if not call.path.endswith("/pods/pdpool-operator-x:8080/proxy/metrics"):
            return None
        if status != 200:
            return web.json_response({"reason": "Forbidden", "message": "pods/proxy is forbidden"}, status=status)
        return web.Response(text=text)

    api.fault = proxy


async def test_stuck_decode_shows_in_status(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    result = await kubectl("status", "chat")
    assert result.exit_code == 1
    assert steady(result.stdout) == STATUS


async def test_watched_pods_show_in_status_queues_and_explain(api: FakeApi, kubectl: Kubectl) -> None:
    put_watched(api)
    serve_metrics(api)
    assert steady((await kubectl("status")).stdout) == WATCHED
    assert (await kubectl("queues")).stdout == WATCHED_QUEUES
    listed = json.loads((await kubectl("queues", "-o", "json")).stdout)["instances"]
    assert [(one["instance"], len(one["queues"])) for one in listed] == [("p-1", 0), ("d-1", 1)]
    told = steady((await kubectl("explain")).stdout)
    assert "=> decode pod d-1 is at fault (Stuck).\nnext:\n  kubectl logs -n llm d-1 --tail=100\n" in told


async def test_explain_names_the_side_at_fault(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    result = await kubectl("explain")
    assert result.exit_code == 1
    assert steady(result.stdout) == EXPLAIN


async def test_paused_engine_is_neither_silent_nor_at_fault(api: FakeApi, kubectl: Kubectl) -> None:
    paused = "decode chat-decode-0 rank 0: its engine is paused on request"
    waits = "prefill chat-prefill-0 rank 0: requests wait for bootstrap; chat-decode-0 engine is paused on request"
    blocked = condition("QueuesHealthy", "False", "QueuesBlocked", waits)
    unknown = condition("QueuesHealthy", "Unknown", "QueuesUnknown", paused)
    put_pool(api, "prefill", [instance("prefill", 0, "Blocked", waits)], blocked)
    put_pool(api, "decode", [instance("decode", 0, "Unknown", paused)], unknown)
    put_service(api, blocked)
    told = (await kubectl("explain")).stdout
    assert f"    An instance waits for the other side.\n    {waits}\n" in told
    assert f"    An instance cannot be judged.\n    {paused}\n" in told
    assert "at fault" not in told
    assert "does not answer" not in told


async def test_healthy_service_exits_zero(api: FakeApi, kubectl: Kubectl) -> None:
    put_well(api)
    result = await kubectl("explain")
    assert result.exit_code == 0
    assert "nothing to explain" in result.stdout
    assert (await kubectl("status")).exit_code == 0


async def test_status_as_json_holds_pools_of_services(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    service = json.loads((await kubectl("status", "-o", "json")).stdout)["services"][0]
    assert [pool["kind"] for pool in service["pools"]] == ["PrefillPool", "DecodePool"]
    assert service["pools"][1]["status"]["instances"][1]["verdict"] == "Stuck"
    assert [service["needsAttention"], service["pools"][1]["needsAttention"]] == [False, True]


async def test_unbound_pool_shows_alone(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    api.remove(next(r for r in api.objects if r.plural == "disaggregatedservices"), "llm", "chat")
    assert (await kubectl("status")).stdout.startswith("PrefillPool llm/chat: 1/1 ready")


async def test_queues_show_live_lengths(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    serve_metrics(api)
    result = await kubectl("queues")
    assert (result.exit_code, result.stdout, result.stderr) == (1, QUEUES, "")


async def test_refused_proxy_leaves_verdicts(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    serve_metrics(api, status=403)
    result = await kubectl("queues", "-o", "json")
    told = json.loads(result.stdout)
    assert told["live"] is False
    assert "pods/proxy is forbidden" in told["error"]
    assert [i["verdict"] for i in told["instances"]] == ["Blocked", "Flowing", "Stuck"]
    assert "no live lengths" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("status", "other"), 3, "no service or pool is named other; there is chat"),
        (("status", "--context", "prod"), 3, "--context prod: the kubeconfig has no such context, but fake"),
        (("status", "-n", "llm", "-A"), 2, "-n and -A exclude each other"),
        (("status", "-o", "xml"), 2, "'xml' is not one of 'text', 'json'"),
    ],
)
async def test_wrong_arguments_are_named(
    api: FakeApi, kubectl: Kubectl, words: tuple[str, ...], code: int, message: str
) -> None:
    put_well(api)
    result = await kubectl(*words)
    assert result.exit_code == code
    assert message in result.stderr


async def test_missing_kinds_ask_for_the_chart(api: FakeApi, kubectl: Kubectl) -> None:
    async def unknown(*_: object) -> web.StreamResponse:
        return web.json_response({"reason": "NotFound", "message": "no such page"}, status=404)

    api.fault = unknown
    result = await kubectl("status")
    assert result.exit_code == 3
    assert "install the chart first" in result.stderr


async def test_metrics_that_are_no_numbers_leave_verdicts(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    serve_metrics(api, text=METRICS.replace(" 14.0", " NaN"))
    result = await kubectl("queues", "-o", "json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["live"]) == (1, False)
    assert [i["verdict"] for i in told["instances"]] == ["Blocked", "Flowing", "Stuck"]


def test_each_queue_is_looked_at_once() -> None:
    """A fleet of 256 instances has thousands of queues."""
    looked_at: list[Place] = []

    class Queues(dict[Place, Queue]):
        def items(self) -> Any:
            looked_at.extend(self)
            return super().items()

    status = PoolStatus.model_validate({"instances": [instance("decode", index, "Idle") for index in range(256)]})
    pool = PoolView("DecodePool", Role.DECODE, "llm", "chat", 1, 256, status)
    places = [("llm", "chat", "decode", str(n), str(rank), "decode_prealloc") for n in range(256) for rank in range(12)]
    reading = Reading(Queues(dict.fromkeys(places, Queue(0, None, 1))))
    lines = list(queue_lines(Fleet((), (pool,)), reading))
    assert len(lines) == 1 + len(places) == 1 + len(looked_at)
    assert [line.split()[2] for line in lines[1:13]] == [str(rank) for rank in range(12)]


@pytest.mark.parametrize("resource", [PREFILL_POOLS, SERVICES_PD])
async def test_object_without_a_status_needs_attention(api: FakeApi, kubectl: Kubectl, resource: Resource) -> None:
    """No operator runs, or it has not come to the object yet."""
    put_well(api)
    del api.objects[resource]["llm", "chat"]["status"]
    for command in ("status", "explain", "queues"):
        result = await kubectl(command)
        assert (result.exit_code, command) == (1, command)
    told = json.loads((await kubectl("explain", "-o", "json")).stdout)
    assert told["needsAttention"] is True
    assert "the operator has not written a status" in "".join(told["lines"])


async def test_empty_namespace_is_named(kubectl: Kubectl) -> None:
    for command in ("status", "explain"):
        assert (await kubectl(command, "-n", "lmm")).stdout == "no services or pools in the namespace lmm\n"
        assert (await kubectl(command, "-A")).stdout == "no services or pools in any namespace\n"


@pytest.mark.parametrize(
    "words", [("drain", "chat-decode-0"), ("record", "FILE"), ("plan", "-f", "FILE"), ("status",), ("queues",)]
)
async def test_missing_kinds_are_explained_by_every_command(
    api: FakeApi, kubectl: Kubectl, tmp_path: Path, words: tuple[str, ...]
) -> None:
    async def unknown(*_: object) -> web.StreamResponse:
        return web.json_response({"reason": "NotFound", "message": "404 page not found"}, status=404)

    api.fault = unknown
    file = tmp_path / "file"
    file.write_text(json.dumps({"apiVersion": API_VERSION, "kind": "DecodePool", "metadata": {"name": "chat"}}))
    result = await kubectl(*(str(file) if word == "FILE" else word for word in words))
    assert result.exit_code == 3
    assert "install the chart" in result.stderr


async def test_api_server_that_is_away_is_exit_code_3_of_doctor(api: FakeApi, kubectl: Kubectl) -> None:
    async def away(*_: object) -> web.StreamResponse:
        return web.json_response({"message": "is away"}, status=503)

    api.fault = away
    result = await kubectl("doctor")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "is away" in result.stderr


async def test_watch_goes_on_while_the_api_server_is_away(api: FakeApi, kubectl: Kubectl) -> None:
    put_stuck(api)
    looks = 0

    async def away_once(_: web.Request, call: Call) -> web.StreamResponse | None:
        nonlocal looks
        looks += call.plural == PREFILL_POOLS.plural
        if looks == 2:
            return web.json_response({"message": "is away"}, status=503)
        if looks > 3:  # ends the watch
            return web.json_response({"message": "you may not"}, status=403)
        return None

    api.fault = away_once
    result = await kubectl("queues", "--watch", "--interval", "0.5")
    assert result.exit_code == 3
    assert [result.stdout.count("chat-decode-1"), result.stderr.count("is away")] == [2, 1]
    assert "you may not" in result.stderr
