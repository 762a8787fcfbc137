"""Requests of which one half fails or never comes before the halves have matched: the other half ends, soon."""

import http.client
import http.server
import itertools
import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_operator.observe.connector_state import NOT_OURS
from pdpool_reference.demo.launch import HOST, Children

from dev.processes import send
from tests.integration.asking import PATIENT_ROUTER, get_json, load_of, web
from tests.waiting import until

ROOMS = itertools.count(5_000_000)
BODY = {"input_ids": list(range(1, 40)), "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
SOON_S = 2.0
MATCH_S = Timeouts().match_s
ENGINE_MATCH_S = Timeouts().engine_match_s


@pytest.fixture(scope="module")
def children():
    with Children() as started:
        yield started


@pytest.fixture(scope="module")
def prefill(children):
    return children.engine("prefill", model_path="tiny", extra=["--enable-faults"])


@pytest.fixture(scope="module")
def decode(children):
    return children.engine("decode", model_path="tiny", extra=["--enable-faults"])


@pytest.fixture
def doomed(children):
    """A decode for a test that kills it."""
    return children.engine("decode", model_path="tiny", extra=["--enable-faults"])


def queued(child, queue):
    return load_of(child.url)["disaggregation"][f"{queue}_queue_reqs"]


def freeze(child, frozen=True):
    assert web.post(child.url + "/faults", json={"freeze_scheduler": frozen}, timeout=30).status_code == 200


def attempts(child, state):
    """Hand-offs in one state, as this engine's connector shows."""
    return get_json(f"http://{child.addresses['admin']}/v1/state")["attempts"][state]["reqs"]


def unfinished(child):
    """Hand-offs that this engine's connector has not ended: some end after their client has got its answer."""
    states = get_json(f"http://{child.addresses['admin']}/v1/state")["attempts"]
    return sum(state["reqs"] for state in states.values())


def done(child):
    """Hand-offs that ended well, as this engine's connector shows."""
    return get_json(f"http://{child.addresses['admin']}/v1/state")["outcomes"]["done"]


def warm_up(prefill, decode, pool):
    """One request through both, so that they are paired."""
    body = {**BODY, **where(prefill)}
    halves = [pool.submit(web.post, child.url + "/generate", json=body, timeout=120) for child in (prefill, decode)]
    assert [half.result().status_code for half in halves] == [200, 200]


def where(prefill):
    port = prefill.addresses["bootstrap_port"]
    return {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": next(ROOMS)}


def post(child, body, patience=120.0):
    """Answer of an engine, None when it died; and the time of it."""
    try:
        response = web.post(child.url + "/generate", json=body, timeout=patience)
    except httpx.TransportError:
        response = None
    return response, time.monotonic()


def error_of(response):
    return response.status_code, response.json()["error"]["code"]


@contextmanager
def answering(status):
    """URL of a server that answers every POST with this status, before any engine, and the paths of what it got.

    "reset" closes the connection.
    """
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {})

        def do_POST(self):
            got.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            if status == "reset":
                self.connection.close()
            else:
                self.answer(status, {"error": {"message": "the proxy fails", "code": "proxy"}})

        def answer(self, number, body):
            data = json.dumps(body).encode()
            self.send_response(number)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer((HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{HOST}:{server.server_address[1]}", got
        server.shutdown()


def test_killed_decode_ends_prefills_half(prefill, doomed):
    with ThreadPoolExecutor(3) as pool:
        warm_up(prefill, doomed, pool)
        freeze(doomed)
        body = {**BODY, **where(prefill)}
        halves = [pool.submit(post, child, body) for child in (doomed, prefill)]
        until(lambda: queued(prefill, "prefill_bootstrap") == 1 and attempts(prefill, "matched") == 1)
        killed = time.monotonic()
        doomed.process.kill()
        response, at = halves[1].result()
        assert at - killed < SOON_S
        assert error_of(response) == (502, "peer_lost")


def test_router_retries_requests_of_killed_decode(prefill, decode, doomed, children):
    router = children.router([prefill], [doomed, decode], extra=PATIENT_ROUTER)
    with ThreadPoolExecutor(8) as pool:
        wanted = post(router, BODY)[0].json()["output_ids"]
        for one in (doomed, decode):
            warm_up(prefill, one, pool)
        freeze(doomed)
        asked = [pool.submit(post, router, BODY) for _ in range(8)]
        until(lambda: 0 < attempts(prefill, "matched") == sum(not half.done() for half in asked))
        killed = time.monotonic()
        doomed.process.kill()
        answers = [half.result() for half in asked]
        assert [(response.status_code, response.json()["output_ids"]) for response, _ in answers] == [(200, wanted)] * 8
        assert max(at for _, at in answers) - killed < 2 * MATCH_S


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_half_whose_client_leaves_ends_the_other(prefill, decode, side):
    with ThreadPoolExecutor(2) as pool:
        warm_up(prefill, decode, pool)
        body = {**BODY, **where(prefill)}
        leaving, staying = (prefill, decode) if side == "prefill" else (decode, prefill)
        freeze(staying)
        answer = pool.submit(post, staying, body)
        connection = http.client.HTTPConnection(urlsplit(leaving.url).netloc, timeout=30)
        connection.request("POST", "/generate", json.dumps(body))
        until(lambda: attempts(prefill, "matched") + attempts(prefill, "ready") == 1)
        connection.close()
        until(lambda: attempts(prefill, "matched") + attempts(prefill, "ready") == 0)
        freeze(staying, frozen=False)
        response, _ = answer.result()
        assert error_of(response) == (502, "peer_aborted")


def test_prefill_waits_for_living_decode_only(prefill, decode, doomed):
    """A decode with a frozen scheduler, a decode that hangs as a whole, and a request that no decode got."""
    slow, hung = decode, doomed
    with ThreadPoolExecutor(6) as pool:
        for one in (slow, hung):
            warm_up(prefill, one, pool)
        freeze(slow)
        send(hung.process.pid, signal.SIGSTOP)
        bodies = [{**BODY, **where(prefill)} for _ in range(3)]
        answer = pool.submit(post, slow, bodies[0])
        pool.submit(post, hung, bodies[1])
        begun = time.monotonic()
        halves = [pool.submit(post, prefill, body) for body in bodies]
        until(lambda: queued(prefill, "prefill_bootstrap") == 3 and attempts(prefill, "matched") == 1)
        for half in halves[1:]:
            response, at = half.result()
            assert error_of(response) == (504, "timed_out")
            assert MATCH_S - 1 < at - begun < MATCH_S + SOON_S
        assert queued(prefill, "prefill_bootstrap") == 1
        freeze(slow, frozen=False)
        assert [half.result()[0].status_code for half in (answer, halves[0])] == [200, 200]
        hung.process.kill()


def test_decode_waits_shortly_for_half_that_never_comes(prefill, decode):
    begun = time.monotonic()
    response, at = post(decode, {**BODY, **where(prefill)})
    assert error_of(response) == (504, "timed_out")
    assert ENGINE_MATCH_S - 1 < at - begun < ENGINE_MATCH_S + SOON_S
    assert "has not received the request" in response.json()["error"]["message"]
    until(lambda: load_of(decode.url)["num_used_tokens"] == 0)


def test_halves_of_different_prompts_never_match(prefill, decode):
    with ThreadPoolExecutor(2) as pool:
        place, begun = where(prefill), time.monotonic()
        bodies = [{**BODY, **place}, {**BODY, **place, "input_ids": [5, 6, 7]}]
        for half in [pool.submit(post, child, body) for child, body in zip((prefill, decode), bodies, strict=True)]:
            response, at = half.result()
            assert error_of(response) == (504, "timed_out")
            assert at - begun < MATCH_S + SOON_S


@pytest.mark.parametrize("status", [400, 500, "reset"])
def test_router_answers_beside_prefill_whose_http_side_fails(prefill, decode, children, status):
    """Its next try goes to the next prefill, in turn. A router serves before it knows each of its prefills."""
    with answering(status) as (url, got):
        broken = SimpleNamespace(url=url, addresses=prefill.addresses)
        router = children.router([broken, prefill], [decode], extra=PATIENT_ROUTER)
        deadline = time.monotonic() + 60.0
        while not got:
            assert time.monotonic() < deadline, "the router asks the broken prefill in time"
            begun = time.monotonic()
            response, at = post(router, BODY)
            assert response.status_code == 200
        assert ENGINE_MATCH_S - 1 < at - begun < ENGINE_MATCH_S + 5.0
        router.stop()


def test_router_answers_within_20_s_if_no_prefill_receives(prefill, decode, children):
    with answering(500) as (url, _):
        broken = SimpleNamespace(url=url, addresses=prefill.addresses)
        router = children.router([broken], [decode], extra=PATIENT_ROUTER)
        begun = time.monotonic()
        response, at = post(router, BODY)
        assert response.status_code == 500
        assert at - begun < 20.0
        router.stop()


def test_frozen_prefill_engine_keeps_attempts_until_match_s(prefill, decode):
    freeze(prefill)
    try:
        begun = time.monotonic()
        response, at = post(decode, {**BODY, **where(prefill)})
        assert error_of(response) == (504, "timed_out")
        assert at - begun > MATCH_S - 1
    finally:
        freeze(prefill, frozen=False)


BAD = {
    "temperature": {"sampling_params": {"temperature": 9}},
    "token out of the vocabulary": {"input_ids": [10**6]},
    "unsupported": {"sampling_params": {"regex": "a"}},
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_bad_field_at_one_side_ends_the_other(prefill, decode, side, case):
    with ThreadPoolExecutor(2) as pool:
        warm_up(prefill, decode, pool)
        refusing, other = (prefill, decode) if side == "prefill" else (decode, prefill)
        for first in (refusing, other):
            place, begun = where(prefill), time.monotonic()
            bodies = {refusing.name: {**BODY, **place, **BAD[case]}, other.name: {**BODY, **place}}
            second = other if first is refusing else refusing
            early = pool.submit(post, first, bodies[first.name])
            until(early.done if first is refusing else lambda: parked_or_waiting(prefill) == 1)
            late = pool.submit(post, second, bodies[second.name])
            answers = {first.name: early.result(), second.name: late.result()}
            response, _ = answers[refusing.name]
            assert response.status_code == 400
            why = response.json()["error"]["message"]
            response, at = answers[other.name]
            assert at - begun < SOON_S + 3.0
            assert error_of(response) == (400, "handoff_invalid")
            assert re.escape(why) in re.escape(response.json()["error"]["message"])


@pytest.mark.parametrize("case", BAD)
def test_wrong_request_counts_against_neither_engine(prefill, decode, case):
    """The operator calls engines NothingFinishes whose requests fail for another cause."""

    def ended(cause):
        """Hand-offs that ended for a cause, at each engine."""
        states = [get_json(f"http://{child.addresses['admin']}/v1/state") for child in (prefill, decode)]
        return [state["causes"].get(cause, 0) for state in states]

    assert "invalid" in NOT_OURS
    with ThreadPoolExecutor(2) as pool:
        before = [done(child) for child in (prefill, decode)]
        warm_up(prefill, decode, pool)
        # An engine shows its counters as of a moment ago: those that have the warm-up have all of the tests before.
        until(lambda: all(done(child) > count for child, count in zip((prefill, decode), before, strict=True)))
        until(lambda: not unfinished(prefill) and not unfinished(decode))
        refused, invalid = ended("refused"), ended("invalid")
        body = {**BODY, **where(prefill), **BAD[case]}
        answers = [one.result() for one in [pool.submit(post, child, body) for child in (prefill, decode)]]
        assert [response.status_code for response, _ in answers] == [400, 400]
        until(lambda: ended("invalid") == [number + 1 for number in invalid])
        assert ended("refused") == refused


def parked_or_waiting(prefill):
    return attempts(prefill, "parked") + attempts(prefill, "waiting")
