"""Prefill, decode and router as processes over a real data plane: the same tokens as one engine, and clean ends."""

import http.client
import itertools
import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import pytest
from pdpool_reference.demo.launch import Child, Children, get_status

from tests.integration.asking import PATIENT_ROUTER, get_json, load_of, web
from tests.waiting import until

PAGES = 512
ROOMS = itertools.count(1_000_000)
EMPTY = {
    "prefill_bootstrap_queue_reqs": 0,
    "prefill_inflight_queue_reqs": 0,
    "decode_prealloc_queue_reqs": 0,
    "decode_transfer_queue_reqs": 0,
    "decode_retracted_queue_reqs": 0,
}


@dataclass
class Pair:
    """A prefill and a decode engine, a router before them, and a unified engine to compare with."""

    children: Children
    prefill: Child
    decode: Child
    router: Child
    unified: Child

    def post(self, child, path, body, timeout=120):
        return web.post(child.url + path, json=body, timeout=timeout)

    def generate(self, child, **body):
        response = self.post(child, "/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def load(self, child):
        return load_of(child.url)

    def fault(self, child, **faults):
        assert self.post(child, "/faults", faults).status_code == 200

    def room(self):
        """The fields that the router adds, for a test that speaks to the engines itself."""
        port = self.prefill.addresses["bootstrap_port"]
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(ROOMS)}

    def aborted(self, child):
        name = "sglang:num_aborted_requests_total{"
        lines = web.get(child.url + "/metrics", timeout=30).text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])

    def quiet(self):
        """Both engines hold nothing: no request in any queue, no page in use."""
        for child in (self.prefill, self.decode):
            load = self.load(child)
            queues = {name: reqs for name, reqs in load["disaggregation"].items() if name != "mode"}
            if queues != EMPTY or load["num_used_tokens"] or load["num_running_reqs"]:
                return False
        return True


def start(backend, children):
    extra = ["--kv-pages", str(PAGES), "--enable-faults", "--served-model-name", "small"]
    modes = ("unified", "prefill", "decode")
    begun = [children.begin_engine(mode, model_path="tiny", backend=backend, extra=extra) for mode in modes]
    unified, prefill, decode = [children.listening(child) for child in begun]
    return Pair(children, prefill, decode, children.router([prefill], [decode], extra=PATIENT_ROUTER), unified)


@pytest.fixture(scope="module", params=["local", "nixl"])
def pair(request):
    """One deployment for all tests that leave it whole."""
    with Children() as children:
        made = start(request.param, children)
        yield made
        assert [child.stop(60) for child in (made.prefill, made.decode)] == [0, 0], "both end by themselves, in order"


@pytest.fixture
def doomed():
    """A prefill and a decode engine for a test that kills one."""
    with Children() as children:
        extra = ["--kv-pages", str(PAGES), "--enable-faults", "--shutdown-grace", "100"]
        begun = [children.begin_engine(mode, model_path="tiny", extra=extra) for mode in ("prefill", "decode")]
        prefill, decode = [children.listening(child) for child in begun]
        yield Pair(children, prefill, decode, router=None, unified=None)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """After each test on the common deployment both engines are empty again."""
    yield
    if "pair" in request.fixturenames:
        until(request.getfixturevalue("pair").quiet)


GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def tokens(length, salt=0):
    return [(7 * i + salt) % 256 for i in range(length)]


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 600])
def test_tokens_equal_those_of_one_engine(pair, length):
    body = {"input_ids": tokens(length), "sampling_params": GREEDY}
    assert pair.generate(pair.router, **body)["output_ids"] == pair.generate(pair.unified, **body)["output_ids"]


def test_seeded_tokens_equal_those_of_one_engine(pair):
    sampling = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": tokens(20), "sampling_params": sampling}
    assert pair.generate(pair.router, **body)["output_ids"] == pair.generate(pair.unified, **body)["output_ids"]


def test_concurrent_requests_beyond_pages_get_right_tokens(pair):
    bodies = [{"input_ids": tokens(100 + 17 * k, k), "sampling_params": GREEDY} for k in range(24)]
    with ThreadPoolExecutor(24) as pool:
        split = list(pool.map(lambda body: pair.generate(pair.router, **body)["output_ids"], bodies))
    assert split == [pair.generate(pair.unified, **body)["output_ids"] for body in bodies]


def test_bytes_really_move(pair):
    def moved():
        return get_json(f"http://{pair.decode.addresses['admin']}/v1/state")["bytes_moved_total"]

    before = moved()
    pair.generate(pair.router, input_ids=tokens(160), sampling_params=GREEDY)
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4
    until(lambda: moved() - before >= 10 * page_bytes)


# ---------------------------------------------------------------------- through the router


@pytest.fixture(scope="module")
def client(pair):
    with openai.OpenAI(base_url=f"{pair.router.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_a_chat_streams(client):
    options = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = list(client.chat.completions.create(**options, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == whole


def test_chat_samples_have_rooms_of_their_own(client):
    answer = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=8, n=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1


def test_completion_samples_share_one_room(client):
    answer = client.completions.create(model="small", prompt="hello", temperature=0, max_tokens=8, n=3)
    assert len(answer.choices) == 3
    assert len({choice.text for choice in answer.choices}) == 1


def test_lists_of_prompts_are_answered_in_order(client):
    texts = ["abc", "xyz" * 9, "q"]
    both = client.completions.create(model="small", prompt=texts, temperature=0, n=2)
    alone = [client.completions.create(model="small", prompt=text, temperature=0).choices[0].text for text in texts]
    assert [choice.text for choice in both.choices] == [text for text in alone for _ in range(2)]


def test_generate_with_samples_and_with_batches(pair):
    sampled = pair.generate(pair.router, text="hello", sampling_params={**GREEDY, "n": 2})
    assert len(sampled) == 2
    assert sampled[0]["output_ids"] == sampled[1]["output_ids"]
    batch = pair.generate(pair.router, input_ids=[tokens(20), tokens(5)], sampling_params=GREEDY)
    alone = [pair.generate(pair.unified, input_ids=tokens(n), sampling_params=GREEDY)["output_ids"] for n in (20, 5)]
    assert [one["output_ids"] for one in batch] == alone
    batch_of_one = pair.generate(pair.router, input_ids=[tokens(5)], sampling_params=GREEDY)
    assert [one["output_ids"] for one in batch_of_one] == alone[1:]


def test_a_bad_request_comes_back_as_400(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="small", prompt="hello", max_tokens=100_000)


def test_request_without_room_is_refused(pair):
    for child in (pair.prefill, pair.decode):
        response = pair.post(child, "/generate", {"text": "hello"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "bootstrap_room"


def test_prefills_own_answer_is_one_token(pair):
    body = {"input_ids": tokens(20), "sampling_params": GREEDY, **pair.room()}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(pair.generate, child, **body) for child in (pair.prefill, pair.decode)]
    first, whole = (answer.result() for answer in answers)
    assert first["output_ids"] == whole["output_ids"][:1]
    assert first["meta_info"]["finish_reason"]["type"] == "length"


def test_metrics_name_the_side_and_include_the_connectors(pair):
    for child, side in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        text = web.get(child.url + "/metrics", timeout=30).text
        assert f'sglang:num_running_reqs{{engine_type="{side}",model_name="small"' in text
        assert "pdpool_connector_bytes_moved_total" in text


# ---------------------------------------------------------------------- ends


LONG = {"temperature": 0, "max_new_tokens": 8000, "ignore_eos": True}
"""Seconds of work for the tiny model: what a test does meanwhile happens meanwhile on a fast machine too."""


def test_client_that_leaves_frees_both_engines(pair):
    before = pair.aborted(pair.decode)
    body = {"input_ids": tokens(64), "sampling_params": LONG, "stream": True}
    with web.stream("POST", pair.router.url + "/generate", json=body, timeout=120) as response:
        lines = response.iter_lines()  # kept, for the client leaves when the iterator goes
        next(lines)
        assert pair.load(pair.decode)["num_used_tokens"] > 0
    until(pair.quiet)
    assert pair.aborted(pair.decode) == before + 1, "it did not just run to its end"


def test_client_that_leaves_waiting_decode_frees_both(pair):
    pair.fault(pair.prefill, freeze_scheduler=True)
    try:
        body = {"input_ids": tokens(64), "sampling_params": GREEDY}
        client = http.client.HTTPConnection(urlsplit(pair.router.url).netloc, timeout=60)
        client.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        until(lambda: pair.load(pair.decode)["num_used_tokens"] > 0)
        client.close()
        until(lambda: pair.load(pair.decode)["num_used_tokens"] == 0)
    finally:
        pair.fault(pair.prefill, freeze_scheduler=False)
    until(pair.quiet)


def test_many_leaving_clients_spoil_no_answer(pair):
    rng = random.Random(5)
    bodies = {n: {"input_ids": tokens(n), "sampling_params": GREEDY} for n in (3, 16, 40, 200)}
    right = {n: pair.generate(pair.unified, **body)["output_ids"] for n, body in bodies.items()}
    calls = [(rng.choice(list(bodies)), rng.choice([None, 0.005, 0.02, 0.05])) for _ in range(150)]

    def ask(length, patience):
        try:
            response = pair.post(pair.router, "/generate", bodies[length], timeout=patience or 120)
        except httpx.TimeoutException:
            return patience is not None
        return response.status_code == 200 and response.json()["output_ids"] == right[length]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda call: ask(*call), calls))
    until(pair.quiet)
    for child in (pair.prefill, pair.decode):
        state = get_json(f"http://{child.addresses['admin']}/v1/state")
        assert state["holds"] == 0
        assert state["faults"] == 0


def test_abort_at_prefill_ends_decodes_half(pair):
    body = {"input_ids": tokens(64), "sampling_params": GREEDY, **pair.room()}
    with ThreadPoolExecutor(1) as pool:
        pair.fault(pair.decode, drop_handoff=True)
        try:
            prefill = pool.submit(pair.post, pair.prefill, "/generate", body)
            until(lambda: pair.load(pair.prefill)["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1)
            assert pair.post(pair.prefill, "/abort_request", {"abort_all": True}).json() == {"aborted": 1}
            assert prefill.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        finally:
            pair.fault(pair.decode, drop_handoff=False)
        decode = pair.post(pair.decode, "/generate", body)
    assert decode.status_code == 502
    assert decode.json()["error"]["code"] == "peer_aborted"


def test_frozen_decode_fills_bootstrap_queue(pair):
    bodies = [{"input_ids": tokens(30, k), "sampling_params": GREEDY} for k in range(6)]
    with ThreadPoolExecutor(6) as pool:
        pair.fault(pair.decode, freeze_scheduler=True)
        try:
            answers = [pool.submit(pair.generate, pair.router, **body) for body in bodies]
            until(lambda: pair.load(pair.prefill)["disaggregation"]["prefill_bootstrap_queue_reqs"] == 6)
            state = get_json(f"http://{pair.decode.addresses['admin']}/v1/state")
            assert state["engine_beat_age_s"] > 0, "the connector answers though its engine stands still"
        finally:
            pair.fault(pair.decode, freeze_scheduler=False)
        split = [answer.result()["output_ids"] for answer in answers]
    assert split == [pair.generate(pair.unified, **body)["output_ids"] for body in bodies]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("fault", [{"drop_handoff": True}, {"stop_status": True}, {"delay_handoff_s": 0.5}])
def test_a_handoff_outlives_lost_and_late_messages(pair, side, fault):
    child = getattr(pair, side)
    body = {"input_ids": tokens(64), "sampling_params": GREEDY}
    with ThreadPoolExecutor(1) as pool:
        pair.fault(child, **fault)
        try:
            answer = pool.submit(pair.generate, pair.router, **body)
            time.sleep(1.0)
        finally:
            pair.fault(child, drop_handoff=False, stop_status=False, delay_handoff_s=0)
        assert answer.result()["output_ids"] == pair.generate(pair.unified, **body)["output_ids"]


def test_killed_decode_ends_prefills_request(doomed):
    body = {"input_ids": tokens(64), "sampling_params": GREEDY, **doomed.room()}
    with ThreadPoolExecutor(2) as pool:
        prefill = pool.submit(doomed.post, doomed.prefill, "/generate", body)
        until(lambda: doomed.load(doomed.prefill)["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1)
        doomed.fault(doomed.prefill, freeze_scheduler=True)
        decode = pool.submit(doomed.post, doomed.decode, "/generate", body)
        admin = f"http://{doomed.prefill.addresses['admin']}/v1/state"
        until(lambda: [peer["attempts"] for peer in get_json(admin)["peers"]] == [1])
        doomed.decode.process.kill()
        assert isinstance(decode.exception(60), httpx.HTTPError)
        until(lambda: [peer["attempts"] for peer in get_json(admin)["peers"]] != [1])
        doomed.fault(doomed.prefill, freeze_scheduler=False)
        response = prefill.result(120)
    assert response.status_code == 502
    # Whichever is noticed first: that the process is gone, or that its memory is.
    assert response.json()["error"]["code"] == "peer_lost"
    until(lambda: doomed.load(doomed.prefill)["num_used_tokens"] == 0)


def test_killed_prefill_ends_decodes_request(doomed):
    warm = {"input_ids": tokens(8), "sampling_params": GREEDY, **doomed.room()}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(doomed.post, child, "/generate", warm) for child in (doomed.prefill, doomed.decode)]
        assert [answer.result().status_code for answer in answers] == [200, 200]
        body = {"input_ids": tokens(64), "sampling_params": GREEDY, **doomed.room()}
        waiting = pool.submit(doomed.post, doomed.decode, "/generate", body)
        until(lambda: doomed.load(doomed.decode)["disaggregation"]["decode_transfer_queue_reqs"] == 1)
        doomed.prefill.process.kill()
        response = waiting.result(120)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "peer_lost"


def test_sigterm_lets_a_handoff_end(doomed):
    body = {"input_ids": tokens(64), "sampling_params": GREEDY, **doomed.room()}
    children, admin = (doomed.prefill, doomed.decode), f"http://{doomed.prefill.addresses['admin']}/v1/state"
    doomed.fault(doomed.decode, freeze_scheduler=True)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(doomed.post, child, "/generate", body) for child in children]
        until(lambda: get_json(admin)["attempts"]["matched"]["reqs"] == 1)
        for child in children:
            child.process.send_signal(signal.SIGTERM)
        until(lambda: [get_status(child.url + "/health") for child in children] == [503, 503])
        doomed.fault(doomed.decode, freeze_scheduler=False)
        assert [answer.result().status_code for answer in answers] == [200, 200]
    assert len(answers[1].result().json()["output_ids"]) == 12
    assert [child.process.wait(60) for child in children] == [0, 0]


def test_host_outside_allowed_networks_is_refused(doomed):
    body = {"input_ids": tokens(8), "sampling_params": GREEDY, **doomed.room(), "bootstrap_host": "8.8.8.8"}
    response = doomed.post(doomed.decode, "/generate", body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "refused"


def test_prefill_that_exits_ends_decodes_request(doomed):
    body = {"input_ids": tokens(16), "sampling_params": GREEDY, **doomed.room()}
    with ThreadPoolExecutor(1) as pool:
        decode = pool.submit(doomed.post, doomed.decode, "/generate", body)
        admin = f"http://{doomed.prefill.addresses['admin']}/v1/state"
        until(lambda: [peer["attempts"] for peer in get_json(admin)["peers"]] == [1])
        doomed.prefill.process.send_signal(signal.SIGTERM)
        response = decode.result(120)
    assert response.status_code in (502, 503)
    assert doomed.prefill.process.wait(60) == 0
