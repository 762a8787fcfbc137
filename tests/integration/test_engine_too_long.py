"""Pools whose caches differ in size: a request too long for one side ends on both at once, as a bad request."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from pdpool_reference.demo.launch import Children

from tests.integration.asking import PATIENT_ROUTER, load_of, web
from tests.waiting import until

ROOMS = itertools.count(7_000_000)
SOON_S = 60.0
"""Far below the 300 s that a half waits whose other half is open."""
PAGES = 4
TEXT = "x" * 2000
"""More bytes than the tokens of the small cache can hold, so that the engine does not encode it."""
ONLY_DECODE = "tokens that fit with an answer that does not"
BODIES = {
    ONLY_DECODE: (
        "/generate",
        {"input_ids": list(range(1, 40)), "sampling_params": {"max_new_tokens": 40}},
        "39 tokens of prompt and 40 new ones are 79",
    ),
    "tokens": ("/generate", {"input_ids": [1] * 200, "sampling_params": {"n": 2}}, "prompt: 200 tokens"),
    "text": ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 4}}, "2000 bytes of text"),
    "one of several texts": ("/v1/completions", {"prompt": ["a", TEXT], "n": 2, "max_tokens": 4}, "2000 bytes of text"),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
        "bytes of text, at most",
    ),
}


@pytest.fixture(scope="module")
def pairs():
    """By the role with the small cache: prefill, decode and router."""
    with Children() as children:
        begun = {
            small: [
                children.begin_engine(mode, model_path="tiny", extra=["--kv-pages", str(PAGES)] * (mode == small))
                for mode in ("prefill", "decode")
            ]
            for small in ("prefill", "decode")
        }
        engines = {small: [children.listening(child) for child in pair] for small, pair in begun.items()}
        yield {
            small: (*pair, children.router([pair[0]], [pair[1]], extra=PATIENT_ROUTER))
            for small, pair in engines.items()
        }


def post(child, path, body):
    """Answer of an engine or the router, and when it came."""
    return web.post(child.url + path, json=body, timeout=120), time.monotonic()


@pytest.mark.parametrize("small", ["prefill", "decode"])
@pytest.mark.parametrize("case", BODIES)
def test_too_long_for_one_side_ends_both(pairs, small, case):
    if small == "prefill" and case == ONLY_DECODE:
        pytest.skip("prefill holds the prompt only")
    prefill, decode, _ = pairs[small]
    path, body, why = BODIES[case]
    port = prefill.addresses["bootstrap_port"]
    with ThreadPoolExecutor(1) as pool:
        for first, second in ((prefill, decode), (decode, prefill)):
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(ROOMS)}
            begun = time.monotonic()
            other = pool.submit(post, first, path, body | where)
            for response, at in (post(second, path, body | where), other.result()):
                assert at - begun < SOON_S
                assert response.status_code == 400
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
                assert why in error["message"]
                assert f"this {small} engine has room for 64 tokens" in error["message"]


def test_prefill_serves_prompt_whose_answer_only_decode_holds(pairs):
    _, _, router = pairs["prefill"]
    body = {"input_ids": list(range(1, 65)), "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    answer = web.post(router.url + "/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["output_ids"]) == 40


@pytest.mark.parametrize("small", ["prefill", "decode"])
@pytest.mark.parametrize("length", [100, 2000])
def test_router_gives_client_role_and_limit(pairs, small, length):
    router = pairs[small][2]
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        begun = time.monotonic()
        with pytest.raises(openai.BadRequestError, match=f"this {small} engine has room for 64 tokens"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * length}])
        assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_nothing_is_left_of_a_refused_request(pairs, small):
    prefill, decode, router = pairs[small]
    assert web.post(router.url + "/generate", json={"text": TEXT}, timeout=120).status_code == 400
    fits = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert len(web.post(router.url + "/generate", json=fits, timeout=120).json()["output_ids"]) == 4
    until(lambda: idle(prefill) and idle(decode))


def idle(engine):
    load = load_of(engine.url)
    queued = sum(value for name, value in load["disaggregation"].items() if name.endswith("_reqs"))
    return load["num_used_tokens"] == load["num_running_reqs"] == queued == 0
