"""Prefill engines that compute prompts before decode has come for them, as processes over a real data plane."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pdpool_reference.demo.launch import Children

from tests.integration.asking import load_of, web

ROOMS = itertools.count(7_000_000)
PAGES = 16
PROMPT = list(range(1, 161))
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def children():
    with Children() as started:
        yield started


def ask(child, prompt, where):
    body = {"input_ids": prompt, "sampling_params": SAMPLING, **where}
    return web.post(child.url + "/generate", json=body, timeout=120)


def until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def computed(child):
    lines = web.get(child.url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:prompt_tokens_total{"))


@pytest.mark.parametrize(("backend", "ranks"), [("nixl", ()), ("mooncake", ()), ("local", ("--tp-size", "2"))])
def test_prompts_are_computed_before_decode_comes_and_answers_are_the_same(children, backend, ranks):
    extra = ("--kv-pages", str(PAGES), *ranks)
    start = {"model_path": "tiny", "backend": backend}
    prefill = children.engine("prefill", extra=("--optimistic-prefill", "4", *extra), **start)
    decode = children.engine("decode", extra=extra, **start)
    unified = children.engine("unified", extra=("--kv-pages", str(PAGES)), **start)

    def room():
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.addresses["bootstrap_port"],
            "bootstrap_room": next(ROOMS),
        }

    def waiting():
        return load_of(prefill.url)["disaggregation"]["prefill_bootstrap_queue_reqs"]

    wanted = ask(unified, PROMPT, {}).json()["output_ids"]
    with ThreadPoolExecutor(4) as pool:
        where = room()
        early = pool.submit(ask, prefill, PROMPT, where)
        until(lambda: computed(prefill) == len(PROMPT))
        assert (waiting(), early.done()) == (1, False), "it still waits for decode, and is counted there"
        late = ask(decode, PROMPT, where)
        assert (late.status_code, late.json()["output_ids"]) == (200, wanted)
        assert early.result().status_code == 200

        # One that no decode comes for has most of the pages when another needs them.
        lost = room()
        orphan = pool.submit(ask, prefill, PROMPT[::-1], lost)
        until(lambda: computed(prefill) == 2 * len(PROMPT))
        where = room()
        halves = [pool.submit(ask, child, PROMPT, where) for child in (decode, prefill)]
        assert [half.result().status_code for half in halves] == [200, 200]
        assert halves[0].result().json()["output_ids"] == wanted
        assert (waiting(), orphan.done()) == (1, False)
        assert ask(decode, PROMPT[::-1], lost).status_code == 200
        assert orphan.result().status_code == 200
    until(lambda: load_of(prefill.url)["num_used_tokens"] == 0)
