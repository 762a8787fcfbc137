"""What the API refuses at once, with words that help."""

import re

import numpy as np
import pytest
from pdpool_connector import (
    Cause,
    ConnectorConfig,
    DecodeConnector,
    KVMemory,
    Phase,
    PrefillConnector,
    ProcessExited,
    prompt_digest,
    shard_model,
)
from pdpool_connector.transport.curve import CurveKey, make_key


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
        (
            {"curve": (CurveKey(b"x", b"y"),)},
            "curve holds a pair of keys that do not belong together: give keys as `read_keys`",
        ),
        (
            {"curve": (CurveKey(make_key().public, make_key().secret),)},
            "curve holds a pair of keys that do not belong together",
        ),
        ({"curve": (CurveKey("x" * 40, "y" * 40),)}, "curve holds a pair of keys that do not belong together"),
        ({"allowed_networks": (10,)}, "allowed_networks holds 10: give a tuple of str"),
        ({"curve": ("k",)}, "curve holds 'k': give a tuple of CurveKey"),
        ({"instance": (1,)}, "instance holds 1: give a tuple of ModelShard"),
        ({"flight_dir": 5}, "flight_dir=5 is of type int: give a Path, a str or None"),
        ({"rank": True}, "rank=True is of type bool: give an int"),
        ({"rank": 1}, "rank=1 is out of range"),
        ({"rank": 2, "instance": shard_model([1, 1], 2)}, "rank=2 is out of range: instance has the shards of 2 ranks"),
        ({"instance": shard_model([1, 1], 2)[1:]}, "layers of instance: from 0 to 0 no rank holds them"),
        ({"registry": "somewhere"}, "registry: 'somewhere' is no address"),
        ({"pod_rank": 1}, "pod_rank=1 is out of range: the pod has 1 connectors, give 0 to 0"),
        ({"pod_ranks": 0}, "pod_ranks=0 is out of range: give 1 to"),
        ({"facts": {"a": 1}}, r"facts\['a'\]=1: give a str"),
        ({"facts": {"a": "x" * 257}}, "key and value at most 256 long"),
        ({"facts": {str(number): "" for number in range(33)}}, "facts has 33 entries: give at most 32"),
        ({"admin_socket": 5}, "admin_socket=5 is of type int: give a Path, a str or None"),
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
        ({"timeouts": 5}, "timeouts=5 is of type int: give a Timeouts"),
        ({"staging_bytes": 1.5e8}, "staging_bytes=150000000.0 is of type float: give an int"),
        ({"request_deadline_s": "5"}, "request_deadline_s='5' is of type str: give a number"),
    ],
)
def test_wrong_configuration_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ConnectorConfig(**({"advertise_host": "127.0.0.1"} | changes))


def test_one_handoff_in_64_is_checked() -> None:
    assert ConnectorConfig("127.0.0.1").checksum_rate == 1 / 64


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"room": -1}, "room"),
        ({"room": 2**63}, "room"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_open_refuses_values_out_of_range(prefill: PrefillConnector, arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        prefill.open(**({"room": 1, "request_id": "r"} | arguments))


@pytest.mark.parametrize(
    ("send", "error", "message"),
    [
        ({"pages": [8]}, ValueError, "pages holds 8: prefill's memory has pages 0..7"),
        ({"pages": [-1]}, ValueError, "pages holds -1: prefill's memory has pages 0..7"),
        ({"pages": np.array([1.0])}, TypeError, "pages holds float64: give integers"),
        ({"pages": [True]}, TypeError, "pages holds bool: give integers"),
        ({"pages": 5}, TypeError, "pages is of type int: give a list, tuple, array or tensor of integers"),
        ({"pages": [[1]]}, ValueError, "pages has 2 dimensions: give one"),
        ({"start": -1}, ValueError, "start=-1 is out of range"),
        ({"aux_slot": 1}, ValueError, "aux_slot=1 is given without last=True"),
        ({"aux_slot": 4, "last": True}, ValueError, "aux_slot=4, prefill's memory has aux rows 0..3"),
        ({"state": {}}, ValueError, "state is given without last=True"),
        ({"state": [0], "last": True}, TypeError, "state is of type list: give a mapping"),
        ({"state": {"m": [0]}, "last": True}, ValueError, "state['m']: prefill's memory has no state pools"),
        ({"ready": True}, TypeError, "ready=True cannot be called"),
    ],
)
def test_send_refuses_wrong_arguments(prefill: PrefillConnector, send: dict, error: type, message: str) -> None:
    transfer = prefill.open(1, "r")
    with pytest.raises(error, match=re.escape(message)):
        transfer.send(**({"pages": [1], "start": 0} | send))


def test_send_after_the_last_is_refused(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    taken = decode.open(prefill.bootstrap_address, 1, "r")
    taken.offer([1], aux_slot=0)
    transfer = prefill.open(1, "r")
    transfer.send([2], start=0, last=True, aux_slot=1)
    with pytest.raises(ValueError, match=r"send\(\) after the send with last=True of room 1"):
        transfer.send([2], start=1, last=True, aux_slot=1)
    assert (transfer.wait(30).phase, taken.wait(30).phase) == (Phase.DONE, Phase.DONE)


@pytest.mark.parametrize(
    ("offer", "error", "message"),
    [
        ({"pages": (99,)}, ValueError, "pages holds 99: decode's memory has pages 0..7"),
        ({"aux_slot": -1}, ValueError, "aux_slot=-1, decode's memory has aux rows 0..3"),
        ({"prefix_pages": -1}, ValueError, "prefix_pages=-1 is out of range"),
        ({"state": {"m": [0]}}, ValueError, "state['m']: decode's memory has no state pools"),
        ({"pages": [3, 1, 3]}, ValueError, "pages holds 3 twice: the second write would replace the first"),
    ],
)
def test_offer_refuses_wrong_arguments(decode: DecodeConnector, offer: dict, error: type, message: str) -> None:
    transfer = decode.open("127.0.0.1:1", 1, "r")
    with pytest.raises(error, match=re.escape(message)):
        transfer.offer(**({"pages": [1], "aux_slot": 0} | offer))


@pytest.mark.parametrize("cause", [None, Cause.PEER_LOST, "later", 5])
def test_abort_for_another_cause_is_refused(prefill: PrefillConnector, cause: object) -> None:
    right = "Cause.ABORTED, Cause.REFUSED, Cause.TOO_LONG, Cause.INVALID"
    message = f"cause={cause!r} is no cause to abort with: give one of {right}"
    with pytest.raises(ValueError, match=re.escape(message)):
        prefill.open(1, "r").abort("no memory", cause)


def test_abort_takes_the_plain_word(prefill: PrefillConnector) -> None:
    transfer = prefill.open(1, "r")
    transfer.abort("no memory", "too_long")
    assert transfer.wait(30).cause is Cause.TOO_LONG


@pytest.mark.parametrize(("timeout_s", "error"), [("1", TypeError), (-1, ValueError), (float("nan"), ValueError)])
def test_wait_refuses_what_is_no_time(prefill: PrefillConnector, timeout_s: object, error: type) -> None:
    with pytest.raises(error, match=re.escape(f"timeout_s={timeout_s!r} is")):
        prefill.open(1, "r").wait(timeout_s)


def test_deadline_that_is_no_number_is_refused(prefill: PrefillConnector) -> None:
    with pytest.raises(TypeError, match="deadline_s='5' is of type str: give seconds, a number"):
        prefill.open(1, "r", deadline_s="5")


def test_callback_that_cannot_be_called_is_refused(memory: KVMemory) -> None:
    with pytest.raises(TypeError, match="on_change=None cannot be called"):
        DecodeConnector(ConnectorConfig("127.0.0.1"), memory, None)


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (5, TypeError, "prefill=5 is of type int: give a str"),
        ("foo", ValueError, "prefill: 'foo' is no address: give host:port"),
    ],
)
def test_wrong_address_is_refused(decode: DecodeConnector, address: object, error: type, message: str) -> None:
    for call in (lambda: decode.open(address, 1, "r"), lambda: decode.facts(address)):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("name", ["a8d21c1c", "", None, 5, "A" * 32, "a" * 32 + "\n"])
def test_fence_of_no_incarnation_is_refused(prefill: PrefillConnector, name) -> None:
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
def test_fence_by_no_proof_is_refused(prefill: PrefillConnector, proof, why) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(proof)) + f" is no proof: .*{re.escape(why)}"):
        prefill.fence("a" * 32, proof)


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1", "::", "pod-0.engines.svc", "fe80::1%eth0"])
def test_name_or_address_is_a_host(host: str) -> None:
    assert ConnectorConfig(host, bind_host=host).listen_host == host


def test_memory_of_another_shard_is_refused(memory: KVMemory) -> None:
    config = ConnectorConfig("127.0.0.1", rank=1, instance=shard_model([1, 1], 1), registry="127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"memory holds ModelShard\(first_layer=0, .* rank 1 holds ModelShard\(first_layer=1"
    ):
        PrefillConnector(config, memory, lambda: None)


def test_rank_above_zero_needs_a_registry(memory: KVMemory) -> None:
    replicas = shard_model([1], 1, tp=2)
    with pytest.raises(ValueError, match="registry is missing: rank 1"):
        PrefillConnector(ConnectorConfig("127.0.0.1", rank=1, instance=replicas), memory, lambda: None)
    DecodeConnector(ConnectorConfig("127.0.0.1", rank=1, instance=replicas), memory, lambda: None).close()


@pytest.mark.parametrize("tokens", [[1.0, 2.0], "123", None, [[1, 2]], [True, False]])
def test_digest_refuses_other_than_integers(tokens: object) -> None:
    with pytest.raises(TypeError, match="give a sequence of whole numbers"):
        prompt_digest(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], np.array([2**40])])
def test_digest_refuses_more_than_int32(tokens: object) -> None:
    with pytest.raises(OverflowError, match="must be int32"):
        prompt_digest(tokens)  # type: ignore[arg-type]


def test_digest_of_list_and_array_are_equal() -> None:
    ids = [0, 5, 2**31 - 1, -(2**31)]
    assert prompt_digest(ids) == prompt_digest(np.array(ids, np.int32)) == prompt_digest(tuple(ids))
    assert prompt_digest([]) == prompt_digest(np.zeros(0, np.int32)) != prompt_digest(ids)


def test_message_without_utf8_form_is_refused(prefill: PrefillConnector) -> None:
    with pytest.raises(ValueError, match="cannot be carried as UTF-8"):
        prefill.open(1, "r").abort("no file \udcff")


def test_numbers_may_come_from_numpy(prefill: PrefillConnector, decode: DecodeConnector) -> None:
    numbers = np.arange(4)
    sent = prefill.open(numbers[3], "r")
    got = decode.open(prefill.bootstrap_address, numbers[3], "r")
    got.offer(np.array([2], np.uint64), aux_slot=numbers[2], prefix_pages=numbers[1])
    sent.send((1,), start=numbers[1], last=np.bool_(True), aux_slot=numbers[3])
    assert (sent.wait(30).phase, got.wait(30).phase) == (Phase.DONE, Phase.DONE)
    assert (got.room, type(sent.status.prefix_pages)) == (3, int)


def test_released_pages_may_be_offered_at_once(decode: DecodeConnector) -> None:
    for room in range(200):
        transfer = decode.open("127.0.0.1:1", room, "r")
        transfer.offer([5], aux_slot=0)
        transfer.abort()
        while not transfer.status.releasable:
            pass


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
def test_wrong_queue_is_refused_by_field(prefill, changes, error, word) -> None:
    given = {"name": "decode_prealloc", "reqs": 3, "oldest_s": 1.5, "moved_total": 7, **changes}
    with pytest.raises(error, match=re.escape(word)):
        prefill.set_queue(**given)
    assert changes.get("name") not in prefill.stats().queues


def test_engine_shows_at_most_eight_queues(prefill) -> None:
    for number in range(8):
        prefill.set_queue(f"q{number}", 0, None, np.int64(0))
    with pytest.raises(ValueError, match="name='q8' is one queue too many"):
        prefill.set_queue("q8", 0, None, 0)
    prefill.set_queue("q7", 1, 0.0, 2)
    assert prefill.stats().queues["q7"].moved_total == 2
