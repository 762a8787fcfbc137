"""What decode knows of one hand-off."""

from dataclasses import dataclass, field

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OfferPages, OpenAttempt, Writer
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.release import decode_may_release
from pdpool_connector.protocol.states import DECODE_PHASES, DecodeState
from pdpool_connector.protocol.status import JUST_OPENED, Cause, TransferStatus


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """One hand-off into our memory.

    `memory`: what the engine has offered. `offered`: it was sent to a writer, which may write to it from then on.
    `writers`: by incarnation, empty until prefill is linked. `accepted`: writers that know the attempt;
    `offer_accepted`: those that know its memory as well. `done`: writers whose pages have all landed. `settled`:
    writers that failed and write no more, by their own settled `Ended` or by a fence.
    """

    attempt: AttemptId
    params: OpenAttempt
    deadline: float
    state: DecodeState | None = None
    memory: OfferPages | None = None
    offered: bool = False
    writers: dict[str, Writer] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    offer_accepted: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    bytes_moved: int = 0
    cause: Cause | None = None
    message: str = ""
    retry_s: float = 0.0
    reported: TransferStatus = JUST_OPENED

    @property
    def room(self) -> int:
        """The room in which prefill matches it with a request."""
        return self.params.room

    @property
    def pages(self) -> int:
        """How many pages the engine has offered for it."""
        return len(self.memory.pages) // f.PAGE_ID_BYTES if self.memory is not None else 0

    @property
    def state_items(self) -> tuple[int, ...]:
        """The same for the items of each state pool."""
        return tuple(len(ids) // f.PAGE_ID_BYTES for ids in self.memory.state) if self.memory is not None else ()

    @property
    def unsettled_peers(self) -> tuple[str, ...]:
        """Writers that have not sent a settled `Ended` and are not fenced."""
        return tuple(writer for writer in self.writers if writer not in self.done and writer not in self.settled)

    @property
    def answered(self) -> bool:
        """True when each writer has accepted all that it was sent."""
        known = self.offer_accepted if self.offered else self.accepted
        return all(writer in known or writer in self.done for writer in self.writers)

    def status(self) -> TransferStatus:
        """What the engine sees of it."""
        assert self.state is not None
        return TransferStatus(
            phase=DECODE_PHASES[self.state],
            cause=self.cause,
            message=self.message,
            prefix_pages=self.memory.prefix_pages if self.memory is not None else 0,
            bytes_moved=self.bytes_moved,
            releasable=decode_may_release(self),
        )
