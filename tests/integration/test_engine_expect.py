"""Requests whose decode engine dies, freezes or refuses before it has opened them: prefill's half ends, soon."""

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_reference.demo.launch import Children
from pdpool_reference.server_engine import EXPECTED_WITHIN_S

from dev.processes import send
from tests.integration.asking import PATIENT_ROUTER, get_json, load_of, web

ROOMS = itertools.count(5_000_000)
BODY = {"input_ids": list(range(1, 40)), "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
SOON_S = 2.0
REPEATED_S = Timeouts().expect_s


@pytest.fixture(scope="module")
def children():
    with Children() as started:
        yield started


@pytest.fixture(scope="module")
def prefill(children):
    return children.engine("prefill", model_path="tiny", extra=["--enable-faults"])


@pytest.fixture
def decode(children):
    return children.engine("decode", model_path="tiny", extra=["--enable-faults"])


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def queued(child, queue):
    return load_of(child.url)["disaggregation"][f"{queue}_queue_reqs"]


def freeze(child, frozen=True):
    assert web.post(child.url + "/faults", json={"freeze_scheduler": frozen}, timeout=30).status_code == 200


def expected(child):
    """Requests that decodes have announced and not opened, as this engine's connector knows."""
    return get_json(f"http://{child.addresses['admin']}/v1/state")["expected"]


def warm_up(prefill, decode, pool):
    """One request through both, so that they are paired."""
    body = {**BODY, **where(prefill)}
    halves = [pool.submit(web.post, child.url + "/generate", json=body, timeout=120) for child in (prefill, decode)]
    assert [half.result().status_code for half in halves] == [200, 200]


def where(prefill):
    port = prefill.addresses["bootstrap_port"]
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(ROOMS)}


def post(child, body, patience=120.0):
    """Answer of an engine, None when it died, and when that came."""
    try:
        response = web.post(child.url + "/generate", json=body, timeout=patience)
    except httpx.TransportError:
        response = None
    return response, time.monotonic()


def test_a_request_ends_at_prefill_when_the_decode_that_had_it_is_killed(prefill, decode):
    with ThreadPoolExecutor(3) as pool:
        warm_up(prefill, decode, pool)
        freeze(decode)
        body = {**BODY, **where(prefill)}
        halves = [pool.submit(post, child, body) for child in (decode, prefill)]
        until(lambda: queued(prefill, "prefill_bootstrap") == 1 and expected(prefill) == 1)
        decode.process.kill()
        decode.process.wait(30)
        killed = time.monotonic()
        response, at = halves[1].result()
        assert at - killed < SOON_S
        assert (response.status_code, response.json()["error"]["code"]) == (502, "peer_lost")


def test_the_router_then_tries_another_decode_and_clients_get_their_answer(prefill, decode, children):
    doomed = children.engine("decode", model_path="tiny", extra=["--enable-faults"])
    router = children.router([prefill], [doomed, decode], extra=PATIENT_ROUTER)
    with ThreadPoolExecutor(8) as pool:
        wanted = post(router, BODY)[0].json()["output_ids"]
        for one in (doomed, decode):
            warm_up(prefill, one, pool)
        freeze(doomed)
        asked = [pool.submit(post, router, BODY) for _ in range(8)]
        until(lambda: 0 < expected(prefill) == sum(not half.done() for half in asked))
        killed = time.monotonic()
        doomed.process.kill()
        answers = [half.result() for half in asked]
        assert [(response.status_code, response.json()["output_ids"]) for response, _ in answers] == [(200, wanted)] * 8
        assert max(at for _, at in answers) - killed < EXPECTED_WITHIN_S + 15.0, "some meet the dead one once more"


def test_only_what_no_living_connector_speaks_of_ends_in_the_time_for_that(prefill, children):
    """A decode whose scheduler stands still, one that stands still as a whole, and a request that none ever got."""
    with ThreadPoolExecutor(6) as pool:
        slow, frozen = (children.engine("decode", model_path="tiny", extra=["--enable-faults"]) for _ in range(2))
        for decode in (slow, frozen):
            warm_up(prefill, decode, pool)
            freeze(decode)
        bodies = [{**BODY, **where(prefill)} for _ in range(3)]
        answer = pool.submit(post, slow, bodies[0])
        pool.submit(post, frozen, bodies[1])
        begun = time.monotonic()
        halves = [pool.submit(post, prefill, body) for body in bodies]
        until(lambda: queued(prefill, "prefill_bootstrap") == 3 and expected(prefill) == 2)
        send(frozen.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        for half in halves[1:]:
            response, at = half.result()
            assert (response.status_code, response.json()["error"]["code"]) == (504, "timed_out")
            assert "no decode engine has announced the request" in response.json()["error"]["message"]
            assert at - begun > EXPECTED_WITHIN_S - 1
            assert at - stopped < EXPECTED_WITHIN_S + REPEATED_S
        assert queued(prefill, "prefill_bootstrap") == 1, "as the alert and the demo have it"
        freeze(slow, frozen=False)
        assert [half.result()[0].status_code for half in (answer, halves[0])] == [200, 200]
        frozen.process.kill()
