"""Memory as the protocol sees it: units with owners, so that whoever touches one that was given back is caught."""

from dataclasses import dataclass, field

from pdpool_connector.protocol.status import TransferStatus


class ViolationError(AssertionError):
    """A promise was broken."""


@dataclass(eq=False, slots=True)
class Half:
    """One side of one hand-off, as the engine of one rank sees it. `request` is the id, and stands for the content.

    `pages` hold logical pages `prefix` onward; `sent` counts logical pages handed to the machine (prefill).
    """

    tag: int
    request: str
    room: int
    sibling: int
    prefix: int
    posted: float
    handle: int
    pages: list[int] = field(default_factory=list)
    aux: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    statuses: list[TransferStatus] = field(default_factory=list)
    ended: bool = False
    """Its engine was told that it is over."""
    releasable: bool = False
    """Its engine was told that its memory is its own again."""
    over: float = 0.0
    sent: int = 0
    closed: bool = False
    aborted: bool = False

    @property
    def last(self) -> TransferStatus | None:
        """What its engine was told last."""
        return self.statuses[-1] if self.statuses else None

    def __str__(self) -> str:
        told = " ".join(f"{s.phase}{f'({s.cause})' if s.cause else ''}{'!' * s.releasable}" for s in self.statuses)
        return f"r{self.tag} in room {self.room}.{self.sibling}: {told}"


class Pool:
    """Units of one kind (pages, aux rows) of one process. A unit holds a slice from each rank that writes into it."""

    def __init__(self, size: int) -> None:
        self.owner: list[Half | None] = [None] * size
        self.content: dict[tuple[int, int], tuple[str, int] | None] = {}

    def take(self, half: Half, count: int) -> list[int] | None:
        """Give `count` units to a half; None when there are not enough."""
        free = [unit for unit, owner in enumerate(self.owner) if owner is None][:count]
        if len(free) < count:
            return None
        for unit in free:
            self.owner[unit] = half
        return free

    def give_back(self, half: Half) -> None:
        """The engine has its units back, and may give them to the next."""
        self.owner = [None if owner is half else owner for owner in self.owner]

    def put(self, unit: int, rank: int, value: tuple[str, int] | None, handle: int) -> None:
        """A unit lands. Raises ViolationError when the unit is not the attempt's any more."""
        owner = self.owner[unit]
        if owner is None or owner.handle != handle:
            raise ViolationError(f"stale write of {value} into unit {unit}, which now belongs to {owner}")
        self.content[unit, rank] = value

    def read(self, unit: int, half: Half) -> None:
        """A write's source is read. Raises ViolationError when the unit is not the half's any more."""
        if self.owner[unit] is not half:
            raise ViolationError(f"source unit {unit} of {half} was read after it was given back")


def pack(pages: list[int]) -> bytes:
    """Page ids as the protocol carries them."""
    return b"".join(page.to_bytes(4, "little") for page in pages)


def unpack(pages: bytes) -> list[int]:
    """The reverse of `pack`."""
    return [int.from_bytes(pages[at : at + 4], "little") for at in range(0, len(pages), 4)]
