"""The drain as a preStop hook uses it: the agent asks over the Unix socket and waits."""

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pdpool_reference.demo.launch import Children, get_status

from tests.integration.asking import admin_socket, drain_state, open_sequences, web
from tests.waiting import until

BODY = {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}


@pytest.fixture
def socket_path():
    with admin_socket() as path:
        yield path


@pytest.fixture
def prefill():
    with Children() as children:
        yield children.engine("prefill", model_path="tiny")


@pytest.fixture
def engine(socket_path):
    with Children() as children:
        extra = ["--admin-socket", str(socket_path), "--enable-faults"]
        yield children.engine("decode", model_path="tiny", extra=extra)


def body_for(prefill, room=1):
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.addresses["bootstrap_port"]}
    return {**BODY, **place, "bootstrap_room": room}


def drain(path, deadline, *further):
    sockets = [word for one in (path, *further) for word in ("--socket", str(one))]
    command = [sys.executable, "-m", "pdpool_connector.agent", "drain", *sockets, "--deadline", deadline]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def freeze(engine, *, frozen):
    assert web.post(engine.url + "/faults", json={"freeze_scheduler": frozen}, timeout=30).status_code == 200


@contextlib.contextmanager
def taken(prefill, engine):
    """A request that the engine has and cannot begin, as its scheduler is frozen. Yields its answer to come."""
    freeze(engine, frozen=True)
    with ThreadPoolExecutor(2) as pool:
        try:
            pool.submit(web.post, prefill.url + "/generate", json=body_for(prefill), timeout=120)
            answer = pool.submit(web.post, engine.url + "/generate", json=body_for(prefill), timeout=120)
            until(lambda: open_sequences(engine.url) == 1)
            yield answer
        finally:
            freeze(engine, frozen=False)


def test_drain_waits_for_open_requests(prefill, engine, socket_path):
    with ThreadPoolExecutor(1) as pool:
        with taken(prefill, engine) as answer:
            draining = pool.submit(drain, socket_path, "60")
            until(lambda: drain_state(socket_path)["draining"])
            assert get_status(engine.url + "/health") == 503
        done = draining.result()
    assert done.returncode == 0, done.stderr
    assert "running=1" in done.stderr
    assert done.stderr.splitlines()[-1] == "drained"
    assert answer.result().json()["meta_info"]["completion_tokens"] == 40
    refused = web.post(engine.url + "/generate", json=body_for(prefill, room=2), timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert get_status(engine.url + "/health") == 503
    assert get_status(engine.url + "/ready") == 503
    assert engine.process.poll() is None, "a drain does not end the process"


@pytest.mark.parametrize("drained", ["prefill", "decode"])
def test_draining_engine_ends_the_other_half_at_once(drained, socket_path):
    with Children() as children, ThreadPoolExecutor(1) as pool:
        extra = {drained: ["--admin-socket", str(socket_path)]}
        pair = [children.engine(mode, model_path="tiny", extra=extra.get(mode, ())) for mode in ("prefill", "decode")]
        prefill = pair[0]
        for first in (pair, pair[::-1]):
            if first is pair:
                assert drain(socket_path, "60").returncode == 0
            begun, body = time.monotonic(), body_for(prefill, room=2 + (first is pair))
            early = pool.submit(web.post, first[0].url + "/generate", json=body, timeout=60)
            late = web.post(first[1].url + "/generate", json=body, timeout=60)
            answers = [late, early.result()]
            assert time.monotonic() - begun < 5.0
            assert [answer.status_code for answer in answers] == [503, 503]
            assert sorted(answer.json()["error"]["code"] for answer in answers) == ["draining", "refused"]


def test_late_drain_fails(prefill, engine, socket_path):
    with taken(prefill, engine):
        done = drain(socket_path, "1")
    assert done.returncode == 1
    assert "not drained within 1 s" in done.stderr


def test_drain_without_time_waits_for_nothing(prefill, engine, socket_path):
    with taken(prefill, engine):
        done = drain(socket_path, "0")
    assert done.returncode == 1
    assert done.stderr == "not drained within 0 s\n"


def test_absent_engine_is_named(socket_path):
    done = drain(socket_path, "5")
    assert done.returncode == 2
    assert str(socket_path) in done.stderr


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_idle_engine_drains_at_once(mode, socket_path):
    with Children() as children:
        engine = children.engine(mode, model_path="tiny", extra=["--admin-socket", str(socket_path)])
        assert drain(socket_path, "60").returncode == 0
        state = web.get(f"http://{engine.addresses['admin']}/v1/state", timeout=30).json()
        assert state["draining"] is True


def test_socket_of_killed_engine_is_replaced(socket_path):
    for _ in range(2):
        with Children() as children:
            engine = children.engine("decode", model_path="tiny", extra=["--admin-socket", str(socket_path)])
            assert drain(socket_path, "60").returncode == 0
            engine.process.kill()
            engine.process.wait(10)
        assert socket_path.exists()


def test_drain_of_several_sockets_waits_for_each(prefill, engine, socket_path):
    with admin_socket() as other, Children() as children, ThreadPoolExecutor(1) as pool:
        idle = children.engine("decode", model_path="tiny", extra=["--admin-socket", str(other)])
        with taken(prefill, engine):
            draining = pool.submit(drain, other, "60", socket_path)
            until(lambda: drain_state(other)["drained"] and drain_state(socket_path)["draining"])
            assert not draining.done()
        done = draining.result()
        assert (done.returncode, get_status(idle.url + "/health")) == (0, 503)
    assert f"{socket_path.name}: drained" in done.stderr.splitlines()


def test_drain_goes_on_beside_an_absent_engine(engine, socket_path):
    absent = socket_path.with_name("absent.sock")
    done = drain(absent, "60", socket_path)
    assert done.returncode == 2
    assert f"{socket_path.name}: drained" in done.stderr.splitlines()
    assert drain_state(socket_path)["drained"]
