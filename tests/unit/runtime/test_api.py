"""What the API refuses at once, with words that help."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from unittest.mock import Mock

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
    ProcessExited,
    Timeouts,
    prompt_digest,
    shard_model,
)
from pdpool_connector.backends.base import IncompatiblePeerError, PeerUnreachableError
from pdpool_connector.transport.curve import CurveKey, make_key
from pdpool_reference.demo.launch import free_port
from prometheus_client import CollectorRegistry

from tests.unit.runtime.small_memory import SMALL_BYTES, lay_out


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    with HostArena(SMALL_BYTES) as arena:
        yield lay_out(arena)


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
        ({"frame_filter": 5}, "frame_filter=5 cannot be called"),
        ({"pod_uid": 5}, "pod_uid=5 is of type int: give a str"),
        ({"admin_gate": "x"}, "admin_gate='x' is of type str: give a TokenVerifier or None"),
        ({"curve_required": "no"}, "curve_required='no' is of type str: give True or False"),
        ({"curve": "k"}, "curve='k' is of type str: give a tuple of CurveKey"),
        ({"curve": (CurveKey(b"x", b"y"),)}, "curve holds a pair that is none: give keys as `read_keys`"),
        ({"curve": (CurveKey(make_key().public, make_key().secret),)}, "curve holds a pair that is none"),
        ({"curve": (CurveKey("x" * 40, "y" * 40),)}, "curve holds a pair that is none"),
        ({"allowed_networks": (10,)}, "allowed_networks holds 10: give a tuple of str"),
        ({"curve": ("k",)}, "curve holds 'k': give a tuple of CurveKey"),
        ({"instance": (1,)}, "instance holds 1: give a tuple of ModelShard"),
        ({"flight_dir": 5}, "flight_dir=5 is of type int: give a Path, a str or None"),
        ({"rank": True}, "rank=True is of type bool: give an int"),
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
        ({"advertise_host": 5}, "advertise_host=5 is of type int: give a str"),
        ({"advertise_host": "1.2.3.4:80"}, "advertise_host='1.2.3.4:80' is no host: give a name or an IP address"),
        ({"advertise_host": "[::1]"}, "advertise_host='\\[::1\\]' is no host.*without brackets and port"),
        ({"bind_host": ""}, "bind_host='' is no host"),
        ({"control_port": None}, "control_port=None is of type NoneType: give an int"),
        ({"bootstrap_port": True}, "bootstrap_port=True is of type bool: give an int"),
        ({"control_port": 1.5}, "control_port=1.5 is of type float"),
        ({"admin_port": "80"}, "admin_port='80' is of type str: give an int or None"),
        ({"allowed_networks": "127.0.0.0/8"}, "allowed_networks='127.0.0.0/8' is of type str: give a tuple"),
        ({"registry": 5}, "registry=5 is of type int: give a str or None"),
        ({"timing": 5}, "timing=5 is of type int: give a Timeouts"),
        ({"staging_bytes": 1.5e8}, "staging_bytes=150000000.0 is of type float: give an int"),
        ({"request_deadline_s": "5"}, "request_deadline_s='5' is of type str: give a number"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ConnectorConfig(**({"advertise_host": "127.0.0.1"} | changes))


def test_one_hand_off_in_64_is_checked_by_default() -> None:
    assert ConnectorConfig("127.0.0.1").checksum_rate == 1 / 64


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"meet_s": None}, "meet_s=None is of type NoneType: give a number"),
        ({"max_attempts": None}, "max_attempts=None is of type NoneType: give an int"),
        ({"max_attempts": 1.5}, "max_attempts=1.5 is of type float: give an int"),
        ({"query_s": "5"}, "query_s='5' is of type str: give a number"),
        ({"expect_s": True}, "expect_s=True is of type bool: give a number"),
        ({"expected_within_s": 0}, "expected_within_s is 0, must be above 0"),
        ({"drain_s": -1.0}, "drain_s is -1.0, must be above 0"),
    ],
)
def test_a_timing_that_would_never_come_due_or_always_is_refused_by_field(changes: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Timeouts(**changes)


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


def test_a_life_that_is_no_number_is_refused_by_name(prefill: PrefillConnector) -> None:
    with pytest.raises(TypeError, match="deadline_s='5' is of type str: give seconds, a number"):
        prefill.open(1, "r", deadline_s="5")


def test_what_cannot_be_called_on_change_is_refused(memory: KVMemory) -> None:
    with pytest.raises(TypeError, match="on_change=None cannot be called"):
        DecodeConnector(ConnectorConfig("127.0.0.1"), memory, None)


def test_a_prefill_that_is_no_address_is_refused_by_name(decode: DecodeConnector) -> None:
    with pytest.raises(TypeError, match="prefill=5 is of type int: give a str"):
        decode.open(5, 1, "r", pages=pages(1), aux_slot=0)
    with pytest.raises(TypeError, match="prefill=None is of type NoneType: give a str"):
        decode.expect(None, 1, "r")


def test_a_refusal_says_why(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    with pytest.raises(ValueError, match="message is empty"):
        prefill.refuse(1, "r", "")
    with pytest.raises(ValueError, match="message is empty"):
        decode.refuse(prefill.bootstrap_address, 1, "r", "")


@pytest.mark.parametrize("cause", [None, Cause.PEER_LOST, "later", 5, np.array(["refused", "too_long"])])
def test_a_refusal_for_another_cause_than_the_two_is_refused(prefill, decode, cause) -> None:
    for refuse in (prefill.refuse, partial(decode.refuse, prefill.bootstrap_address)):
        with pytest.raises(ValueError, match=re.escape(f"cause={cause!r} is no cause to refuse a request: give Cause")):
            refuse(1, "r", "no memory", cause=cause)


def test_a_refusal_may_name_its_cause_by_the_plain_word(prefill, decode) -> None:
    waiting = prefill.open(1, "r")
    offered = decode.open(prefill.bootstrap_address, 2, "s", pages=pages(1), aux_slot=0)
    decode.refuse(prefill.bootstrap_address, 1, "r", "no memory", cause="too_long")
    prefill.refuse(2, "s", "no room", cause="too_long")
    _wait(lambda: waiting.status.ended and offered.status.ended)
    assert waiting.status.cause is offered.status.cause is Cause.TOO_LONG
    for connector in (prefill, decode):
        _wait(lambda connector=connector: connector.stats().causes == {"too_long": 2})
        assert connector.stats().faults == 0


@pytest.mark.parametrize("name", ["a8d21c1c", "", None, 5, "A" * 32, "a" * 32 + "\n"])
def test_a_fence_of_what_is_no_incarnation_is_refused(prefill: PrefillConnector, name) -> None:
    with pytest.raises(ValueError, match=re.escape(f"incarnation={name!r} is no incarnation: give its 32")):
        prefill.fence(name, ProcessExited(pid=1, seen_by="the test"))


@pytest.mark.parametrize(
    ("proof", "why"),
    [
        (ProcessExited(pid=0, seen_by="the test"), "int` >= 1 - at `$.pid`"),
        (ProcessExited(pid=1, seen_by=""), "length >= 1 - at `$.seen_by`"),
        ("gone", "Expected `object`"),
    ],
)
def test_a_fence_by_what_no_proof_can_be_is_refused_by_field(prefill: PrefillConnector, proof, why) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(proof)) + f" is no proof: .*{re.escape(why)}"):
        prefill.fence("a" * 32, proof)


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1", "::", "pod-0.engines.svc", "fe80::1%eth0"])
def test_a_name_or_an_address_is_a_host(host: str) -> None:
    assert ConnectorConfig(host, bind_host=host).listen_host == host


@pytest.mark.parametrize("age", [-1, float("nan")])
def test_hand_offs_of_no_age_are_not_purged(prefill: PrefillConnector, age: float) -> None:
    waiting = prefill.open(1, "r")
    with pytest.raises(ValueError, match=f"older_than_s={age} is no age: give 0 or more seconds"):
        prefill.purge(age, "late")
    assert not waiting.status.ended


@pytest.mark.parametrize(("room", "error"), [("x", TypeError), (None, TypeError), (-1, ValueError)])
def test_hand_offs_of_what_is_no_room_are_not_aborted(prefill: PrefillConnector, room, error: type) -> None:
    with pytest.raises(error, match=f"room={room!r} is"):
        prefill.abort_room(room, "late")


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


@pytest.mark.parametrize(
    ("error", "cause"),
    [(IncompatiblePeerError("no READ over TCP"), Cause.INVALID), (PeerUnreachableError("no route"), Cause.PEER_LOST)],
)
def test_a_decode_that_can_never_read_from_a_prefill_fails_as_one_that_does_not_fit(
    memory, monkeypatch, error, cause
) -> None:
    config = ConnectorConfig("127.0.0.1", direction="read")
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(contextlib.closing(kind(config, memory, lambda: None)))
            for kind in (PrefillConnector, DecodeConnector)
        )
        monkeypatch.setattr(decode._backend, "connect", Mock(side_effect=error))
        prefill.start()
        decode.start()
        for room in (1, 2):
            offered = decode.open(prefill.bootstrap_address, room, "r", pages=pages(1), aux_slot=0)
            _wait(lambda offered=offered: offered.status.ended)
            assert (offered.status.cause, offered.status.releasable) == (cause, True)
            assert str(error) in offered.status.message


def test_a_memory_that_is_not_the_rank_s_part_is_refused(memory: KVMemory) -> None:
    config = ConnectorConfig("127.0.0.1", rank=1, instance=shard_model([1, 1], 1), registry="127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"memory holds ModelShard\(first_layer=0, .* rank 1 holds ModelShard\(first_layer=1"
    ):
        PrefillConnector(config, memory, lambda: None)


def test_a_prefill_rank_above_0_needs_the_address_of_its_registry(memory: KVMemory) -> None:
    replicas = shard_model([1], 1, tp=2)
    with pytest.raises(ValueError, match="registry is missing: rank 1"):
        PrefillConnector(ConnectorConfig("127.0.0.1", rank=1, instance=replicas), memory, lambda: None)
    DecodeConnector(ConnectorConfig("127.0.0.1", rank=1, instance=replicas), memory, lambda: None).close()


def test_expect_before_start_says_so(memory: KVMemory) -> None:
    connector = DecodeConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    with pytest.raises(RuntimeError, match=r"expect\(\) on a decode connector that was not started"):
        connector.expect("127.0.0.1:1", 1, "r")
    connector.close()


def test_refuse_before_start_says_so(memory: KVMemory) -> None:
    config = ConnectorConfig("127.0.0.1")
    decode, prefill = DecodeConnector(config, memory), PrefillConnector(config, memory)
    with pytest.raises(RuntimeError, match=r"refuse\(\) on a decode connector that was not started"):
        decode.refuse("127.0.0.1:1", 1, "r", "full")
    with pytest.raises(RuntimeError, match=r"refuse\(\) on a prefill connector that was not started"):
        prefill.refuse(1, "r", "full")
    for connector in (decode, prefill):
        connector.close()


def test_an_address_that_is_none_is_refused_by_field(decode: DecodeConnector) -> None:
    with pytest.raises(ValueError, match="prefill: 'foo' is no address: give host:port"):
        decode.open("foo", 1, "r", pages=pages(1), aux_slot=0)


@pytest.mark.parametrize("age", ["60", -1, float("nan"), None])
def test_purge_refuses_what_is_no_age(prefill: PrefillConnector, age: object) -> None:
    with pytest.raises(ValueError, match=r"older_than_s=.* is no age: give 0 or more seconds"):
        prefill.purge(age, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[1.0, 2.0], "123", None, [[1, 2]], [True, False]])
def test_a_digest_is_of_whole_numbers_alone(tokens: object) -> None:
    with pytest.raises(TypeError, match="give a sequence of whole numbers"):
        prompt_digest(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], np.array([2**40])])
def test_a_digest_is_of_int32_alone(tokens: object) -> None:
    with pytest.raises(OverflowError, match="must be int32"):
        prompt_digest(tokens)  # type: ignore[arg-type]


def test_a_digest_is_the_same_for_a_list_and_an_array() -> None:
    ids = [0, 5, 2**31 - 1, -(2**31)]
    assert prompt_digest(ids) == prompt_digest(np.array(ids, np.int32)) == prompt_digest(tuple(ids))
    assert prompt_digest([]) == prompt_digest(np.zeros(0, np.int32)) != prompt_digest(ids)


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
    before = set(threading.enumerate())
    taken = int(prefill.control_address.rpartition(":")[2])
    other = PrefillConnector(ConnectorConfig("127.0.0.1", control_port=taken), memory, lambda: None)
    with pytest.raises(OSError, match="in use"):
        other.start()
    other.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
def test_a_start_that_failed_for_a_port_may_be_tried_again(memory: KVMemory, kind, tmp_path) -> None:
    before = set(threading.enumerate())
    config = {"curve": (make_key(),), "flight_dir": tmp_path}
    with socket.create_server(("0.0.0.0", free_port())) as taken:  # nobody is given it once it is let go
        one = kind(ConnectorConfig("127.0.0.1", control_port=taken.getsockname()[1], **config), memory, lambda: None)
        with pytest.raises(OSError, match="in use"):
            one.start()
        with pytest.raises(RuntimeError, match="control_address is known once the connector is started"):
            assert one.control_address
    one.start()
    assert one.control_address.endswith(f":{one.config.control_port}")
    one.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
def test_a_with_block_starts_a_connector_and_closes_it(memory: KVMemory, kind) -> None:
    with kind(ConnectorConfig("127.0.0.1"), memory) as connector:
        address = connector.control_address
        _dial(address).close()
        with pytest.raises(RuntimeError, match="connector was started: make another"), connector:
            raise AssertionError("a connector that runs was started again")
        _dial(address).close()
    _wait(lambda: _refuses(address))


def test_a_with_block_that_cannot_start_leaves_a_connector_that_is_closed(memory: KVMemory, prefill) -> None:
    taken = int(prefill.control_address.rpartition(":")[2])
    other = PrefillConnector(ConnectorConfig("127.0.0.1", control_port=taken), memory)
    with pytest.raises(OSError, match="in use"), other:
        raise AssertionError("it started on a port that is taken")
    with pytest.raises(RuntimeError, match="connector was closed: make another"):
        other.start()


def test_a_start_that_failed_for_want_of_a_thread_may_be_tried_again(memory: KVMemory, monkeypatch) -> None:
    begin = threading.Thread.start

    def one_too_many(thread: threading.Thread) -> None:
        if thread.name == "pdpool-prefill":
            raise RuntimeError("can't start new thread")
        begin(thread)

    one = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", one_too_many)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            one.start()
    one.start()
    transfer = one.open(1, "r")
    one.close()
    assert transfer.status.cause is Cause.SHUTDOWN


def test_a_connector_that_was_never_started_leaves_no_thread(memory: KVMemory, tmp_path) -> None:
    before = set(threading.enumerate())
    PrefillConnector(ConnectorConfig("127.0.0.1", flight_dir=str(tmp_path)), memory, lambda: None).close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
@pytest.mark.parametrize("step", ["_board.refresh", "_http", "_reactor.start"])
def test_a_start_that_was_interrupted_can_be_closed(memory: KVMemory, kind, step: str, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    one = kind(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    if step == "_http":
        monkeypatch.setattr("pdpool_connector.runtime.connector.HttpServer", interrupted)
    else:
        part, call = step.split(".")
        monkeypatch.setattr(getattr(one, part), call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.start()
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert set(threading.enumerate()) <= before


def test_what_is_opened_while_the_connector_closes_ends_too(memory: KVMemory, monkeypatch) -> None:
    one = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    one.start()
    step = one._reactor.step

    def overtaken(call) -> None:
        """The thread that opens stands still for as long as another takes to close."""
        closing = threading.Thread(target=one.close)
        closing.start()
        closing.join(30)
        step(call)

    monkeypatch.setattr(one._reactor, "step", overtaken)
    transfer = one.open(1, "r")
    assert (transfer.status.cause, transfer.status.releasable) == (Cause.SHUTDOWN, True)


@pytest.mark.parametrize("kind", [PrefillConnector, DecodeConnector])
@pytest.mark.parametrize("step", ["_settled.wait", "_reactor.stop", "_http.close", "_backend.close"])
def test_a_close_that_was_interrupted_is_made_by_the_next(memory: KVMemory, kind, step: str, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    registry = CollectorRegistry()
    one = kind(ConnectorConfig("127.0.0.1", curve=(make_key(),)), memory, lambda: None, registry)
    one.start()
    part, call = step.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(one, part), call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.close()
    one.close()
    assert set(threading.enumerate()) <= before
    assert one._context.closed
    assert not list(registry.collect())


def test_a_second_close_returns_when_the_first_has(memory: KVMemory, monkeypatch) -> None:
    one = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    one.start()
    at_it, go_on = threading.Event(), threading.Event()
    end = one._backend.close

    def slow() -> None:
        at_it.set()
        assert go_on.wait(30)
        end()

    monkeypatch.setattr(one._backend, "close", slow)
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


def test_pages_that_decode_offers_twice_are_refused(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    with pytest.raises(ValueError, match="pages holds 3 twice: what lands there first would be lost"):
        decode.open(prefill.bootstrap_address, 1, "r", pages=pages(3, 1, 3), aux_slot=0)


def test_pages_of_a_hand_off_that_is_not_released_are_refused_until_it_is(prefill, decode) -> None:
    target, released = prefill.bootstrap_address, threading.Event()
    first = decode.open(target, 1, "first", pages=pages(1, 2), aux_slot=0)
    with pytest.raises(ValueError, match="pages holds 2, which is offered to room 1, request 'first': wait until"):
        decode.open(target, 2, "second", pages=pages(2, 3), aux_slot=1)
    first.attach(released.set)
    first.abort()
    assert released.wait(30)
    again = decode.open(target, 2, "second", pages=pages(2, 3), aux_slot=1)
    request = prefill.open(2, "second")
    request.send(pages(0, 1), start=0, last=True, aux_slot=0)
    while not again.status.ended:
        time.sleep(0.001)
    assert again.status.phase is Phase.DONE
    decode.open(target, 3, "third", pages=pages(1, 2, 3), aux_slot=0)


def test_pages_may_be_offered_again_as_soon_as_the_status_says_that_they_are_released(prefill, decode) -> None:
    for room in range(200):
        got = decode.open(prefill.bootstrap_address, room, "r", pages=pages(5), aux_slot=0)
        got.abort()
        while not got.status.releasable:
            pass


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


def test_a_turn_that_is_stuck_shows_as_loop_lag(memory: KVMemory) -> None:
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


def test_metrics_are_registered_and_taken_back(memory: KVMemory) -> None:
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


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"name": 5}, TypeError, "name=5 is of type int"),
        ({"name": ""}, ValueError, "name='' is no name of a queue"),
        ({"name": "decode prealloc"}, ValueError, "name='decode prealloc' is no name of a queue"),
        ({"name": "decode_prealloc\n"}, ValueError, "is no name of a queue"),
        ({"name": "q" * 65}, ValueError, "is no name of a queue: give 1 to 64"),
        ({"reqs": -1}, ValueError, "reqs=-1 is out of range"),
        ({"reqs": 1.5}, TypeError, "reqs=1.5 is of type float"),
        ({"moved_total": 1 << 63}, ValueError, "moved_total=9223372036854775808 is out of range"),
        ({"oldest_s": "1"}, TypeError, "oldest_s='1' is of type str"),
        ({"oldest_s": -0.5}, ValueError, "oldest_s=-0.5 is out of range"),
        ({"oldest_s": float("nan")}, ValueError, "oldest_s=nan is out of range"),
    ],
)
def test_a_queue_that_the_operator_would_not_believe_is_refused_by_field(prefill, changes, error, word) -> None:
    given = {"name": "decode_prealloc", "reqs": 3, "oldest_s": 1.5, "moved_total": 7, **changes}
    with pytest.raises(error, match=re.escape(word)):
        prefill.set_queue(**given)
    assert changes.get("name") not in prefill.stats().queues


def test_an_engine_shows_eight_queues_of_its_own(prefill) -> None:
    for number in range(8):
        prefill.set_queue(f"q{number}", 0, None, np.int64(0))
    with pytest.raises(ValueError, match="name='q8' is one queue too many"):
        prefill.set_queue("q8", 0, None, 0)
    prefill.set_queue("q7", 1, 0.0, 2)
    assert prefill.stats().queues["q7"].moved_total == 2


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
