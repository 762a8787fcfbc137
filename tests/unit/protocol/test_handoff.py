"""One hand-off from begin to end on each side: success, abort, loss of the peer."""

from pdpool_connector.protocol.events import StopWriting, WriteResult
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    Decode,
    Prefill,
    abort_frame,
    accepted,
    ack,
    ended,
    names,
    writes,
)


class TestSuccess:
    def test_request_open_offer_and_send_write_pages(self) -> None:
        side = Prefill()
        side.request()
        assert names(side.opened()) == []
        assert side.status[1].phase is Phase.WAITING
        assert names(side.offered()) == []
        assert side.status[1].phase is Phase.READY
        (write,) = writes(side.send())
        assert side.status[1].phase is Phase.TRANSFERRING
        assert names(side.landed(write)) == ["Ended(done)"]
        assert (side.status[1].phase, side.status[1].releasable) == (Phase.DONE, True)
        side.receive(ack())
        side.wait(100)
        assert side.machine.rows == 0
        assert side.machine.next_deadline is None

    def test_decode_opens_offers_and_is_done(self) -> None:
        side = Decode()
        assert names(side.open()) == ["Open"]
        assert side.status[1].phase is Phase.WAITING
        side.receive(accepted())
        assert names(side.offer()) == ["Offer"]
        assert side.status[1].phase is Phase.TRANSFERRING
        side.receive(accepted(offered=True))
        assert names(side.receive(ended(moved=8))) == ["Ack"]
        assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 8)
        assert side.status[1].releasable
        assert (side.machine.rows, side.machine.next_deadline) == (0, None)


class TestAbort:
    def test_decode_aborts_while_prefill_writes(self) -> None:
        side = Prefill()
        side.request()
        side.attempt()
        (write,) = writes(side.send())
        effects = side.receive(abort_frame())
        assert any(isinstance(effect, StopWriting) for effect in effects)
        assert names(effects) == ["Ended(peer_aborted, unsettled)"]
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, False)
        assert names(side.landed(write, WriteResult.STOPPED)) == ["Ended(peer_aborted)"]
        assert side.status[1].releasable
