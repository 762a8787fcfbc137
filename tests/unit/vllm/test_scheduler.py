"""What vLLM's scheduler decides about hand-offs."""

from types import SimpleNamespace

import pytest
from pdpool_connector import prompt_digest
from pdpool_vllm.scheduler import DecodeScheduler, Offer, Open, PrefillScheduler, Send

REMOTE = {"do_remote_prefill": True, "remote_bootstrap": "10.0.0.1:8998", "remote_room": 7}
DIGEST = prompt_digest(list(range(100)))


def request(tokens=100, **params):
    return SimpleNamespace(
        request_id="r", prompt_token_ids=list(range(tokens)), num_prompt_tokens=tokens, kv_transfer_params=params
    )


@pytest.fixture
def prefill():
    return PrefillScheduler(16, "10.0.0.1:8998", lambda: 7)


@pytest.fixture
def decode():
    return DecodeScheduler(16)


@pytest.fixture(params=["prefill", "decode"])
def side(request):
    return request.getfixturevalue(request.param)


def test_ordinary_request_is_left_alone(side):
    one = request()
    side.arrived(one)
    assert side.remote_tokens(one, 0) == 0
    side.allocated(one, [1, 2], 0)
    assert side.finished(one, [1, 2], complete=True) == (False, None)
    step = side.take_step()
    assert (step.opens, step.offers, step.sends, step.aborts) == ({}, {}, {}, {})


@pytest.mark.parametrize("params", [{}, REMOTE, {"do_remote_decode": True}])
def test_requests_are_counted_until_they_are_over(side, params):
    one = request(**params)
    counts = [side.take_step().requests]
    side.arrived(one)
    counts.append(side.take_step().requests)
    side.finished(one, [1], complete=True)
    assert [*counts, side.take_step().requests] == [0, 1, 0]


def test_hand_off_is_opened_when_the_request_arrives(decode):
    decode.arrived(request(**REMOTE))
    assert decode.take_step().opens == {"r": Open("10.0.0.1:8998", 7, DIGEST)}
    assert decode.take_step().opens == {}


def test_prefill_opens_a_hand_off_whose_number_the_router_has_chosen(prefill):
    one = request(do_remote_decode=True, remote_room=5)
    prefill.arrived(one)
    assert prefill.take_step().opens == {"r": Open("", 5, DIGEST)}
    _, params = prefill.finished(one, [1, 2, 3, 4, 5, 6, 7], complete=True)
    assert params["remote_room"] == 5
    step = prefill.take_step()
    assert (step.sends["r"].room, step.aborts) == (5, {})


def test_routed_request_waits_until_every_worker_knows_of_decodes_memory():
    prefill = PrefillScheduler(16, "10.0.0.1:8998", lambda: 7, workers=2)
    one = request(do_remote_decode=True, remote_room=5)
    prefill.arrived(one)
    waits = [prefill.remote_tokens(one, 0)]
    for _ in range(2):
        prefill.answered({"r": 1, "another": 1})
        waits.append(prefill.remote_tokens(one, 0))
    assert waits == [None, None, 0]


def test_request_of_a_proxy_does_not_wait(prefill):
    one = request(do_remote_decode=True)
    prefill.arrived(one)
    assert prefill.remote_tokens(one, 0) == 0


def test_request_that_prefill_does_not_complete_is_given_up(prefill):
    one = request(do_remote_decode=True, remote_room=5)
    prefill.arrived(one)
    prefill.take_step()
    assert prefill.finished(one, [1], complete=False) == (False, None)
    assert list(prefill.take_step().aborts) == ["r"]


ROUTED = {"do_remote_decode": True, "remote_room": 5}


@pytest.mark.parametrize(("side", "params"), [("decode", REMOTE), ("prefill", ROUTED)], indirect=["side"])
def test_one_hand_off_serves_one_request(side, params):
    first, second = request(**params), request(**params)
    second.request_id = "s"
    side.arrived(first)
    side.arrived(second)
    assert list(side.take_step().opens) == ["r"]
    assert side.remote_tokens(second, 0) == 0
    assert side.finished(second, [1, 2], complete=True) == (False, None)
    assert side.take_step().aborts == {}


@pytest.mark.parametrize(("side", "params"), [("prefill", REMOTE), ("decode", ROUTED)], indirect=["side"])
def test_parameters_for_the_other_side_are_ignored(side, params):
    one = request(**params)
    side.arrived(one)
    assert side.remote_tokens(one, 0) == 0
    side.allocated(one, [1, 2, 3, 4, 5, 6, 7], 0)
    assert side.finished(one, [1, 2, 3, 4, 5, 6, 7], complete=True) == (False, None)
    step = side.take_step()
    assert (step.opens, step.offers, step.sends, step.aborts) == ({}, {}, {}, {})


def test_room_may_be_used_again_once_it_has_ended(decode):
    for name in ("r", "s"):
        one = request(**REMOTE)
        one.request_id = name
        decode.arrived(one)
        decode.allocated(one, [1, 2, 3, 4, 5, 6, 7], 100)
        decode.received([name])
        assert list(decode.take_step().opens) == [name]


def test_prompt_of_embeddings_has_no_digest(decode):
    one = request(**REMOTE)
    one.prompt_token_ids = None
    decode.arrived(one)
    assert decode.take_step().opens["r"].prompt == b""


@pytest.mark.parametrize(("computed", "remote"), [(0, 100), (32, 68), (100, 0)])
def test_the_rest_of_the_prompt_comes_from_prefill(decode, computed, remote):
    assert decode.remote_tokens(request(**REMOTE), computed) == remote


def test_memory_is_offered_once(decode):
    one = request(**REMOTE)
    decode.allocated(one, [9, 8, 7, 6, 5, 4, 3, 2], 68)
    decode.allocated(one, [9, 8, 7, 6, 5, 4, 3, 2], 0)
    step = decode.take_step()
    assert step.offers == {"r": Offer([7, 6, 5, 4, 3], 2)}
    assert step.aborts == {}


def test_computed_request_is_sent_and_kept(prefill):
    kept, params = prefill.finished(request(do_remote_decode=True), [9, 8, 7, 6, 5, 4, 3, 2], complete=True)
    assert kept
    assert params == {**REMOTE, "do_remote_decode": False}
    assert prefill.take_step().sends == {"r": Send(7, DIGEST, [9, 8, 7, 6, 5, 4, 3])}


@pytest.mark.parametrize(("complete", "blocks"), [(False, [1]), (True, [])])
def test_request_that_was_not_computed_is_not_sent(prefill, complete, blocks):
    assert prefill.finished(request(do_remote_decode=True), blocks, complete=complete) == (False, None)
    assert prefill.take_step().sends == {}


def test_request_that_left_before_its_step_is_opened_and_given_up(decode):
    one = request(**REMOTE)
    decode.arrived(one)
    decode.finished(one, [], complete=False)
    step = decode.take_step()
    assert (list(step.opens), list(step.aborts)) == (["r"], ["r"])


def test_request_that_has_its_cache_ends_quietly(decode):
    one = request(**REMOTE)
    decode.arrived(one)
    decode.allocated(one, [1, 2, 3, 4, 5, 6, 7], 100)
    decode.received({"r"})
    decode.take_step()
    assert decode.finished(one, [1, 2, 3, 4, 5, 6, 7], complete=True) == (False, None)
    assert decode.take_step().aborts == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_room": 0},
        {"remote_room": 1 << 63},
        {"remote_room": True},
        {"remote_room": "7"},
        {"remote_room": None},
        {"remote_bootstrap": None},
        {"remote_bootstrap": ""},
        {"remote_bootstrap": "x" * 257},
        {"remote_bootstrap": ["10.0.0.1:8998"]},
    ],
)
def test_parameters_that_are_not_valid_are_computed_here(decode, wrong, caplog):
    one = request(**{**REMOTE, **wrong})
    decode.arrived(one)
    assert decode.remote_tokens(one, 0) == 0
    assert decode.take_step().opens == {}
    assert "is computed here" in caplog.text
