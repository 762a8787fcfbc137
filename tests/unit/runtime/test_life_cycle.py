"""Start, close, and what survives faults and interrupts in between."""

import http.client
import json
import socket
import threading
import time

import pytest
from pdpool_connector import Cause, ConnectorConfig, DecodeConnector, KVMemory, Phase, PrefillConnector, Timeouts
from pdpool_connector.agent.__main__ import main as agent
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.stats_publisher import StatsPublisher
from pdpool_connector.transport.curve import make_key
from pdpool_connector.transport.http import HttpServer
from pdpool_reference.demo.launch import free_port
from prometheus_client import CollectorRegistry


def test_open_before_start_is_refused(memory: KVMemory) -> None:
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory)
    with pytest.raises(RuntimeError, match="not started"):
        connector.open(1, "r")
    connector.close()


def test_connector_starts_once(memory: KVMemory, prefill: PrefillConnector) -> None:
    with pytest.raises(RuntimeError, match="the prefill connector was started: make another"):
        prefill.start()
    closed = DecodeConnector(ConnectorConfig("127.0.0.1"), memory)
    closed.close()
    with pytest.raises(RuntimeError, match="the decode connector was closed: make another"):
        closed.start()


def test_open_after_close_fails_at_once(memory: KVMemory) -> None:
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory)
    connector.start()
    waiting = connector.open(1, "r")
    connector.close()
    connector.close()
    assert (waiting.status.cause, waiting.status.releasable) == (Cause.SHUTDOWN, True)
    late = connector.open(2, "r")
    assert (late.status.cause, late.status.releasable) == (Cause.SHUTDOWN, True)
    late.abort()
    connector.beat()
    assert connector.stats().outcomes["failed"] == 1


def test_pause_is_shown_until_a_beat_without_one(prefill: PrefillConnector) -> None:
    shown = [prefill.stats().engine_paused]
    for paused in (True, False):
        prefill.beat(paused=paused)
        shown.append(prefill.stats().engine_paused)
    assert shown == [False, True, False]


def test_idle_engine_counts_as_alive_until_its_next_beat(prefill: PrefillConnector) -> None:
    ages = []
    for idle in (True, False):
        prefill.beat(idle=idle)
        time.sleep(0.02)
        ages.append(prefill.stats().engine_beat_age_s)
    assert ages[0] == 0.0
    assert ages[1] >= 0.02


def test_request_that_an_idle_engine_does_not_get_ends_soon(memory: KVMemory) -> None:
    config = ConnectorConfig("127.0.0.1", timeouts=Timeouts(engine_match_s=0.3, engine_look_s=0.05))
    with PrefillConnector(config, memory) as prefill, DecodeConnector(config, memory) as decode:
        prefill.beat(idle=True)
        transfer = decode.open(prefill.bootstrap_address, 1, "r")
        transfer.offer([0], aux_slot=0)
        assert transfer.wait(timeout_s=5.0).phase is Phase.FAILED


def test_decode_open_after_close_is_releasable(memory: KVMemory) -> None:
    connector = DecodeConnector(ConnectorConfig("127.0.0.1"), memory)
    connector.start()
    connector.close()
    late = connector.open("127.0.0.1:9", 2, "r")
    assert (late.status.cause, late.status.releasable) == (Cause.SHUTDOWN, True)


def test_taken_port_leaves_nothing_behind(memory: KVMemory, prefill: PrefillConnector) -> None:
    before = set(threading.enumerate())
    taken = int(prefill.control_address.rpartition(":")[2])
    other = PrefillConnector(ConnectorConfig("127.0.0.1", control_port=taken), memory)
    with pytest.raises(OSError, match="in use"):
        other.start()
    other.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
def test_start_may_follow_a_taken_port(memory: KVMemory, kind, tmp_path) -> None:
    before = set(threading.enumerate())
    config = {"curve": (make_key(),), "flight_dir": tmp_path}
    with socket.create_server(("0.0.0.0", free_port())) as taken:  # no other process gets it once it is free
        one = kind(ConnectorConfig("127.0.0.1", control_port=taken.getsockname()[1], **config), memory)
        with pytest.raises(OSError, match="in use"):
            one.start()
        with pytest.raises(RuntimeError, match="control_address is known once the connector is started"):
            assert one.control_address
    one.start()
    assert one.control_address.endswith(f":{one.config.control_port}")
    one.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
def test_with_block_starts_and_closes(memory: KVMemory, kind) -> None:
    with kind(ConnectorConfig("127.0.0.1"), memory) as connector:
        address = connector.control_address
        _dial(address).close()
        with pytest.raises(RuntimeError, match="connector was started: make another"), connector:
            raise AssertionError("a connector that runs was started again")
        _dial(address).close()
    _wait(lambda: _refuses(address))


def test_with_block_that_cannot_start_closes(memory: KVMemory, prefill) -> None:
    taken = int(prefill.control_address.rpartition(":")[2])
    other = PrefillConnector(ConnectorConfig("127.0.0.1", control_port=taken), memory)
    with pytest.raises(OSError, match="in use"), other:
        raise AssertionError("it started on a port that is taken")
    with pytest.raises(RuntimeError, match="connector was closed: make another"):
        other.start()


def test_start_may_follow_a_missing_thread(memory: KVMemory, monkeypatch) -> None:
    begin = threading.Thread.start

    def one_too_many(thread: threading.Thread) -> None:
        if thread.name == "pdpool-prefill":
            raise RuntimeError("can't start new thread")
        begin(thread)

    one = PrefillConnector(ConnectorConfig("127.0.0.1"), memory)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", one_too_many)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            one.start()
    one.start()
    transfer = one.open(1, "r")
    one.close()
    assert transfer.status.cause is Cause.SHUTDOWN


def test_connector_without_start_leaves_no_thread(memory: KVMemory, tmp_path) -> None:
    before = set(threading.enumerate())
    PrefillConnector(ConnectorConfig("127.0.0.1", flight_dir=str(tmp_path)), memory).close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
@pytest.mark.parametrize("step", [(StatsPublisher, "refresh"), (HttpServer, "serve"), (Reactor, "start")])
def test_interrupted_start_can_be_closed(memory: KVMemory, kind, step, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    one = kind(ConnectorConfig("127.0.0.1", admin_port=0), memory)
    with monkeypatch.context() as patch:
        patch.setattr(*step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.start()
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert set(threading.enumerate()) <= before


def test_open_while_closing_ends_too(memory: KVMemory, monkeypatch) -> None:
    one = PrefillConnector(ConnectorConfig("127.0.0.1"), memory)
    one.start()
    step = Reactor.step

    def overtaken(reactor, call) -> None:
        """The thread that opens is stopped for as long as another takes to close."""
        closing = threading.Thread(target=one.close)
        closing.start()
        closing.join(30)
        step(reactor, call)

    monkeypatch.setattr(Reactor, "step", overtaken)
    transfer = one.open(1, "r")
    assert (transfer.status.cause, transfer.status.releasable) == (Cause.SHUTDOWN, True)


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
@pytest.mark.parametrize("step", [(Reactor, "stop"), (HttpServer, "close"), (LocalBackend, "close")])
def test_interrupted_close_is_completed_by_the_next(memory: KVMemory, kind, step, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    registry = CollectorRegistry()
    one = kind(ConnectorConfig("127.0.0.1", curve=(make_key(),)), memory, lambda: None, registry)
    one.start()
    with monkeypatch.context() as patch:
        patch.setattr(*step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.close()
    one.close()
    assert set(threading.enumerate()) <= before
    assert not list(registry.collect())


def test_second_close_waits_for_the_first(memory: KVMemory) -> None:
    at_it, go_on = threading.Event(), threading.Event()

    class Slow(LocalBackend):
        def close(self) -> None:
            at_it.set()
            assert go_on.wait(30)
            super().close()

    one = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, backend=Slow())
    one.start()
    first, second = threading.Thread(target=one.close), threading.Thread(target=one.close)
    first.start()
    assert at_it.wait(30)
    second.start()
    second.join(0.05)
    assert second.is_alive(), "the memory is still in use"
    go_on.set()
    for thread in (first, second):
        thread.join(30)
        assert not thread.is_alive()


def test_change_wakes_the_engine(memory: KVMemory) -> None:
    changed = threading.Event()
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, changed.set)
    connector.start()
    transfer = connector.open(1, "r")
    transfer.abort()
    deadline = time.monotonic() + 30
    while not transfer.status.ended:
        assert changed.wait(deadline - time.monotonic())
        changed.clear()
    assert transfer.status.cause is Cause.ABORTED
    connector.close()


def test_callback_that_raises_ends_nothing(memory: KVMemory) -> None:
    def raises() -> None:
        raise RuntimeError("the engine's own fault")

    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, raises)
    connector.start()
    for room in range(3):
        transfer = connector.open(room, "r")
        transfer.abort()
        _wait(lambda transfer=transfer: transfer.status.ended)
    _wait(lambda: connector.stats().faults >= 3)
    connector.close()


def test_stuck_turn_shows_as_lag(memory: KVMemory) -> None:
    registry, go_on, this = CollectorRegistry(), threading.Event(), threading.current_thread()

    def block_the_loop() -> None:
        if threading.current_thread() is not this:
            go_on.wait(60)

    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, block_the_loop, registry)
    connector.start()
    try:
        connector.open(1, "r", deadline_s=0.01)
        _wait(lambda: connector.stats().loop_lag_s >= 0.3)
        assert registry.get_sample_value("pdpool_connector_loop_lag_seconds", {"rank": "0"}) >= 0.3
    finally:
        go_on.set()
        connector.close()


def test_metrics_are_registered_and_removed(memory: KVMemory) -> None:
    registry = CollectorRegistry()
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None, registry)
    connector.start()
    connector.open(1, "r")
    series = "pdpool_connector_attempts", {"rank": "0", "state": "waiting"}
    _wait(lambda: registry.get_sample_value(*series) == 1.0)
    connector.set_queue("decode_prealloc", 3, 1.5, 7)
    assert connector.stats().queues["decode_prealloc"].reqs == 3
    connector.close()
    assert registry.get_sample_value(*series) is None


def test_socket_drains_and_says_when_drained(memory: KVMemory, tmp_path) -> None:
    path, running = tmp_path / "admin.sock", [1]
    config = ConnectorConfig("127.0.0.1", admin_socket=path)
    with PrefillConnector(config, memory, running=lambda: running[0]) as connector:
        assert path.stat().st_mode & 0o777 == 0o600
        before = connector.open(1, "r")
        assert _drain(path, "GET") | {"queues": {}} == {
            "draining": False,
            "drained": False,
            "running": 1,
            "queues": {},
            "holds": 0,
        }
        assert _drain(path, "POST")["draining"] is connector.draining is True
        assert connector.open(2, "late").wait(30).cause is Cause.REFUSED
        before.abort()
        before.wait_released(30)
        _wait(lambda: connector.stats().drained)
        assert not _drain(path, "GET")["drained"]
        running[0] = 0
        assert _drain(path, "GET")["drained"]
        with pytest.raises(SystemExit, match="0"):
            agent(["drain", "--socket", str(path), "--deadline", "30"])
    assert not path.exists()


def test_drain_that_waits_first_takes_requests_meanwhile(memory: KVMemory, tmp_path) -> None:
    path = tmp_path / "admin.sock"
    with PrefillConnector(ConnectorConfig("127.0.0.1", admin_socket=path), memory) as connector:
        with pytest.raises(SystemExit, match="1"):  # the deadline includes the wait
            agent(["drain", "--socket", str(path), "--deadline", "0.5", "--after", "60"])
        assert not connector.draining
        with pytest.raises(SystemExit, match="0"):
            agent(["drain", "--socket", str(path), "--deadline", "60", "--after", "0.5"])
        assert connector.draining


def test_socket_left_behind_is_replaced(memory: KVMemory, tmp_path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with PrefillConnector(ConnectorConfig("127.0.0.1", admin_socket=path), memory):
        assert _drain(path, "GET")["draining"] is False
        other = DecodeConnector(ConnectorConfig("127.0.0.1", admin_socket=path), memory)
        with pytest.raises(OSError, match=r"admin\.sock is served by another process"):
            other.start()
        other.close()
        assert _drain(path, "GET")["draining"] is False


def _drain(path, method: str) -> dict:
    connection = http.client.HTTPConnection("connector")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request(method, "/drain")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def _dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 5)


def _refuses(address: str) -> bool:
    try:
        _dial(address).close()
    except ConnectionRefusedError:
        return True
    return False


def _wait(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
