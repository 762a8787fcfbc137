"""When a worker reports a request: only once nothing can touch its blocks."""

from types import SimpleNamespace

import pytest
from pdpool_connector import Cause, Phase, TransferStatus
from pdpool_vllm.scheduler import Offer, Open, Send, Step
from pdpool_vllm.worker import DecodeWorker, PrefillWorker

UNDER_WAY = TransferStatus(Phase.TRANSFERRING)
HELD = TransferStatus(Phase.FAILED, Cause.ABORTED, "left", releasable=False)
FAILED = TransferStatus(Phase.FAILED, Cause.ABORTED, "left", releasable=True)
DONE = TransferStatus(Phase.DONE, releasable=True)
SEND = Step(sends={"r": Send(1, b"", [1])})
OPEN = Step(opens={"r": Open("host:1", 1, b"")}, offers={"r": Offer([1], 0)})


class Transfer:
    """A hand-off whose status a test sets."""

    def __init__(self, refuses=False):
        self.status, self.refuses, self.aborts = UNDER_WAY, refuses, []

    def send(self, *_args, **_kwargs):
        if self.refuses:
            raise ValueError("an id lies outside")

    offer = send

    def abort(self, why):
        self.aborts.append(why)


@pytest.fixture(params=[(PrefillWorker, SEND), (DecodeWorker, OPEN)], ids=["prefill", "decode"])
def side(request):
    """A worker that has begun one hand-off, and the hand-off."""
    return started(*request.param)


def started(make, step, **settings):
    transfer = Transfer(**settings)
    transfer.beats = []
    connector = SimpleNamespace(
        beat=lambda *, idle: transfer.beats.append(idle), open=lambda *_args, **_kwargs: transfer
    )
    worker = make(connector)
    worker.do(step)
    return worker, transfer


def over(results):
    return results.sent | results.received


@pytest.mark.parametrize("status", [UNDER_WAY, HELD])
def test_blocks_that_a_writer_may_touch_are_kept(side, status):
    worker, transfer = side
    transfer.status = status
    assert over(worker.results()) == set()


@pytest.mark.parametrize("status", [DONE, FAILED])
def test_request_is_reported_once(side, status):
    worker, transfer = side
    transfer.status = status
    assert [over(worker.results()), over(worker.results())] == [{"r"}, set()]


def test_failure_at_decode_is_named():
    worker, transfer = started(DecodeWorker, OPEN)
    transfer.status = FAILED
    assert worker.results().failed == {"r"}


@pytest.mark.parametrize("status", [UNDER_WAY, HELD])
def test_request_given_up_is_aborted_and_kept(status):
    worker, transfer = started(DecodeWorker, OPEN)
    transfer.status = status
    worker.do(Step(aborts={"r": "its client has left"}))
    assert (transfer.aborts, over(worker.results())) == (["its client has left"], set())
    transfer.status = FAILED
    assert over(worker.results()) == {"r"}


def test_request_given_up_before_its_offer_is_never_reported():
    worker, transfer = started(DecodeWorker, Step(opens=OPEN.opens))
    worker.do(Step(aborts={"r": "its client has left"}))
    transfer.status = FAILED
    assert (len(transfer.aborts), over(worker.results())) == (1, set())


def test_send_that_is_refused_is_aborted():
    worker, transfer = started(PrefillWorker, SEND, refuses=True)
    assert "prefill cannot send" in transfer.aborts[0]
    transfer.status = FAILED
    assert over(worker.results()) == {"r"}


def test_offer_that_is_refused_fails_at_once():
    worker, transfer = started(DecodeWorker, OPEN, refuses=True)
    assert "decode cannot offer" in transfer.aborts[0]
    assert worker.results().failed == {"r"}


def test_engine_is_idle_without_requests_and_kept_blocks(side):
    worker, transfer = side
    transfer.beats.clear()
    worker.do(Step(requests=1))
    worker.do(Step())
    transfer.status = DONE
    worker.results()
    worker.do(Step(requests=1))
    worker.do(Step())
    assert transfer.beats == [False, False, False, True]


@pytest.mark.parametrize("make", [PrefillWorker, DecodeWorker])
def test_id_that_is_too_long_for_the_connector_is_cut(make):
    taken = []
    worker = make(SimpleNamespace(beat=lambda **_: None, open=lambda *given, **_: taken.append(given) or Transfer()))
    worker.do(Step(opens={"x" * 300 + "-own": Open("host:1", 1, b"")}))
    assert taken[0][-1] == "x" * 252 + "-own"


@pytest.mark.parametrize("status", [TransferStatus(Phase.READY), DONE, FAILED])
def test_prefill_tells_once_that_decode_has_answered(status):
    worker, transfer = started(PrefillWorker, Step(opens=OPEN.opens))
    transfer.status = TransferStatus(Phase.WAITING)
    first = worker.answered()
    transfer.status = status
    assert [first, worker.answered(), worker.answered()] == [set(), {"r"}, set()]


@pytest.mark.parametrize("step", [Step(aborts={"r": "left"}), SEND])
def test_request_that_is_over_or_computed_needs_no_answer(step):
    worker, transfer = started(PrefillWorker, Step(opens=OPEN.opens))
    transfer.status = TransferStatus(Phase.WAITING)
    worker.do(step)
    transfer.status = FAILED
    assert worker.answered() == set()
