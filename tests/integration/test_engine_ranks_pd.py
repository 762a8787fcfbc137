"""Hand-offs between engines of several ranks: the tokens of one engine, failures on all ranks, one frozen rank."""

import itertools
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pdpool_connector.transport.tokens import sign_operation
from pdpool_reference.demo.launch import Child, Children

from tests.integration.asking import get_json, load_of, web
from tests.integration.small_side import until

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
    """What the connector of each rank says of itself."""
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
def test_tokens_after_the_hand_off_are_those_of_one_engine(prefill_shape, decode_shape, backend, expected) -> None:
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


def test_one_frozen_rank_stops_the_engine_and_nothing_is_lost_when_it_thaws(expected) -> None:
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


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_rank_that_fails_a_request_alone_ends_it_on_all_with_one_error_for_each_client(
    expected, tmp_path, victim, shape
) -> None:
    """By the operator's order to abort the room, given to the connector of one rank only."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(32))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "operator.pem").write_bytes(public)
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with Children() as children:
        keys = ("--pod-uid", "pod-1", "--operator-key", str(tmp_path / "operator.pem"))
        begun = [begin(children, mode, *keys, **shape) for mode in ("prefill", "decode")]
        prefill, decode = both = [children.listening(child) for child in begun]
        assert handed_over(prefill, decode, PROMPTS[0])[1].json()["output_ids"] == expected[0]  # all ranks are paired
        until(lambda: quiet(prefill) and quiet(decode))
        room = next(ROOMS)
        set_faults(decode, drop_handoff=True)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handed_over, prefill, decode, PROMPTS[4], room=room)
            until(lambda: all(rank["attempts"]["waiting"]["reqs"] == 1 for rank in states(prefill)))
            until(lambda: all(unanswered_s(rank) > 0.2 for rank in states(decode)))
            failing = prefill if victim == "prefill" else decode
            token = sign_operation(secret, "pod-1", "abort", "a test", "1", time.time())
            told = web.post(
                f"http://{failing.addresses['ranks']['1']['admin']}/v1/abort",
                json={"room": room},
                headers={"Authorization": token},
                timeout=30,
            )
            assert told.status_code == 200, told.text
            set_faults(decode, drop_handoff=False)
            answers = dict(zip(("prefill", "decode"), waiting.result(120), strict=True))
        errors = {side: (answer.status_code, answer.json()["error"]["code"]) for side, answer in answers.items()}
        assert errors.pop(victim) == (503, "aborted")
        assert list(errors.values()) == [(502, "peer_aborted")]
        assert "rank 1" in answers[victim].json()["error"]["message"]
        until(lambda: quiet(prefill) and quiet(decode))
        for child in both:
            for rank in states(child):
                assert rank["outcomes"] == {"done": 1, "failed": 0, "aborted": 1}
                assert sum(rank["causes"].values()) == 1
                line = rf"{rank['role']} rank={rank['rank']} attempt=\S+ room={room} request_id='\S+'.* aborted: "
                assert len(re.findall(line, child.log.read_text())) == 1
        assert handed_over(prefill, decode, PROMPTS[4])[1].json()["output_ids"] == expected[4]
        until(lambda: quiet(prefill) and quiet(decode))


@pytest.mark.parametrize("fault", ["drop_handoff", "stop_status", "delay_handoff_s"])
def test_a_fault_of_frames_meets_every_rank(expected, fault) -> None:
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
    """For how long a rank of decode's has had no word from prefill on its oldest hand-off."""
    return state["attempts"]["opening"]["oldest_s"] or 0.0


def test_the_engine_s_metrics_have_the_connectors_of_all_ranks() -> None:
    """One port of an engine is scraped: what a rank alone sees, as cache that came corrupted, has to be told there."""
    with Children() as children:
        child = children.listening(begin(children, "decode", tp=2))

        def ranks() -> list[str]:
            text = web.get(child.url + "/metrics", timeout=30).text
            return re.findall(r'\npdpool_connector_checksums_total\{outcome="mismatched",rank="(\d+)"\} 0', text)

        until(lambda: ranks() == ["0", "1"])


def test_ranks_that_are_not_there_cannot_be_frozen() -> None:
    with Children() as children:
        unified = children.listening(begin(children, "unified"))
        answer = web.post(unified.url + "/faults", json={"freeze_ranks": [1]}, timeout=30)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "freeze_ranks names 1: this engine has one rank (--tp-size)"


def test_a_model_that_cannot_be_cut_so_is_refused_in_one_line() -> None:
    with Children() as children:
        child = begin(children, "prefill", tp=4)
        assert child.process.wait(60) == 1
        assert "tp-size is 4, must divide the model's 2 KV heads" in child.log_tail()


def ranks_of(child: Child) -> list[int]:
    """The processes of its other ranks."""
    pids = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_the_loss_of_a_rank_ends_an_engine_that_computes_nothing_and_its_clients_are_told() -> None:
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
