"""Processes of a world: each takes events in, does what its machine says, dies, stands still and comes back.

Whatever a machine tells its engine is held against what is true.
"""

from pdpool_connector.protocol.events import (
    Connect,
    Drain,
    Event,
    Read,
    Report,
    Send,
    Shutdown,
    StopReading,
    StopWriting,
    Write,
)
from pdpool_connector.protocol.frames import AttemptFrame, Computed
from pdpool_connector.protocol.states import TransitionError
from pdpool_connector.protocol.status import Phase, TransferStatus

from tests.simulation.ground import TIMING, check
from tests.simulation.memory import Half, ViolationError
from tests.simulation.network import Letter
from tests.simulation.processes import Process
from tests.simulation.transfers import Transfers

DEADLINE_S = 8.0


class Hosts(Transfers):
    """Processes, and what they say to their engines."""

    def boot(self, slot: str) -> Process:
        life = self.lives[slot]
        self.lives[slot] += 1
        place = sorted(f"{i}.{r}" for i, n in self.shape.items() for r in range(n)).index(slot)
        incarnation = f"{place:016x}{life:016x}"
        kind = self.machines[self.direction][0 if slot[0] == "p" else 1]
        process = Process(slot, incarnation, kind(incarnation, TIMING))
        self.processes[slot] = self.everyone[incarnation] = process
        return process

    def do(self, process: Process, event: Event) -> list[Half]:
        """Have the machine take an event in, and do what it says; returns the halves that heard of it."""
        told: list[Half] = []
        if not process.alive:
            return told
        try:
            effects = process.machine.handle(event, self.now)
        except (TransitionError, LookupError) as error:  # others are faults of a test's own and surface as such
            raise ViolationError(f"the machine of {process.slot} raised {error!r} on {event}") from error
        for effect in effects:
            match effect:
                case Send(peer, AttemptFrame() as frame):
                    target = self.everyone[peer]
                    which = f" {frame.sequence}" if isinstance(frame, Computed) else ""
                    name = f"{process.slot}>{target.slot} {type(frame).__name__}{which} r{self.tags.get(frame.attempt)}"
                    self.network.post(Letter(name, process.slot, peer, frame))
                case Report(handle, status):
                    told.append(process.halves[handle])
                    self.report(process, process.halves[handle], status)
                case Write() | Read():
                    self.fly(process, effect)
                case StopWriting() | StopReading():
                    self.stop(process, effect)
                case Connect(prefill):
                    process.wants.add(prefill)
        most = TIMING.max_tombstones
        check(process.machine.tombstones <= most, f"{process.slot} remembers more than {most} ended attempts")
        self.check_stopped(process)
        return told

    def report(self, process: Process, half: Half, status: TransferStatus) -> None:
        last = half.last
        if last is not None and last.ended:
            check(
                status.phase is last.phase and status.cause is last.cause, f"an ended hand-off changed its end: {half}"
            )
            check(status.releasable or not last.releasable, f"pages were releasable and are not any more: {half}")
        half.statuses.append(status)
        half.ended, half.releasable = status.ended, status.releasable
        if status.ended and not (last is not None and last.ended):
            half.over = self.now
            self.happened[f"{process.role} {status.cause or 'done'}"] += 1
        if status.phase is Phase.DONE and process.role == "decode":
            self.done += 1
            self.check_content(process, half)
        if status.releasable and not (last is not None and last.releasable):
            self.check_untouched(process, half)
            for pool in process.pools:
                pool.give_back(half)

    def check_content(self, process: Process, half: Half) -> None:
        writers = self.serving(process, self.asks[half.tag].prefill)
        for rank in writers:
            for index, page in enumerate(half.pages, half.prefix):
                found = process.pages.content.get((page, rank.rank))
                check(found == (half.request, index), f"false success: page {index} holds {found}: {half}")
            for index, item in enumerate(half.state):
                found = process.state.content.get((item, rank.rank))
                check(found == (half.request, index), f"false success: state item {index} holds {found}: {half}")
        for row in half.aux:
            found = process.aux.content.get((row, writers[-1].rank))
            check(found == (half.request, 0), f"false success: the aux row holds {found}: {half}")
        assert half.last is not None
        moved = len(writers) * (len(half.pages) + len(half.state)) + len(half.aux)
        check(half.last.bytes_moved == moved, f"{half.last.bytes_moved} moved, should be {moved}: {half}")

    def crash(self, slot: str) -> bool:
        """The process is gone, and another one comes up in its place; what it had in flight may land all the same."""
        if not self.runs(slot):
            return False
        self.processes[slot].alive = False
        self.boot(slot)
        return True

    def shut_down(self, slot: str) -> bool:
        """The connector closes in good order: it tells its peers attempt by attempt, and is gone."""
        if not self.runs(slot):
            return False
        process = self.processes[slot]
        self.do(process, Shutdown())
        check(all(half.ended for half in process.halves.values()), f"{slot} has shut down over a living hand-off")
        return self.crash(slot)

    def drain(self, slot: str) -> bool:
        """It takes nothing new from now on."""
        if not self.runs(slot) or self.processes[slot].machine.draining:
            return False
        process = self.processes[slot]
        self.do(process, Drain())
        if process.role == "prefill":
            parked = process.machine.census.count("parked")
            check(parked == 0, f"{slot} drains, and {parked} attempts wait there for requests that come no more")
        return True

    def freeze(self, slot: str) -> bool:
        """SIGSTOP: its clock, its sockets and its engine stand still; what left it already goes on."""
        if not self.runs(slot):
            return False
        self.processes[slot].frozen = True
        return True

    def thaw(self, slot: str) -> bool:
        """SIGCONT."""
        if self.runs(slot):
            return False
        self.processes[slot].frozen = False
        return True
