"""The router image's entrypoint, run for real before two engines."""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from pdpool_reference.demo.launch import HOST, ROUTER_FLAGS, Children, free_port, get_status
from pdpool_reference.request_body import MAX_BODY_BYTES

from tests.integration.asking import PATIENT_ROUTER, open_sequences, web
from tests.waiting import until

SCRIPT = Path(__file__).parents[2] / "images" / "router" / "start_router.py"
KEY = "0123456789abcdef"
ADMIN = {"Authorization": f"Bearer {KEY}"}
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def engines():
    with Children() as children:
        yield [children.engine(mode, model_path="tiny") for mode in ("prefill", "decode")]


@contextlib.contextmanager
def router(tmp_path, workers, *more):
    """The entrypoint with this worker list. Yields process, URL and log file."""
    (tmp_path / "workers.json").write_text(json.dumps(workers))
    port, metrics_port = free_port(), free_port()
    addresses = ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
    (tmp_path / "router.key").write_text(KEY)
    files = {"PDPOOL_ROUTER_KEY_FILE": "router.key", "PDPOOL_ROUTER_WORKERS": "workers.json"}
    env = {**os.environ, **{name: str(tmp_path / file) for name, file in files.items()}}
    log = tmp_path / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *addresses, *PATIENT_ROUTER, *more], env=env, stdout=output, stderr=output
        )
    try:
        yield process, f"http://{HOST}:{port}", log
    finally:
        process.kill()
        process.wait(10)


def listed(url):
    return web.get(url + "/workers", headers=ADMIN, timeout=30).json()["workers"]


def as_workers(engines):
    prefill, decode = engines
    return {
        "prefill": [{"url": prefill.url, "bootstrap_port": prefill.addresses["bootstrap_port"]}],
        "decode": [{"url": decode.url}],
    }


def test_router_serves_at_once_from_stored_list(engines, tmp_path):
    with router(tmp_path, as_workers(engines)) as (process, url, log):
        until(lambda: get_status(url + "/readiness") == 200)
        assert web.post(url + "/generate", json=BODY, timeout=60).status_code == 200
        assert sorted(worker["url"] for worker in listed(url)) == sorted(engine.url for engine in engines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        text = log.read_text()
        assert KEY not in text
        assert "huggingface" not in text.lower()


def test_worker_list_changes_with_key_only(engines, tmp_path):
    with router(tmp_path, {"prefill": [], "decode": []}) as (_, url, _):
        until(lambda: get_status(url + "/liveness") == 200)
        assert get_status(url + "/readiness") == 503
        prefill, decode = as_workers(engines)["prefill"][0], as_workers(engines)["decode"][0]
        adds = [{**prefill, "worker_type": "prefill"}, {**decode, "worker_type": "decode"}]
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert web.get(url + "/workers", headers=headers, timeout=30).status_code in (401, 403)
            assert web.post(url + "/workers", json=adds[0], headers=headers, timeout=30).status_code in (401, 403)
        assert [web.post(url + "/workers", json=add, headers=ADMIN, timeout=30).status_code for add in adds] == [
            202,
            202,
        ]
        until(lambda: len(listed(url)) == 2 and get_status(url + "/readiness") == 200)
        assert web.post(url + "/generate", json=BODY, timeout=60).status_code == 200
        gone = next(worker["id"] for worker in listed(url) if worker["worker_type"] == "decode")
        assert web.delete(f"{url}/workers/{gone}", timeout=30).status_code in (401, 403)
        assert web.delete(f"{url}/workers/{gone}", headers=ADMIN, timeout=30).status_code == 202
        until(lambda: [worker["worker_type"] for worker in listed(url)] == ["prefill"])


TEXT = "text/plain; charset=utf-8"
REFUSALS = [
    ("GET", "/nowhere", {}, 404, None),
    ("POST", "/v1/chat/completions/", {}, 404, None),
    ("GET", "/v1/chat/completions", {}, 405, None),
    ("DELETE", "/generate", {}, 405, None),
    ("POST", "/v1/chat/completions", {"content": b"{}"}, 400, "application/json"),
    ("POST", "/v1/completions", {"content": b"{}"}, 415, TEXT),
    ("POST", "/generate", {"content": b"{}"}, 415, TEXT),
    ("POST", "/generate", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, TEXT),
    ("POST", "/v1/completions", {"json": {}}, 422, TEXT),
    ("POST", "/v1/embeddings", {"json": {"model": "m", "input": "x"}}, 501, TEXT),
    ("POST", "/v1/responses", {"json": {"model": "m", "input": "x"}}, 501, TEXT),
    ("GET", "/workers", {}, 401, TEXT),
    ("POST", "/generate", {"json": BODY}, 503, "application/json"),
]
"""What docs/errors.md says of the router: method, path, request, status and type of the answer's content."""


def test_refusals_of_router_are_as_documented(tmp_path):
    with router(tmp_path, {"prefill": [], "decode": []}) as (_, url, _):
        until(lambda: get_status(url + "/liveness") == 200)
        for method, path, request, status, kind in REFUSALS:
            answer = web.request(method, url + path, timeout=30, **request)
            assert (answer.status_code, answer.headers.get("content-type")) == (status, kind), (method, path)


TO_OPEN_A_CIRCUIT = 10
"""Failures in a row after which the router by its defaults leaves both partners alone for 60 s."""


def ask(url, patience=30.0, **fields):
    """Status of a request through the router; None when it fails or takes longer."""
    try:
        return web.post(url + "/generate", json={**BODY, **fields}, timeout=patience).status_code
    except httpx.TransportError:
        return None


def test_router_flags_set_body_limit_and_breaker():
    for flags in (list(runpy.run_path(str(SCRIPT))["FLAGS"]), list(ROUTER_FLAGS)):
        assert flags[flags.index("--max-payload-size") + 1] == str(MAX_BODY_BYTES)
        assert "--disable-circuit-breaker" in flags


def test_router_refuses_large_bodies(engines, tmp_path):
    with router(tmp_path, as_workers(engines)) as (_, url, _):
        until(lambda: get_status(url + "/readiness") == 200)

        def padded(length):  # in a field that the router hands on
            raw = json.dumps({**BODY, "extra_key": ""}).encode()
            return raw[:-2] + b"x" * (length - len(raw)) + raw[-2:]

        def post(raw):
            headers = {"Content-Type": "application/json"}
            return web.post(url + "/generate", content=raw, headers=headers, timeout=30).status_code

        assert [post(padded(MAX_BODY_BYTES + 1)) for _ in range(4)] == [413] * 4
        assert ask(url) == 200
        assert post(padded(MAX_BODY_BYTES)) == 200, "the engines take it with what the router adds"


def test_killed_decode_opens_no_circuit(engines, tmp_path):
    with Children() as children, ThreadPoolExecutor(26) as clients:
        doomed = children.engine("decode", model_path="tiny", extra=["--enable-faults"])
        workers = as_workers(engines)
        workers["decode"].append({"url": doomed.url})
        in_turn = ("--decode-policy", "round_robin")
        with router(tmp_path, workers, *in_turn) as (_, url, _):
            until(lambda: get_status(url + "/readiness") == 200)
            until(lambda: [worker["is_healthy"] for worker in listed(url)] == [True] * 3)
            # Not earlier: a scheduler frozen for 20 s makes /health answer 503, and then gets no requests.
            web.post(doomed.url + "/faults", json={"freeze_scheduler": True}, timeout=30).raise_for_status()
            for _ in range(26):
                clients.submit(ask, url, patience=120.0)
            until(lambda: open_sequences(doomed.url) > TO_OPEN_A_CIRCUIT)
            doomed.process.kill()
            until(lambda: not next(one for one in listed(url) if one["url"] == doomed.url)["is_healthy"])
            until(lambda: ask(url) == 200, seconds=30)  # a circuit would stay open for 60 s
            assert [ask(url) for _ in range(8)] == [200] * 8


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_router_needs_a_key(tmp_path, content):
    file = tmp_path / "router.key"
    if content is not None:
        file.write_text(content)
    env = {**os.environ, "PDPOOL_ROUTER_KEY_FILE": str(file)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"PDPOOL_ROUTER_KEY_FILE {file}" in done.stderr


def test_router_key_is_not_visible_in_proc(tmp_path):
    with router(tmp_path, {"prefill": [], "decode": []}) as (process, url, _):
        until(lambda: get_status(url + "/liveness") == 200)
        for file in ("cmdline", "environ"):
            assert KEY.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        ("--policy=cache_aware", "--decode-policy=cache_aware", "--cache-threshold=0.3"),
        ("--decode-policy=round_robin",),
        ("--policy=random",),
    ],
    ids=" ".join,
)
def test_router_serves_with_each_policy(engines, tmp_path, flags):
    with router(tmp_path, {"prefill": [], "decode": []}, *flags) as (_, url, _):
        until(lambda: get_status(url + "/liveness") == 200)
        prefill, decode = as_workers(engines)["prefill"][0], as_workers(engines)["decode"][0]
        for add in ({**prefill, "worker_type": "prefill"}, {**decode, "worker_type": "decode"}):
            assert web.post(url + "/workers", json=add, headers=ADMIN, timeout=30).status_code == 202
        until(lambda: get_status(url + "/readiness") == 200)
        assert [ask(url) for _ in range(4)] == [200] * 4
