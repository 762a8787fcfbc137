"""Pools whose caches differ in size: what is too long for one side ends on both at once, as a bad request."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from pdpool_reference.demo.launch import Children

from tests.integration.asking import PATIENT_ROUTER, load_of, web

ROOMS = itertools.count(7_000_000)
SOON_S = 60.0
"""A decode that is not told waits for 300 s; a prefill for less, and then answers that nobody came."""
PAGES = 4
TEXT = "x" * 2000
"""More bytes than the tokens of the small cache can stand for, so that nobody there makes tokens of it."""
BODIES = {
    "tokens that fit with an answer that does not": (
        "/generate",
        {"input_ids": list(range(1, 40)), "sampling_params": {"max_new_tokens": 40}},
        "this engine has room for 64 in one sequence",
    ),
    "tokens": ("/generate", {"input_ids": [1] * 200, "sampling_params": {"n": 2}}, "prompt: 200 tokens"),
    "text": ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 4}}, "2000 bytes of text"),
    "one of several texts": ("/v1/completions", {"prompt": ["a", TEXT], "n": 2, "max_tokens": 4}, "2000 bytes of text"),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
        "bytes of text; this engine has room for less than",
    ),
}


@pytest.fixture(scope="module")
def pairs():
    """A prefill and a decode engine each, one of them, by which it is called, with a small cache; and a router."""
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
def test_both_halves_of_what_is_too_long_for_one_side_end_at_once_as_a_bad_request(pairs, small, case):
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


@pytest.mark.parametrize("small", ["prefill", "decode"])
@pytest.mark.parametrize("length", [100, 2000])
def test_a_client_of_the_router_is_told_that_its_request_is_at_fault(pairs, small, length):
    router = pairs[small][2]
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        begun = time.monotonic()
        with pytest.raises(openai.BadRequestError, match="this engine has room for"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * length}])
        assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_nothing_is_left_of_it_and_what_fits_is_answered(pairs, small):
    prefill, decode, router = pairs[small]
    assert web.post(router.url + "/generate", json={"text": TEXT}, timeout=120).status_code == 400
    fits = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert len(web.post(router.url + "/generate", json=fits, timeout=120).json()["output_ids"]) == 4
    until(lambda: idle(prefill) and idle(decode))


def idle(engine):
    load = load_of(engine.url)
    queued = sum(value for name, value in load["disaggregation"].items() if name.endswith("_reqs"))
    return load["num_used_tokens"] == load["num_running_reqs"] == queued == 0


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)
