"""What `record` asks an engine pod, and the samples that `replay` makes of the answers."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from pdpool_kubectl.questions import ERROR_LETTERS, Questions
from pdpool_kubectl.recorded_samples import RecordedSamples
from pdpool_kubectl.recording import Answers, Look
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import Role
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.observe.targets import Target
from pdpool_operator.runtime.api import Api

from tests.fake_api import Call, FakeApi

from .conftest import SINCE

OURS = Target("llm", "chat", Role.DECODE, 0, "u", "10.0.0.1")
STOCK = Target("llm", "service/x", Role.DECODE, 0, "u", "10.0.0.1", EngineType.SGLANG, has_connector=False)
STATE: dict[str, Any] = {"incarnation": "a", "queues": {"bootstrap": {"reqs": 0}}}
ONE_LOAD: dict[str, Any] = {"loads": [{"dp_rank": 0}]}
TWO_LOADS: dict[str, Any] = {"loads": [{"dp_rank": 0}, {"dp_rank": 1}]}
SILENT = {"error": "no answer within 3 s"}


@pytest.fixture
async def questions(api: FakeApi) -> AsyncIterator[Questions]:
    async with ApiClient(Configuration(host=api.url)) as client:
        yield Questions(Api(client), "llm")


def answering(api: FakeApi, bodies: Mapping[str, Any], status: int = 200) -> None:
    """Have the pod answer with these bodies, by a part of the URL. It refuses other requests."""

    async def fault(_: web.Request, call: Call) -> web.StreamResponse | None:
        body = next((body for part, body in bodies.items() if part in call.path), None)
        return web.json_response(body, status=503 if body is None else status)

    api.fault = fault


def answers(*connectors: Any, engine: Any = SILENT) -> Answers:
    return Answers(SINCE, SINCE, list(connectors), engine)


def sampled(pod: Target, *looks: Answers) -> list[RankSample]:
    """The samples of the last of these looks."""
    recorded = RecordedSamples()
    samples = [recorded.of(Look(SINCE, [], [], [], [], {"u": one}), [pod]) for one in looks]
    return samples[-1][pod]


class TestRanks:
    async def test_each_rank_that_a_connector_reports_is_asked(self, api: FakeApi, questions: Questions) -> None:
        answering(api, {":940": STATE | {"ranks": 3}, "/v1/loads": ONE_LOAD})
        found = await questions.ask("x", OURS, None)
        assert (len(found.connectors), found.errors, found.metrics) == (3, (), None)

    async def test_ranks_of_the_last_look_are_asked_though_the_first_is_silent(
        self, api: FakeApi, questions: Questions
    ) -> None:
        answering(api, {":9401": STATE | {"ranks": 2}, "/v1/loads": ONE_LOAD})
        found = await questions.ask("x", OURS, answers({}, {}))
        assert ["error" in one for one in found.connectors] == [True, False]

    async def test_ranks_that_went_are_left_out(self, api: FakeApi, questions: Questions) -> None:
        answering(api, {":9400": STATE | {"ranks": 1}, "/v1/loads": ONE_LOAD})
        found = await questions.ask("x", OURS, answers({}, {}))
        assert (len(found.connectors), found.errors) == (1, ())

    async def test_long_refusal_of_a_pod_is_cut(self, api: FakeApi, questions: Questions) -> None:
        answering(api, {"/": {"message": "x" * 9999}}, status=500)
        found = await questions.ask("x", OURS, None)
        assert [len(error) for error in found.errors] == [ERROR_LETTERS, ERROR_LETTERS]


class TestSamples:
    def test_silent_stock_engine_keeps_its_ranks(self) -> None:
        found = sampled(STOCK, answers(engine={"body": TWO_LOADS}), answers())
        assert [(one.rank, one.engine_error) for one in found] == [(0, SILENT["error"]), (1, SILENT["error"])]

    def test_rank_without_a_scheduler_of_its_own_is_no_error(self) -> None:
        found = sampled(OURS, answers({"body": STATE}, {"body": STATE}, engine={"body": ONE_LOAD}))
        assert [one.engine_error for one in found] == ["", ""]

    def test_connection_that_the_proxy_cannot_open_is_refused(self) -> None:
        error = "503: error trying to reach service: dial tcp 10.0.0.1:9400: connect: connection refused"
        (found,) = sampled(OURS, answers({"error": error}))
        assert (found.connector_error, found.engine_error) == ("refused", SILENT["error"])

    def test_pod_that_was_not_asked_has_no_sample(self) -> None:
        assert RecordedSamples().of(Look(SINCE, [], [], [], [], {}), [OURS]) == {}
