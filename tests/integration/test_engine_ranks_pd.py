"""Hand-offs between engines of several ranks: the tokens of one engine, failures on all ranks, one frozen rank."""

import itertools
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pdpool_reference.demo.launch import Child, Children

from tests.integration.asking import get_json, load_of, web
from tests.waiting import until

PROMPTS = [[token % 250 for token in range(100, 100 + length)] for length in (1, 15, 16, 17, 300)]
ROOMS = itertools.count(5_000_000)


def generate(child: Child, **body) -> httpx.Response:
    return web.post(child.url + "/generate", json=body, timeout=120)


def handed_over(
    prefill: Child, decode: Child, prompt: list[int], tokens: int = 6, room: int | None = None
) -> tuple[httpx.Response, ...]:
    """Post to both sides, as the router does."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.addresses["bootstrap_port"],
        "bootstrap_room": next(ROOMS) if room is None else room,
    }
    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(lambda child: generate(child, **body), (prefill, decode)))


def begin(
    children: Children,
    mode: str,
    *more: str,
    tp: int = 1,
    pp: int = 1,
    backend: str = "local",
    model_path: str = "tiny",
) -> Child:
    extra = ["--kv-pages", "128", "--enable-faults", "--tp-size", str(tp), "--pp-size", str(pp), *more]
    return children.begin_engine(mode, model_path=model_path, backend=backend, extra=extra)


def states(child: Child) -> list[dict[str, Any]]:
    """The state of each rank's connector."""
    admins = [child.addresses["admin"], *(rank["admin"] for rank in child.addresses.get("ranks", {}).values())]
    return [get_json(f"http://{admin}/v1/state") for admin in admins]


def set_faults(child: Child, **faults: object) -> None:
    web.post(child.url + "/faults", json=faults, timeout=30).raise_for_status()


def quiet(child: Child) -> bool:
    load = load_of(child.url)
    queues = {name: reqs for name, reqs in load["disaggregation"].items() if name != "mode"}
    live = [queue["reqs"] for state in states(child) for queue in state["queues"].values()]
    return not any(queues.values()) and not any(live) and not load["num_used_tokens"]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with Children() as children:
        unified = children.engine("unified", model_path="tiny")
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        return [generate(unified, input_ids=p, sampling_params=sampling).json()["output_ids"] for p in PROMPTS]


@pytest.mark.parametrize(
    ("prefill_shape", "decode_shape", "backend"),
    [
        ({"tp": 2}, {"tp": 2}, "nixl"),
        ({"pp": 2}, {"pp": 2}, "local"),
        ({"tp": 2}, {"tp": 1}, "local"),
        ({"tp": 1}, {"tp": 2}, "nixl"),
        ({"pp": 2}, {"tp": 2}, "local"),
        ({"tp": 2, "pp": 2}, {"tp": 1}, "local"),
    ],
    ids=str,
)
def test_tokens_after_hand_off_equal_one_engine(prefill_shape, decode_shape, backend, expected) -> None:
    with Children() as children:
        begun = [
            begin(children, mode, backend=backend, **shape)
            for mode, shape in (("prefill", prefill_shape), ("decode", decode_shape))
        ]
        prefill, decode = [children.listening(child) for child in begun]
        for child, shape in ((prefill, prefill_shape), (decode, decode_shape)):
            info = get_json(child.url + "/server_info")
            assert (info["tp_size"], info["pp_size"]) == (shape.get("tp", 1), shape.get("pp", 1))
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            for answer in handed_over(prefill, decode, prompt):
                assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == tokens
        until(lambda: quiet(prefill) and quiet(decode))
        assert [child.stop(60) for child in (prefill, decode)] == [0, 0]


def test_thawed_rank_completes_waiting_request(expected) -> None:
    with Children() as children:
        begun = [begin(children, mode, tp=2) for mode in ("prefill", "decode")]
        prefill, decode = [children.listening(child) for child in begun]
        set_faults(decode, freeze_ranks=[1])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handed_over, prefill, decode, PROMPTS[4])
            until(lambda: load_of(decode.url)["disaggregation"]["decode_transfer_queue_reqs"] == 1)
            frozen = decode.addresses["ranks"]["1"]["admin"]
            until(lambda: get_json(f"http://{frozen}/v1/state")["engine_beat_age_s"] > 1.5)
            set_faults(decode, freeze_ranks=[])
            answers = waiting.result(120)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[1].json()["output_ids"] == expected[4]
        until(lambda: quiet(prefill) and quiet(decode))


def test_failure_at_one_rank_ends_all(expected) -> None:
    """A decode rank that hangs as a whole: only prefill's rank 1 misses its half."""
    with Children() as children:
        begun = [begin(children, mode, tp=2) for mode in ("prefill", "decode")]
        prefill, decode = both = [children.listening(child) for child in begun]
        assert handed_over(prefill, decode, PROMPTS[0])[1].json()["output_ids"] == expected[0]  # all ranks are paired
        until(lambda: quiet(prefill) and quiet(decode))
        room, (hung,) = next(ROOMS), ranks_of(decode)
        os.kill(hung, signal.SIGSTOP)
        try:
            answers = handed_over(prefill, decode, PROMPTS[4], room=room)
        finally:
            os.kill(hung, signal.SIGCONT)
        errors = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
        assert errors == [(504, "timed_out"), (502, "peer_aborted")]
        assert "rank 1" in answers[0].json()["error"]["message"]
        # The rank that was stopped may begin its half only now.
        until(lambda: all(sum(rank["causes"].values()) == 1 for child in both for rank in states(child)))
        until(lambda: quiet(prefill) and quiet(decode))
        for child in both:
            for rank in states(child):
                assert sum(rank["causes"].values()) == 1
                line = rf"{rank['role']} rank={rank['rank']} attempt=\S+ room={room} request_id='\S+'(?!.* released: )"
                assert len(re.findall(line, child.log.read_text())) == 1
        assert handed_over(prefill, decode, PROMPTS[4])[1].json()["output_ids"] == expected[4]
        until(lambda: quiet(prefill) and quiet(decode))


@pytest.mark.parametrize("fault", ["drop_handoff", "stop_status", "delay_handoff_s"])
def test_frame_fault_affects_every_rank(expected, fault) -> None:
    with Children() as children:
        begun = [begin(children, mode, tp=2) for mode in ("prefill", "decode")]
        prefill, decode = [children.listening(child) for child in begun]
        assert handed_over(prefill, decode, PROMPTS[4])[1].status_code == 200
        set_faults(prefill, **{fault: 60.0 if fault == "delay_handoff_s" else True})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handed_over, prefill, decode, PROMPTS[4])
            until(lambda: all(unanswered_s(rank) > 1.0 for rank in states(decode)))
            set_faults(prefill, drop_handoff=False, stop_status=False, delay_handoff_s=0)
            answers = waiting.result(120)
        assert answers[1].json()["output_ids"] == expected[4]
        until(lambda: quiet(prefill) and quiet(decode))


def unanswered_s(state: dict[str, Any]) -> float:
    """Age in seconds of the oldest hand-off of a decode rank that has not ended."""
    return max(state["attempts"][name]["oldest_s"] or 0.0 for name in ("opened", "offered"))


def test_engine_metrics_cover_all_ranks() -> None:
    """Prometheus scrapes one port of an engine, so that every rank's metrics must be there."""
    with Children() as children:
        child = children.listening(begin(children, "decode", tp=2))

        def ranks() -> list[str]:
            text = web.get(child.url + "/metrics", timeout=30).text
            return re.findall(r'\npdpool_connector_checksums_total\{outcome="mismatched",rank="(\d+)"\} 0', text)

        until(lambda: ranks() == ["0", "1"])


def test_absent_rank_cannot_be_frozen() -> None:
    with Children() as children:
        unified = children.listening(begin(children, "unified"))
        answer = web.post(unified.url + "/faults", json={"freeze_ranks": [1]}, timeout=30)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "freeze_ranks names 1: this engine has one rank (--tp-size)"


def test_model_that_cannot_be_cut_is_refused() -> None:
    with Children() as children:
        child = begin(children, "prefill", tp=4)
        assert child.process.wait(60) == 1
        assert "tp-size is 4, must divide the model's 2 KV heads" in child.end_of_log()


def ranks_of(child: Child) -> list[int]:
    """The processes of its other ranks."""
    pids = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_loss_of_rank_ends_idle_engine() -> None:
    with Children() as children, ThreadPoolExecutor(1) as pool:
        prefill = children.listening(begin(children, "prefill", tp=2))
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.addresses["bootstrap_port"]}
        waiting = pool.submit(generate, prefill, text="abc", bootstrap_room=next(ROOMS), **where)
        until(lambda: load_of(prefill.url)["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1)
        (rank,) = ranks_of(prefill)
        os.kill(rank, signal.SIGKILL)
        answer = waiting.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crashed")
        assert prefill.process.wait(60) == 1
