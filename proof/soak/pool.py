"""Pages and aux rows of one process under test: handed out last in, first out, and watched while nobody has them."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import HostArena, KVMemory

from proof.soak.patterns import AUX_PAGE, Words, canary, foreign_bytes, owned

LAYERS = 16
"""32 regions: 31 scattered pages fill a chunk's 1024 descriptors, so most hand-offs take several chunks."""
ITEM_BYTES = 256
PAGES = 1024
AUX_ROWS = 64
AUX_BYTES = 256
REGIONS = 2 * LAYERS


@dataclass(frozen=True)
class Lease:
    """What one request has of a pool, and what its pages may hold: logical pages `first` onward of `owner`."""

    owner: int
    first: int
    pages: NDArray[np.int32]
    slot: int
    words: Words = field(init=False)
    """What the pages are to hold, shape (regions, pages)."""
    row: Words = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", owned(self.owner, self.first, len(self.pages), REGIONS))
        object.__setattr__(self, "row", owned(self.owner, AUX_PAGE, 1, 1))


class Pool:
    """The memory of one process. `stale_bytes` counts every byte that was found where nobody may have put it."""

    def __init__(self, side: int, seed: int) -> None:
        size = REGIONS * PAGES * ITEM_BYTES
        self.arena = HostArena(size + AUX_ROWS * AUX_BYTES)
        self.memory = KVMemory(
            kv=tuple(self.arena.region(i * PAGES * ITEM_BYTES, ITEM_BYTES, PAGES) for i in range(REGIONS)),
            aux=(self.arena.region(size, AUX_BYTES, AUX_ROWS),),
            page_tokens=16,
            layers=LAYERS,
            kv_heads=1,
            head_dim=ITEM_BYTES // 64,
            dtype="float32",
            model="soak",
        )
        self._words: Words = self.arena.array(0, (REGIONS, PAGES, ITEM_BYTES // 8), np.uint64)
        self._aux: Words = self.arena.array(size, (1, AUX_ROWS, AUX_BYTES // 8), np.uint64)
        # Shuffled, or pages would follow each other and large requests go out as one descriptor.
        self._free = [int(page) for page in np.random.default_rng(seed).permutation(PAGES)]
        self._free_slots = list(range(AUX_ROWS))
        numbers = np.arange(PAGES + AUX_ROWS, dtype=np.int32)
        self._canaries = canary(side, numbers[:PAGES], REGIONS)
        self._row_canaries = canary(side, numbers[PAGES:], 1)
        self._blank(numbers[:PAGES], self._free_slots)
        self.stale_bytes = 0
        self.pages_reused = 0

    def room_for(self, pages: int) -> bool:
        """Whether `take` would succeed."""
        return len(self._free) >= pages and bool(self._free_slots)

    def take(self, owner: int, first: int, count: int) -> Lease:
        """Hand out the pages that were given back last, after a look whether somebody wrote into them meanwhile."""
        pages = np.array([self._free.pop() for _ in range(count)], np.int32)
        lease = Lease(owner, first, pages, self._free_slots.pop())
        self._check_blank(pages, [lease.slot])
        self.pages_reused += count
        return lease

    def fill(self, lease: Lease) -> None:
        """Write the request's pattern, as prefill's model does."""
        self._words[:, lease.pages] = lease.words[:, :, None]
        self._aux[:, lease.slot] = lease.row

    def landed(self, lease: Lease) -> int:
        """How many of a lease's pages show the pattern of their owner in the first region."""
        return int(np.count_nonzero(self._words[0, lease.pages, 0] == lease.words[0]))

    def check(self, lease: Lease, *, complete: bool) -> None:
        """Count bytes of a lease that are not its owner's; what has not been written yet may still be blank."""
        blank, blank_row = [self._canaries[:, lease.pages]], [self._row_canaries[:, [lease.slot]]]
        if complete:
            blank, blank_row = [], []
        self.stale_bytes += foreign_bytes(self._words[:, lease.pages], lease.words, *blank)
        self.stale_bytes += foreign_bytes(self._aux[:, [lease.slot]], lease.row, *blank_row)

    def give_back(self, lease: Lease) -> None:
        """Take the pages back and mark them free; the next `take` hands them out first."""
        self._blank(lease.pages, [lease.slot])
        self._free.extend(int(page) for page in lease.pages)
        self._free_slots.append(lease.slot)

    def check_free(self) -> None:
        """Look at everything that nobody has."""
        self._check_blank(np.array(self._free, np.int32), self._free_slots)

    def _check_blank(self, pages: NDArray[np.int32], slots: list[int]) -> None:
        self.stale_bytes += foreign_bytes(self._words[:, pages], self._canaries[:, pages])
        self.stale_bytes += foreign_bytes(self._aux[:, slots], self._row_canaries[:, slots])

    def _blank(self, pages: NDArray[np.int32], slots: list[int]) -> None:
        self._words[:, pages] = self._canaries[:, pages][:, :, None]
        self._aux[:, slots] = self._row_canaries[:, slots][:, :, None]
