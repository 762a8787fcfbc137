"""One life of one rank: its machine, its memory, and the halves of requests that its engine has posted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from tests.simulation.kinds import AnyDecode, AnyPrefill
from tests.simulation.memory import Half, Pool

PAGES = 8
AUX_ROWS = 4
STATE_ITEMS = 6


@dataclass(eq=False, slots=True)
class Process:
    """`slot` is the place (instance and rank), `incarnation` the life in it; a crash ends the life, not the place."""

    slot: str
    incarnation: str
    machine: AnyPrefill | AnyDecode
    alive: bool = True
    frozen: bool = False
    fenced: bool = False
    halves: dict[int, Half] = field(default_factory=dict)
    pages: Pool = field(default_factory=lambda: Pool(PAGES))
    aux: Pool = field(default_factory=lambda: Pool(AUX_ROWS))
    state: Pool = field(default_factory=lambda: Pool(STATE_ITEMS))
    wants: set[str] = field(default_factory=set)
    moves: Counter[int] = field(default_factory=Counter)
    handles: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def role(self) -> str:
        """Of which side it is."""
        return "prefill" if self.slot[0] == "p" else "decode"

    @property
    def instance(self) -> str:
        """The address behind which it and its fellow ranks are found."""
        return self.slot.split(".")[0]

    @property
    def rank(self) -> int:
        """Its index within the instance."""
        return int(self.slot.split(".")[1])

    def half_of(self, tag: int) -> Half | None:
        """Its half of request `tag`, if it was posted here."""
        return next((half for half in self.halves.values() if half.tag == tag), None)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All memory that its engine gives out."""
        return (self.pages, self.aux, self.state)

    def equip(self, half: Half, pages: int, state: int) -> bool:
        """Give a half its memory, with one aux row; False, and nothing taken, when there is not enough."""
        taken = [pool.take(half, count) for pool, count in zip(self.pools, (pages, 1, state), strict=True)]
        if any(units is None for units in taken):
            for pool in self.pools:
                pool.give_back(half)
            return False
        half.pages, half.aux, half.state = (units or [] for units in taken)
        return True
