"""One unified engine as a process, asked by the official OpenAI client and by raw HTTP."""

import http.client
import json
import signal
import socket
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import openai
import pytest
from pdpool_reference.demo.launch import Children
from pdpool_reference.http_edge import CLOSE_S

from tests.integration.asking import load_of, open_sequences
from tests.waiting import until

PAGES = 256
"""4096 tokens: more than a second of work for the tiny model, and small enough to be filled by a test."""


@pytest.fixture(scope="module")
def engine():
    with Children() as children:
        extra = ["--kv-pages", str(PAGES), "--enable-faults", "--served-model-name", "small"]
        yield children.engine("unified", model_path="tiny", extra=extra)


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def call(engine, method, path, body=None, *, raw=None, timeout=90):
    """Status and parsed body of one request."""
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=timeout)
    try:
        payload = raw if raw is not None else None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text
    finally:
        connection.close()


def chat(client, text="hello", **options):
    return client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": text}], **{"temperature": 0, "max_tokens": 8, **options}
    )


# ---------------------------------------------------------------------- OpenAI's client


def test_a_chat_is_answered_with_usage(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_has_text_of_whole_answer(client):
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens >= 1


def test_greedy_samples_are_equal_drawn_ones_differ(client):
    greedy = chat(client, n=3)
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in greedy.choices}) == 1
    drawn = chat(client, n=3, temperature=1.5, seed=1, max_tokens=16)
    assert len({choice.message.content for choice in drawn.choices}) == 3


def test_a_seed_repeats_the_draw(client):
    texts = {chat(client, temperature=1.0, seed=7, max_tokens=16).choices[0].message.content for _ in range(3)}
    assert len(texts) == 1


def test_a_stop_string_ends_the_answer_before_itself(client):
    ignoring = {"extra_body": {"ignore_eos": True}}
    text = (
        client.completions.create(model="small", prompt="abc", temperature=0, max_tokens=24, **ignoring).choices[0].text
    )
    stop = text[6:8]
    answer = client.completions.create(
        model="small", prompt="abc", temperature=0, max_tokens=24, stop=[stop], **ignoring
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_bounds_the_answer(client):
    answer = client.completions.create(
        model="small", prompt="abc", temperature=0, max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_lists_are_answered_in_order(client):
    both = client.completions.create(model="small", prompt=["abc", "xyz"], temperature=0)
    alone = [
        client.completions.create(model="small", prompt=text, temperature=0).choices[0].text for text in ("abc", "xyz")
    ]
    assert [choice.text for choice in both.choices] == alone
    tokens = client.completions.create(model="small", prompt=[[97, 98, 99], [120, 121, 122]], temperature=0)
    assert [choice.text for choice in tokens.choices] == alone


def test_concurrent_requests_get_their_own_answers(client):
    prompts = [f"{'word ' * (i % 7)}{i}" for i in range(24)]
    alone = [client.completions.create(model="small", prompt=text, temperature=0).choices[0].text for text in prompts]
    together = client.completions.create(model="small", prompt=prompts, temperature=0)
    assert [choice.text for choice in together.choices] == alone


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["small"]


def test_one_model_is_shown_and_no_other(client):
    assert client.models.retrieve("small") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'a/b' is not served here, 'small' is") as caught:
        client.models.retrieve("a/b")
    assert (caught.value.type, caught.value.param, caught.value.code) == (
        "invalid_request_error",
        "model",
        "model_not_found",
    )


@pytest.mark.parametrize("name", ["nope", "small ", "a" * 1000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_request_for_another_model_gets_404(engine, path, name):
    body = {"model": name, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    status, answer = call(engine, "POST", path, body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (404, "invalid_request_error", "model")
    assert error["code"] == "model_not_found"
    assert "'small' is" in error["message"]


@pytest.mark.parametrize(
    "model", [{"model": "small"}, {"model": "default"}, {"model": "unknown"}, {"model": ""}, {"model": None}, {}]
)
def test_request_without_model_is_served_under_its_name(engine, model):
    status, answer = call(engine, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, **model})
    assert (status, answer["model"]) == (200, "small")


# ---------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ("/v1/completions", {"prompt": "word " * 1000}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 40000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40000}]}, "prompt"),
        ("/generate", {"text": ["a", "word " * 40000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/v1/chat/completions", {}, "messages"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ("/abort_request", {}, "rid"),
    ],
)
def test_bad_request_gets_400_naming_the_field(engine, path, body, param):
    status, answer = call(engine, "POST", path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]


def test_full_engine_answers_503(engine):
    freeze(engine, frozen=True)
    waiting = [threading.Thread(target=call, args=(engine, "POST", "/generate", batch(64))) for _ in range(4)]
    try:
        for thread in waiting:
            thread.start()
        until(lambda: open_sequences(engine.url) == 4 * 64)
        status, answer = call(engine, "POST", "/generate", batch(128))
        assert (status, answer["error"]["code"]) == (503, "queue_full")
    finally:
        freeze(engine, frozen=False)
        for thread in waiting:
            thread.join(60)


def batch(count):
    return {"input_ids": [[97, 98]] * count, "sampling_params": {"max_new_tokens": 1}}


# ---------------------------------------------------------------------- aborts


LONG = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}}


def test_a_client_that_leaves_frees_its_pages(engine):
    before = aborted(engine)
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=30)
    connection.request("POST", "/generate", json.dumps(LONG | {"stream": True}))
    response = connection.getresponse()
    response.readline()
    assert load_of(engine.url)["num_used_tokens"] > 0
    response.close()
    connection.close()
    until(lambda: load_of(engine.url)["num_used_tokens"] == 0)
    assert load_of(engine.url)["num_running_reqs"] == 0
    assert aborted(engine) == before + 1, "it did not just run to its end"


def aborted(engine):
    name = "sglang:num_aborted_requests_total{"
    text = call(engine, "GET", "/metrics")[1]
    return float(next(line for line in text.splitlines() if line.startswith(name)).rpartition(" ")[2])


def test_abort_ends_exactly_that_request_id(engine):
    answers = {}

    def ask(rid, tokens):
        sampling = {**LONG["sampling_params"], "max_new_tokens": tokens}
        answers[rid] = call(engine, "POST", "/generate", {**LONG, "rid": rid, "sampling_params": sampling})

    freeze(engine, frozen=True)
    asking = [threading.Thread(target=ask, args=one) for one in (("req-1", 3500), ("req-10", 100))]
    for thread in asking:
        thread.start()
    until(lambda: open_sequences(engine.url) == 2)
    freeze(engine, frozen=False)
    until(lambda: call(engine, "POST", "/abort_request", {"rid": "req-1"})[1].get("aborted") == 1 or "req-1" in answers)
    for thread in asking:
        thread.join(90)
    assert answers["req-1"][1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers["req-10"][1]["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_all_ends_everything(engine):
    asking = threading.Thread(target=call, args=(engine, "POST", "/generate", LONG))
    asking.start()
    until(lambda: load_of(engine.url)["num_running_reqs"] == 1)
    assert call(engine, "POST", "/abort_request", {"abort_all": True}) == (200, {"aborted": 1})
    asking.join(90)
    assert load_of(engine.url)["num_running_reqs"] == 0


# ---------------------------------------------------------------------- state and faults


def freeze(engine, *, frozen):
    assert call(engine, "POST", "/faults", {"freeze_scheduler": frozen})[0] == 200


def test_an_idle_engine_is_healthy_ready_and_empty(engine):
    for path in ("/health", "/health_generate", "/ready", "/flush_cache", "/model_info", "/server_info", "/get_load"):
        assert call(engine, "GET", path)[0] == 200, path
    load = load_of(engine.url)
    assert load["max_total_num_tokens"] == PAGES * 16
    assert load["disaggregation"]["prefill_bootstrap_queue_reqs"] == 0


def test_metrics_carry_sglangs_names_and_labels(engine):
    call(engine, "POST", "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}})
    status, text = call(engine, "GET", "/metrics")
    assert status == 200
    labels = '{engine_type="unified",model_name="small",moe_ep_rank="0",pp_rank="0",tp_rank="0"}'
    for name in (
        "num_prefill_bootstrap_queue_reqs",
        "num_prefill_inflight_queue_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "num_bootstrap_failed_reqs_total",
        "num_transfer_failed_reqs_total",
    ):
        assert f"sglang:{name}{labels} 0.0" in text, name
    assert f"sglang:generation_tokens_total{labels} 0.0" not in text


def test_frozen_scheduler_gives_no_old_numbers(engine):
    freeze(engine, frozen=True)
    try:
        status, answer = call(engine, "GET", "/v1/loads")
        assert (status, answer["error"]["code"]) == (503, "scheduler_silent")
        assert call(engine, "GET", "/v1/models")[0] == 200, "the HTTP side lives on"
    finally:
        freeze(engine, frozen=False)
    until(lambda: call(engine, "GET", "/v1/loads")[0] == 200)


def test_leaked_request_stays_until_freed(engine):
    call(engine, "POST", "/faults", {"leak_request": True})
    assert call(engine, "POST", "/generate", batch(1))[0] == 200
    assert load_of(engine.url)["num_running_reqs"] == 1
    assert load_of(engine.url)["num_used_tokens"] > 0
    call(engine, "POST", "/faults", {"leak_request": False})
    assert load_of(engine.url)["num_running_reqs"] == 0
    assert load_of(engine.url)["num_used_tokens"] == 0


def test_frozen_gauges_keep_their_values(engine):
    name = 'sglang:num_running_reqs{engine_type="unified"'
    until(lambda: gauge(engine, name).endswith(" 0.0"))
    call(engine, "POST", "/faults", {"freeze_gauges": True})
    call(engine, "POST", "/faults", {"leak_request": True})
    try:
        call(engine, "POST", "/generate", batch(1))
        assert load_of(engine.url)["num_running_reqs"] == 1
        assert gauge(engine, name).endswith(" 0.0")
    finally:
        call(engine, "POST", "/faults", {"freeze_gauges": False, "leak_request": False})


def gauge(engine, name):
    return next(line for line in call(engine, "GET", "/metrics")[1].splitlines() if line.startswith(name))


@pytest.mark.parametrize("body", [{"melt": True}, {"freeze_scheduler": 1}, {"delay_handoff_s": -1}])
def test_an_unknown_fault_is_refused(engine, body):
    status, answer = call(engine, "POST", "/faults", body)
    assert status == 400
    assert next(iter(body)) in answer["error"]["message"]


def test_faults_are_off_by_default():
    with Children() as children:
        plain = children.engine("unified", model_path="tiny", extra=["--kv-pages", "16"])
        status, answer = call(plain, "POST", "/faults", {"freeze_scheduler": True})
        assert status == 404
        assert "--enable-faults" in answer["error"]["message"]


# ---------------------------------------------------------------------- end


@contextmanager
def ending_engine(body):
    """A frozen engine with this request, after one SIGTERM; and the list that takes the answer."""
    with Children() as children:
        extra = ["--enable-faults", "--shutdown-grace", "100"]
        engine = children.engine("unified", model_path="tiny", extra=extra)
        freeze(engine, frozen=True)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(call(engine, "POST", "/generate", body)))
        asking.start()
        until(lambda: open_sequences(engine.url) == 1)
        engine.process.send_signal(signal.SIGTERM)
        until(lambda: call(engine, "GET", "/health")[0] == 503)
        yield engine, answers
        assert engine.process.wait(60) == 0
        asking.join(90)


def test_sigterm_drains():
    body = {**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 40}}
    with ending_engine(body) as (engine, answers):
        assert call(engine, "POST", "/generate", LONG)[0] == 503
        freeze(engine, frozen=False)
    assert answers[0][0] == 200
    assert answers[0][1]["meta_info"]["completion_tokens"] == 40


def test_second_sigterm_fails_the_request_at_once():
    with ending_engine(LONG) as (engine, answers):
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(60) == 0
    assert answers[0][0] == 503
    assert answers[0][1]["error"]["code"] == "shutting_down"


def test_failed_stream_ends_with_error_event():
    with Children() as children:
        extra = ["--enable-faults", "--shutdown-grace", "0", "--kv-pages", "512"]
        engine = children.engine("unified", model_path="tiny", extra=extra)
        connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=90)
        sampling = {**LONG["sampling_params"], "max_new_tokens": 8000}
        connection.request("POST", "/generate", json.dumps({**LONG, "sampling_params": sampling, "stream": True}))
        response = connection.getresponse()
        response.readline()
        freeze(engine, frozen=True)
        engine.process.send_signal(signal.SIGTERM)
        events = [line for line in response.read().decode().splitlines() if line.startswith("data: ")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert "data: [DONE]" not in events
        assert engine.process.wait(60) == 0
        connection.close()


def test_client_that_reads_nothing_delays_no_exit():
    with Children() as children:
        extra = ["--shutdown-grace", "0", "--kv-pages", "4096"]
        engine = children.engine("unified", model_path="tiny", extra=extra)
        sampling = {**LONG["sampling_params"], "max_new_tokens": 8000}
        body = json.dumps({**LONG, "sampling_params": sampling, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((urlsplit(engine.url).hostname, urlsplit(engine.url).port))
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: generated(engine) > 1500)  # megabytes of events
            engine.process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            assert engine.process.wait(60) == 0
            assert time.monotonic() - begun < CLOSE_S


def generated(engine):
    metrics = call(engine, "GET", "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in metrics if line.startswith("sglang:generation_tokens_total"))
