"""What the API refuses at once, with words that help."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from pdpool_connector import (
    Cause,
    ConnectorConfig,
    DecodeConnector,
    HostArena,
    KVMemory,
    Phase,
    PrefillConnector,
    shard_model,
)
from prometheus_client import CollectorRegistry


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    with HostArena(2 * 8 * 256 + 4 * 64) as arena:
        yield KVMemory(
            kv=(arena.region(0, 256, 8), arena.region(8 * 256, 256, 8)),
            aux=arena.region(2 * 8 * 256, 64, 4),
            page_tokens=16,
            layers=1,
            kv_heads=1,
            head_dim=4,
            dtype="float32",
            model="m",
        )


@pytest.fixture
def prefill(memory: KVMemory) -> Iterator[PrefillConnector]:
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    connector.start()
    yield connector
    connector.close()


@pytest.fixture
def decode(memory: KVMemory) -> Iterator[DecodeConnector]:
    connector = DecodeConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    connector.start()
    yield connector
    connector.close()


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"advertise_host": ""}, "advertise_host"),
        ({"control_port": 70000}, "control_port"),
        ({"admin_port": -1}, "admin_port"),
        ({"rank": 1}, "rank=1 is out of range"),
        ({"rank": 2, "instance": shard_model([1, 1], 2)}, "rank=2 is out of range: instance has the parts of 2 ranks"),
        ({"instance": shard_model([1, 1], 2)[1:]}, "layers of instance: from 0 to 0 no rank holds them"),
        ({"registry": "somewhere"}, "registry: 'somewhere' is no address"),
        ({"direction": "both"}, "direction='both'"),
        ({"request_deadline_s": 0}, "request_deadline_s"),
        ({"backend": "carrier pigeon"}, "backend"),
        ({"allowed_networks": ("10.0.0.1/8",)}, "allowed_networks"),
        ({"rank": -1}, "rank"),
        ({"checksum_rate": 1.5}, "checksum_rate"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ConnectorConfig(**({"advertise_host": "127.0.0.1"} | changes))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"room": -1}, "room"),
        ({"room": 2**63}, "room"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"sibling": -1}, "sibling"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_open_refuses_what_no_frame_can_carry(prefill: PrefillConnector, arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        prefill.open(**({"room": 1, "request_id": "r"} | arguments))


@pytest.mark.parametrize(
    ("send", "word"),
    [
        ({"pages": pages(8)}, "pages"),
        ({"pages": pages(-1)}, "pages"),
        ({"pages": np.array([1.0])}, "pages"),
        ({"pages": pages(1)[None]}, "pages"),
        ({"start": -1}, "start"),
        ({"aux_slot": 1}, "last"),
        ({"aux_slot": 4, "last": True}, "aux_slot"),
        ({"state": pages()}, "last"),
        ({"state": pages(0), "last": True}, "state holds 0, the memory has no state items"),
    ],
)
def test_send_refuses_what_lies_outside_the_memory(prefill: PrefillConnector, send: dict, word: str) -> None:
    transfer = prefill.open(1, "r")
    with pytest.raises(ValueError, match=word):
        transfer.send(**({"pages": pages(1), "start": 0} | send))


def test_a_send_after_the_last_is_refused_and_harms_nothing(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    taken = decode.open(prefill.bootstrap_address, 1, "r", pages=pages(1), aux_slot=0)
    transfer = prefill.open(1, "r")
    transfer.send(pages(2), start=0, last=True, aux_slot=1)
    with pytest.raises(ValueError, match=r"send\(\) after the send with last=True of room 1"):
        transfer.send(pages(2), start=1, last=True, aux_slot=1)
    _wait(lambda: transfer.status.ended and taken.status.ended)
    assert (transfer.status.phase, taken.status.phase) == (Phase.DONE, Phase.DONE)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prefill": "nowhere"}, "address"),
        ({"pages": pages(99)}, "pages"),
        ({"aux_slot": -1}, "aux_slot"),
        ({"prefix_pages": -1}, "prefix_pages"),
        ({"state": pages(0)}, "state holds 0, the memory has no state items"),
        ({"state": np.array([0.5])}, "state is a 1-dimensional array of float64"),
    ],
)
def test_decode_open_refuses_what_cannot_be(decode: DecodeConnector, changes: dict, word: str) -> None:
    arguments = {"prefill": "127.0.0.1:1", "room": 1, "request_id": "r", "pages": pages(1), "aux_slot": 0}
    with pytest.raises(ValueError, match=word):
        decode.open(**(arguments | changes))


@pytest.mark.parametrize("changes", [{"prefill": "nowhere"}, {"room": -1}, {"request_id": "x" * 257}, {"sibling": -1}])
def test_what_no_frame_can_carry_is_neither_expected_nor_refused(decode: DecodeConnector, changes: dict) -> None:
    arguments = {"prefill": "127.0.0.1:1", "room": 1, "request_id": "r"} | changes
    with pytest.raises(ValueError, match="|".join(["address", *changes])):
        decode.expect(**arguments)
    with pytest.raises(ValueError, match="|".join(["address", *changes])):
        decode.refuse(**arguments, message="no memory")


def test_a_refusal_says_why(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    with pytest.raises(ValueError, match="message is empty"):
        prefill.refuse(1, "r", "")
    with pytest.raises(ValueError, match="message is empty"):
        decode.refuse(prefill.bootstrap_address, 1, "r", "")


def test_what_decode_expects_ends_with_it(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    waiting, other = prefill.open(1, "r"), prefill.open(2, "s")
    decode.expect(prefill.bootstrap_address, 1, "r")
    _wait(lambda: prefill.stats().expected == decode.stats().expected == 1)
    decode.close()
    _wait(lambda: waiting.status.cause is Cause.PEER_LOST)
    assert (waiting.status.releasable, other.status.ended) == (True, False)


def test_either_side_is_told_of_what_the_other_refuses(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    where = prefill.bootstrap_address
    waiting = prefill.open(1, "r")
    decode.expect(where, 1, "r")
    decode.refuse(where, 1, "r", "no memory")
    _wait(lambda: waiting.status.ended)
    offered = decode.open(where, 2, "s", pages=pages(1), aux_slot=0)
    prefill.refuse(2, "s", "no room", cause=Cause.TOO_LONG)
    _wait(lambda: offered.status.ended and offered.status.releasable)
    assert (waiting.status.cause, waiting.status.message) == (Cause.REFUSED, "no memory")
    assert (offered.status.cause, offered.status.message) == (Cause.TOO_LONG, "no room")
    for connector in (prefill, decode):
        _wait(lambda connector=connector: connector.stats().causes == {"refused": 1, "too_long": 1})
        assert connector.stats().expected == 0


def test_a_memory_that_is_not_the_rank_s_part_is_refused(memory: KVMemory) -> None:
    config = ConnectorConfig("127.0.0.1", rank=1, instance=shard_model([1, 1], 1), registry="127.0.0.1:1")
    with pytest.raises(ValueError, match=r"memory holds Part\(first_layer=0, .* rank 1 holds Part\(first_layer=1"):
        PrefillConnector(config, memory, lambda: None)


def test_a_prefill_rank_above_0_needs_the_address_of_its_registry(memory: KVMemory) -> None:
    replicas = shard_model([1], 1, tp=2)
    with pytest.raises(ValueError, match="registry is missing: rank 1"):
        PrefillConnector(ConnectorConfig("127.0.0.1", rank=1, instance=replicas), memory, lambda: None)
    DecodeConnector(ConnectorConfig("127.0.0.1", rank=1, instance=replicas), memory, lambda: None).close()


def test_open_before_start_says_so(memory: KVMemory) -> None:
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    with pytest.raises(RuntimeError, match="not started"):
        connector.open(1, "r")
    connector.close()


def test_a_connector_starts_once(memory: KVMemory, prefill: PrefillConnector) -> None:
    with pytest.raises(RuntimeError, match="the prefill connector was started: make another"):
        prefill.start()
    closed = DecodeConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    closed.close()
    with pytest.raises(RuntimeError, match="the decode connector was closed: make another"):
        closed.start()


def test_what_utf8_has_no_form_for_is_told_escaped(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    waiting = decode.open(prefill.bootstrap_address, 1, "r", pages=pages(1), aux_slot=0)
    unknown = prefill.open(1, "r")
    unknown.abort("no file \udcff")
    _wait(lambda: waiting.status.ended and waiting.status.releasable)
    assert (waiting.status.cause, waiting.status.message) == (Cause.PEER_ABORTED, "no file \\udcff")
    assert "unencodable" not in prefill.stats().drops


def test_slots_and_numbers_may_come_out_of_numpy_arrays(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    numbers = np.arange(4)
    sent = prefill.open(numbers[3], "r", sibling=numbers[1])
    got = decode.open(
        prefill.bootstrap_address,
        numbers[3],
        "r",
        sibling=numbers[1],
        pages=pages(2),
        aux_slot=numbers[2],
        prefix_pages=numbers[1],
    )
    sent.send(pages(1), start=numbers[1], last=np.bool_(True), aux_slot=numbers[3])
    _wait(lambda: sent.status.ended and got.status.ended)
    assert (sent.status.phase, got.status.phase) == (Phase.DONE, Phase.DONE)
    assert (got.room, type(sent.status.prefix_pages)) == (3, int)


def test_after_close_nothing_opens_and_nothing_hangs(memory: KVMemory) -> None:
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
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


def test_a_taken_port_is_an_error_that_leaves_nothing_behind(memory: KVMemory, prefill: PrefillConnector) -> None:
    before = threading.active_count()
    taken = int(prefill.control_address.rpartition(":")[2])
    other = PrefillConnector(ConnectorConfig("127.0.0.1", control_port=taken), memory, lambda: None)
    with pytest.raises(OSError, match="in use"):
        other.start()
    other.close()
    assert threading.active_count() == before


def test_a_change_wakes_the_engine(memory: KVMemory) -> None:
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


def test_a_callback_that_raises_ends_nothing(memory: KVMemory) -> None:
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


def test_metrics_are_registered_and_taken_back(memory: KVMemory) -> None:
    registry = CollectorRegistry()
    connector = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None, registry)
    connector.start()
    connector.open(1, "r")
    _wait(lambda: registry.get_sample_value("pdpool_connector_attempts", {"state": "waiting"}) == 1.0)
    connector.set_queue("decode_prealloc", 3, 1.5, 7)
    assert connector.stats().queues["decode_prealloc"].reqs == 3
    connector.close()
    assert registry.get_sample_value("pdpool_connector_attempts", {"state": "waiting"}) is None


def _wait(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
