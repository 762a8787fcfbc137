"""Requests of sglang-router become vLLM's."""

import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from pdpool_vllm import middleware
from pdpool_vllm.middleware import SGLangHttp, loads, translated
from prometheus_client import CollectorRegistry, Gauge

MARKED = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
ASKED = {"model": "m", "prompt": "Hello", "max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}}


def at(side, **fields):
    return json.loads(translated(json.dumps({**ASKED, **MARKED, **fields}).encode(), is_prefill=side == "prefill"))


def test_prefill_computes_one_token_and_keeps_the_cache():
    assert at("prefill") == {
        "model": "m",
        "prompt": "Hello",
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": True, "remote_room": 7},
    }


def test_prefill_of_a_chat_computes_one_token():
    found = at("prefill", max_completion_tokens=50)
    assert (found["max_tokens"], found["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize(("host", "address"), [("10.0.0.1", "10.0.0.1:8998"), ("fd00::1", "[fd00::1]:8998")])
def test_decode_takes_the_cache_of_that_prefill(host, address):
    assert at("decode", bootstrap_host=host) == {
        **ASKED,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap": address,
            "remote_room": 7,
        },
    }


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    "several",
    [{"bootstrap_room": [7, 8], "bootstrap_host": ["a", "a"], "bootstrap_port": [1, 1]}, {"bootstrap_port": None}],
)
def test_what_cannot_be_handed_over_is_computed_at_decode(side, several):
    assert at(side, kv_transfer_params={"do_remote_prefill": True}, **several)["kv_transfer_params"] is None


@pytest.mark.parametrize("choice", ["none", "required"])
def test_prefill_reads_the_same_prompt_as_decode(choice):
    given = {"tools": [{"type": "function"}], "tool_choice": choice, "response_format": {"type": "text"}}
    assert given.items() <= at("prefill", **given).items()


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[" * 200_000, b"[1]", json.dumps(ASKED).encode()])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_other_requests_are_left_alone(body, is_prefill):
    assert translated(body, is_prefill=is_prefill) == body


class Http:
    """An ASGI server and the application behind the middleware."""

    def __init__(self, *parts, path="/v1/completions", kind="http", method="POST"):
        self.incoming = [{"type": "http.request", "body": one, "more_body": True} for one in parts[:-1]]
        self.incoming.append({"type": "http.request", "body": parts[-1]})
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_role="kv_consumer"),
            model_config=SimpleNamespace(served_model_name="smollm2"),
        )
        state = SimpleNamespace(vllm_config=config)
        self.scope = {"type": kind, "method": method, "path": path, "app": SimpleNamespace(state=state)}
        self.scope["headers"] = [(b"host", b"a"), (b"content-length", b"1")]
        self.seen, self.sent = None, []

    async def run(self):
        await SGLangHttp(self.app)(self.scope, self.receive, self.send)
        return self

    async def app(self, scope, receive, _send):
        self.seen = (scope, await receive())

    async def receive(self):
        return self.incoming.pop(0)

    async def send(self, message):
        self.sent.append(message)


async def test_body_is_replaced_and_its_length_is_not_claimed():
    text = json.dumps({**ASKED, **MARKED}).encode()
    scope, message = (await Http(text[:9], text[9:]).run()).seen
    assert b"kv_transfer_params" in message["body"]
    assert dict(scope["headers"]) == {b"host": b"a"}


async def test_router_finds_the_models_name():
    sent = (await Http(b"", path="/server_info", method="GET").run()).sent
    assert (sent[0]["status"], json.loads(sent[1]["body"])) == (200, {"served_model_name": "smollm2"})


async def test_nothing_is_read_for_a_request_that_vllm_refuses_unread():
    http = Http(b"x")

    async def refuse(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 401})

    http.app = refuse
    await http.run()
    assert (len(http.incoming), http.sent[0]["status"]) == (1, 401)


@pytest.mark.parametrize(
    "other", [{"path": "/tokenize"}, {"kind": "lifespan"}, {"path": "/v1/loads"}, {"method": "GET"}]
)
async def test_other_paths_are_left_alone(other):
    http = await Http(b"x", **other).run()
    assert http.seen == (http.scope, {"type": "http.request", "body": b"x"})


async def test_body_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BODY", 10)
    http = Http(b"123456", b"123456")
    served = FastAPI()

    @served.post("/v1/completions")
    async def complete(body: dict):
        raise AssertionError(body)

    http.app = served
    await http.run()
    assert (http.sent[0]["status"], http.sent[1]["body"]) == (413, b'{"detail":"the request has more than 10 bytes"}')


async def test_vllm_sees_that_a_client_has_left():
    http = Http(b"x")
    http.incoming = [{"type": "http.disconnect"}]
    assert (await http.run()).seen[1] == {"type": "http.disconnect"}


@pytest.fixture
def counted():
    registry = CollectorRegistry()
    for name, values in (("running", (3, 0)), ("waiting", (1, 2))):
        gauge = Gauge(f"vllm:num_requests_{name}", "", ["model_name", "engine"], registry=registry)
        for rank, value in enumerate(values):
            gauge.labels("m", str(rank)).set(value)
    Gauge("vllm:kv_cache_usage_perc", "", registry=registry).set(0.5)
    return registry


def test_loads_are_those_of_each_rank(counted):
    assert loads(counted) == [
        {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1},
        {"dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 2},
    ]


async def test_loads_are_served(counted, monkeypatch):
    monkeypatch.setattr(middleware, "REGISTRY", counted)
    http = await Http(b"", path="/v1/loads", method="GET").run()
    assert (http.seen, http.sent[0]["status"]) == (None, 200)
    assert json.loads(http.sent[1]["body"])["loads"] == loads(counted)


async def test_loads_without_statistics_are_no_answer(monkeypatch):
    monkeypatch.setattr(middleware, "REGISTRY", CollectorRegistry())
    http = await Http(b"", path="/v1/loads", method="GET").run()
    assert http.sent[0]["status"] == 503
