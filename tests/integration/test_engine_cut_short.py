"""A decode that is killed in mid-stream, behind the router: no client can take what it has got for a whole answer."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx2 as httpx
import pytest
from pdpool_reference.demo.launch import Children

from tests.integration.asking import PATIENT_ROUTER, web

WAIT_S = 120.0
TOKENS = 8000
"""Seconds of work for the tiny model, and then decode is frozen: no answer comes to its end before the kill."""
BODIES = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}},
    "/v1/completions": {"model": "small", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "small",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
    },
}
BEFORE = 3
"""Events that a client has, before decode is killed."""


@pytest.fixture
def deployment():
    """(prefill, decode, router) for one test that kills decode."""
    with Children() as children:
        extra = ["--kv-pages", "2048", "--enable-faults", "--served-model-name", "small"]
        begun = [children.begin_engine(mode, model_path="tiny", extra=extra) for mode in ("prefill", "decode")]
        prefill, decode = [children.listening(child) for child in begun]
        yield prefill, decode, children.router([prefill], [decode], extra=PATIENT_ROUTER)


def ask(url, path, body, begun):
    """(events, how the body ended: the HTTP client's error, or None where it takes the body for whole)."""
    events = []
    try:
        with web.stream("POST", url + path, json={**body, "stream": True}, timeout=WAIT_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    if len(events) == BEFORE:
                        begun.wait()
    except httpx.TransportError as error:
        return events, error
    return events, None


def finish_reasons(event):
    """What an event of either kind says of the end, None where it says nothing of it."""
    said = json.loads(event)
    parts = said.get("choices") or [said.get("meta_info", {})]
    return [part.get("finish_reason") for part in parts]


def test_stream_of_killed_decode_is_cut_visibly(deployment):
    prefill, decode, router = deployment
    begun = Barrier(len(BODIES) + 1, timeout=WAIT_S)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        answers = {path: pool.submit(ask, router.url, path, body, begun) for path, body in BODIES.items()}
        begun.wait()
        assert web.post(decode.url + "/faults", json={"freeze_scheduler": True}, timeout=WAIT_S).status_code == 200
        decode.process.kill()
        assert decode.process.wait(WAIT_S) == -signal.SIGKILL
        for path, answer in answers.items():
            events, error = answer.result(WAIT_S)
            assert len(events) >= BEFORE, path
            assert "[DONE]" not in events, path
            assert {reason for event in events for reason in finish_reasons(event)} == {None}, path
            assert isinstance(error, httpx.RemoteProtocolError), f"{path}: {error!r} after {events[-1]}"
    assert prefill.process.poll() is None
