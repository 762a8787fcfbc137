"""Faults put back on purpose, each a line or two: the simulation must catch every one of them."""

from msgspec.structs import replace
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import Attempt, DecodeMachine
from pdpool_connector.protocol.events import Fenced, PeerLost, Report, WriteResult
from pdpool_connector.protocol.exchange import Exchange, HandOff, Piece
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.states import Cue, DecodeState, PrefillState
from pdpool_connector.protocol.verdicts import Graveyard

MUTANTS: dict[str, tuple[type[PrefillMachine], type[DecodeMachine]]] = {}


def mutant(cls: type) -> type:
    overridden = [name for name in vars(cls) if not name.startswith("__")]
    assert all(hasattr(cls.__base__, name) for name in overridden), (
        f"{cls.__name__} overrides nothing: it proves nothing"
    )
    both = (cls, DecodeMachine) if issubclass(cls, PrefillMachine) else (PrefillMachine, cls)
    MUTANTS[cls.__name__] = both
    return cls


def replace_status(machine: PrefillMachine | DecodeMachine, **changes: object) -> None:
    last = machine._effects[-1]
    assert isinstance(last, Report)
    machine._effects[-1] = Report(last.handle, replace(last.status, **changes))


@mutant
class DecodeReleasesOnAbort(DecodeMachine):
    """Pages are given back when the abort is sent, not when it is answered."""

    def _report(self, attempt: Attempt) -> None:
        super()._report(attempt)
        if attempt.state is DecodeState.ABORTING:
            replace_status(self, releasable=True)


@mutant
class DecodeReleasesHoldsByTimer(DecodeMachine):
    """A hold is released when the drain deadline has passed without proof."""

    def _on_abort_over(self, attempt: Attempt) -> None:
        self._move(attempt, Cue.QUIET)
        self._finalize(attempt)


@mutant
class DecodeTrustsPeerLoss(DecodeMachine):
    """A lost connection is taken for proof that the writer is quiet."""

    def _on_lost(self, event: PeerLost) -> None:
        for attempt in self.attempts_of(event.peer):
            attempt.drained.add(event.peer)
            self._judge(attempt)
        super()._on_lost(event)


@mutant
class DecodeTakesFailedForDrained(DecodeMachine):
    """`Failed` (writes in flight) is read as `Drained`."""

    def _on_failed(self, frame: f.Failed) -> None:
        self._on_drained(frame)


@mutant
class DecodeForgetsItsDeadline(DecodeMachine):
    """An attempt has no deadline."""

    def _on_life_over(self, attempt: Attempt) -> None:
        pass


@mutant
class DecodeNeverTellsUnlinkedAborts(DecodeMachine):
    """Rows of attempts that failed before pairing stay for ever."""

    def _give_up_telling(self, attempt: Attempt) -> None:
        pass


@mutant
class PrefillDrainsWithoutWaiting(PrefillMachine):
    """`Drained` is said as soon as writing was told to stop."""

    def _fail(self, handoff: HandOff, cause, message) -> None:
        for exchange in handoff.all:
            exchange.in_flight.clear()
        super()._fail(handoff, cause, message)


@mutant
class PrefillTakesUnsettledForSettled(PrefillMachine):
    """An error of the data plane is taken for the end of its writes."""

    def _on_write_ended(self, event) -> None:
        if event.result is WriteResult.UNSETTLED:
            event = replace(event, result=WriteResult.FAILED)
        super()._on_write_ended(event)


@mutant
class PrefillIsDoneWithTheLastWrite(PrefillMachine):
    """The last write landing is taken for all writes having landed."""

    def _complete_if_landed(self, exchange: Exchange) -> None:
        if exchange.closed and exchange.state is PrefillState.SENDING and exchange.in_flight:
            self._move(exchange, Cue.COMPLETED)
            self._finalize(exchange)
        else:
            super()._complete_if_landed(exchange)


@mutant
class PrefillResurrects(PrefillMachine):
    """Ended attempts are not remembered: a late open finds the next request in the room."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._graves = self._verdicts.graves = _NoGraves(1000)


class _NoGraves(Graveyard):
    def bury(self, tombstone) -> bool:
        return tombstone is None

    def stale(self, attempt) -> bool:
        return attempt is None


@mutant
class PrefillForgetsEarlyAborts(PrefillMachine):
    """An abort that overtakes its attempt is not remembered; the attempt then claims the next request."""

    def _abort_unseen(self, frame: f.Abort, cause) -> None:
        self._send(frame.sender, f.Drained, frame, cause=cause, message="")


@mutant
class PrefillIgnoresAbortsOfTheEnded(PrefillMachine):
    """Only the first word about an end is said; whoever missed it asks in vain."""

    def _on_abort(self, frame: f.Abort) -> None:
        if frame.attempt in self._by_attempt:
            super()._on_abort(frame)


@mutant
class PrefillLeavesTheRoom(PrefillMachine):
    """A finished hand-off stays in the room, which then is in use for ever."""

    def _leave_room(self, handoff: HandOff) -> None:
        pass


@mutant
class PrefillKeepsAcknowledgedTombstones(PrefillMachine):
    """Tombstones have no deadline."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._on_timer["grave"] = lambda _: None


@mutant
class PrefillIgnoresFences(PrefillMachine):
    """Holds of prefill's own pages have no way out."""

    def _on_fenced(self, event: Fenced) -> None:
        pass


@mutant
class PrefillMixesTargets(PrefillMachine):
    """A second send starts again at the first page of decode's."""

    def _write(self, exchange: Exchange, piece: Piece) -> None:
        assert exchange.offer is not None
        super()._write(exchange, piece._replace(target=exchange.offer.pages[: len(piece.source)]))
