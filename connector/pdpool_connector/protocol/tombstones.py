"""How attempts ended: remembered, said until the other side acknowledges it, said again to whoever asks.

Prefill keeps these in both directions, decode in READ, where it is the one who says how an attempt ended.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

import msgspec

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.timers import Timers

Key = tuple[str, AttemptId]
"""Who is told of an end, and whose it is: in READ decode tells each rank that an attempt reads from."""


class Tombstone(msgspec.Struct, gc=False):
    """The end of an attempt, kept to answer late frames. `cause` None means done.

    `to`: who is told, by default the attempt's decode. `heard`: it ended by that side's own word, which is acknowledged
    and not answered with an end of ours. `request_id`, `part`, `parts`, `prompt`: see `frames.Drained`.
    There are a hundred thousand of these on a busy prefill: none is anything to the garbage collector.
    """

    attempt: AttemptId
    room: int
    sibling: int
    cause: Cause | None
    message: str
    bytes_moved: int = 0
    checksum: int | None = None
    to: str = ""
    heard: bool = False
    request_id: str = ""
    part: int = 0
    parts: int = 1
    prompt: bytes = b""
    retry_s: float = 0.0
    acknowledged: bool = False

    def __post_init__(self) -> None:
        self.to = self.to or self.attempt.decode
        self.acknowledged = self.heard

    @property
    def key(self) -> Key:
        """Under which it is remembered."""
        return (self.to, self.attempt)


class TombstoneTable:
    """Tombstones by attempt, bounded in all and for each peer; they leave by their deadline only.

    Forgetting must not resurrect: an attempt's number grows with each attempt of its decode, so for each peer the
    highest forgotten number is kept as a floor, and an attempt at or below it that is not known is never new. The floor
    also stands in for tombstones that find no room. Attempts that decode numbered earlier but that arrive only after
    a later one was forgotten are refused by it, which costs a retry and never safety.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[Key, Tombstone] = {}
        self._of_peer: Counter[str] = Counter()
        self._floor: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, attempt: AttemptId, to: str = "") -> Tombstone | None:
        """The tombstone of `attempt` for `to` (by default its decode), if it is remembered."""
        return self._rows.get((to or attempt.decode, attempt))

    def of(self, peer: str) -> int:
        """How many ends are remembered for `peer`."""
        return self._of_peer[peer]

    def full(self, peer: str, *, reserved: int = 0, reserved_of_peer: int = 0) -> bool:
        """True when no further end could be remembered, in all or for this peer, once the reserved ones have come."""
        return len(self._rows) + reserved >= self._limit or self._of_peer[peer] + reserved_of_peer >= self._limit // 2

    def stale(self, attempt: AttemptId) -> bool:
        """True when an attempt that is not known can only be one that has been forgotten."""
        return attempt.number <= self._floor.get(attempt.decode, -1)

    def bury(self, tombstone: Tombstone, *, reserved: int = 0, reserved_of_peer: int = 0) -> bool:
        """Remember an end. False when there is no room beside what is reserved: then the floor keeps it from rising."""
        if self.full(tombstone.to, reserved=reserved, reserved_of_peer=reserved_of_peer):
            self._raise_floor(tombstone)
            return False
        self._rows[tombstone.key] = tombstone
        self._of_peer[tombstone.to] += 1
        return True

    def forget(self, key: Key) -> Tombstone:
        """Its deadline has come. Returns it."""
        tombstone = self._rows.pop(key)
        self._of_peer[tombstone.to] -= 1
        if not self._of_peer[tombstone.to]:
            del self._of_peer[tombstone.to]
        self._raise_floor(tombstone)
        return tombstone

    def forget_peer(self, peer: str) -> bool:
        """Drop the floor of a peer that is long gone; False when tombstones of it are still here."""
        if self._of_peer[peer]:
            return False
        self._floor.pop(peer, None)
        return True

    def _raise_floor(self, tombstone: Tombstone) -> None:
        attempt = tombstone.attempt
        if tombstone.to == attempt.decode:  # decode itself needs none: its own counter tells which attempts are new
            self._floor[attempt.decode] = max(attempt.number, self._floor.get(attempt.decode, -1))


class ResultNotifier:
    """The graveyard with a voice. `send(peer, frame type, about, **fields)` puts a frame on its way.

    Two timers of the machine's belong to each tombstone: "verdict" calls `tell`, "grave" calls `forget`.
    """

    def __init__(self, timing: Timeouts, timers: Timers[tuple[str, Hashable]], send: Callable[..., None]) -> None:
        self.graves = TombstoneTable(timing.max_tombstones)
        self._timing, self._timers, self._send = timing, timers, send
        self._unheard: Counter[str] = Counter()

    def unheard(self, peers: Iterable[str]) -> int:
        """How many ends that are remembered for these peers none of them has acknowledged yet."""
        return sum(self._unheard[peer] for peer in peers)

    def reach(self, tombstone: Tombstone, now: float, *, reserved: int = 0, reserved_of_peer: int = 0) -> None:
        """An attempt has ended: remember how, and say so until the other side acknowledges it.

        `reserved`, `reserved_of_peer`: see `TombstoneTable.full`. Where there is no room beside it, it is said once.
        """
        tombstone.retry_s = self._timing.retry_first_s
        if self.graves.bury(tombstone, reserved=reserved, reserved_of_peer=reserved_of_peer):
            if not tombstone.acknowledged:
                self._unheard[tombstone.to] += 1
            keep_s = self._timing.acked_s if tombstone.acknowledged else self._timing.verdict_s
            key = tombstone.key
            self._timers.set(("grave", key), now + keep_s)
            self._tell(key, tombstone, now)
        else:
            self.say(tombstone)

    def tell(self, key: Key, now: float) -> None:
        """Say how it ended, and, while nobody has acknowledged it, again later."""
        tombstone = self.graves.get(key[1], key[0])
        if tombstone is not None:
            self._tell(key, tombstone, now)

    def _tell(self, key: Key, tombstone: Tombstone, now: float) -> None:
        self.say(tombstone)
        if not tombstone.acknowledged:
            self._timers.set(("verdict", key), now + tombstone.retry_s)
            tombstone.retry_s = min(2 * tombstone.retry_s, self._timing.retry_max_s)

    def answer(self, frame: f.AttemptFrame, now: float) -> bool:
        """Answer a frame about an attempt that is not live; False when it was never seen here."""
        if self.graves.get(frame.attempt, frame.sender) is not None:
            self.tell((frame.sender, frame.attempt), now)
        elif self.graves.stale(frame.attempt):
            self.say(forgotten(frame))
        else:
            return False
        return True

    def acknowledge(self, frame: f.AttemptFrame, now: float) -> bool:
        """The other side has taken note; False when there is nothing that it could have taken note of."""
        tombstone = self.graves.get(frame.attempt, frame.sender)
        if tombstone is None:
            return False
        if not tombstone.acknowledged:
            tombstone.acknowledged = True
            self._heard(tombstone.to)
            self._timers.cancel(("verdict", tombstone.key))
            self._timers.set(("grave", tombstone.key), now + self._timing.acked_s)
        return True

    def forget(self, key: Key) -> None:
        """Its time is over."""
        self._timers.cancel(("verdict", key))
        tombstone = self.graves.forget(key)
        if not tombstone.acknowledged:
            self._heard(tombstone.to)

    def _heard(self, peer: str) -> None:
        self._unheard[peer] -= 1
        if not self._unheard[peer]:
            del self._unheard[peer]

    def say(self, tombstone: Tombstone) -> None:
        """Say an end once, remembered or not."""
        if tombstone.heard:
            self._send(tombstone.to, f.Ack, tombstone)
        elif tombstone.cause is None:
            self._send(tombstone.to, f.Done, tombstone, bytes_moved=tombstone.bytes_moved, checksum=tombstone.checksum)
        else:
            self._send(
                tombstone.to,
                f.Drained,
                tombstone,
                cause=tombstone.cause,
                message=tombstone.message,
                request_id=tombstone.request_id,
                part=tombstone.part,
                parts=tombstone.parts,
                prompt=tombstone.prompt,
            )


def forgotten(frame: f.AttemptFrame, who: str = "prefill") -> Tombstone:
    """What is said of an attempt that this process, `who`, knows nothing of: at least it moves nothing for it."""
    message = f"{who} knows nothing of it"
    return Tombstone(frame.attempt, frame.room, frame.sibling, Cause.FORGOTTEN, message, to=frame.sender)
