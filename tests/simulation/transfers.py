"""What the data planes of a world do: each transfer lands unit by unit, and its engine learns how it ended."""

from pdpool_connector.protocol.events import Read, ReadEnded, StopReading, StopWriting, Write, WriteEnded, WriteResult

from tests.simulation.ground import Ground, check
from tests.simulation.memory import Half, ViolationError, unpack
from tests.simulation.planes import Flight, units_of_read, units_of_write
from tests.simulation.processes import Process


class Transfers(Ground):
    """Writes by prefill and reads by decode, both of them late, in pieces, and not always with an end."""

    def fly(self, mover: Process, move: Write | Read) -> None:
        """A machine has asked for a transfer."""
        tag = self.tags.get(move.attempt, -1)
        mover.moves[tag] += 1
        peer = self.everyone[move.peer]
        check(not peer.fenced, f"a transfer of r{tag} begins with {peer.slot} though that was fenced")
        name = f"{mover.slot}>{peer.slot} r{tag} {type(move).__name__.lower()} {mover.moves[tag]}"
        if isinstance(move, Write):
            half = self.source_of(mover, move)
            flight = Flight(name, mover, mover, peer, half, move, units_of_write(move, half))
        else:
            half = mover.halves[move.attempt.number]
            check(not half.releasable, f"a read of r{tag} goes into memory that was given back")
            flight = Flight(name, mover, peer, mover, half, move, units_of_read(move, half))
        self.flights.append(flight)

    def source_of(self, mover: Process, write: Write) -> Half:
        """Whose memory a write reads."""
        owner = None
        if write.source:
            owner = mover.pages.owner[unpack(write.source)[0]]
        elif write.aux is not None:
            owner = mover.aux.owner[write.aux[0]]
        elif write.state[0]:
            owner = mover.state.owner[unpack(write.state[0])[0]]
        if owner is None:
            raise ViolationError(f"a write for r{self.tags.get(write.attempt)} reads memory that was given back")
        return owner

    def stop(self, mover: Process, order: StopWriting | StopReading) -> None:
        """A machine wants no more chunks of an attempt to be submitted."""
        for flight in self.flights:
            if flight.mover is mover and flight.move.attempt == order.attempt and flight.move.peer == order.peer:
                flight.stopped = True

    def check_stopped(self, process: Process) -> None:
        """What has failed is moved no further."""
        for flight in self.flights:
            if flight.mover is process and flight.half.ended and not (flight.stopped or flight.reported):
                raise ViolationError(f"moving was not stopped although it is over: {flight.half}")

    def check_untouched(self, process: Process, half: Half) -> None:
        """Memory that goes back to its engine is touched by no transfer any more, on either side of it."""
        for flight in self.flights:
            if flight.left and self.touches(flight, process, half):
                raise ViolationError(f"memory was given back while {flight.name} may touch it: {half}")

    def touches(self, flight: Flight, process: Process, half: Half) -> bool:
        """Whether a transfer uses memory of a half."""
        if process is flight.mover:
            return half is flight.half
        at = 1 if process is flight.prefill else 2
        mine = {"pages": half.pages, "state": half.state, "aux": half.aux}
        return process is flight.peer and any(unit[at] in mine[unit[0]] for unit in flight.left)

    def flight(self, name: str) -> Flight | None:
        """The transfer of that name, if it is still under way."""
        return next((flight for flight in self.flights if flight.name == name), None)

    def land(self, name: str) -> bool:
        """One more unit of a transfer is in place; those of the dead, the frozen and the unsettled land, too."""
        flight = self.flight(name)
        if flight is None or not flight.left:
            return False
        flight.land()
        self.happened["land_late"] += flight.reported or not flight.mover.alive
        if not flight.left and (flight.reported or not flight.mover.alive):
            self.flights.remove(flight)
            check_source(flight)
        return True

    def settle(self, name: str, result: WriteResult) -> bool:
        """The mover's engine learns how a transfer ended."""
        flight = self.flight(name)
        if flight is None or flight.reported or flight.mover.frozen or not flight.mover.alive:
            return False
        whole = not flight.left and not flight.severed
        if whole is not (result is WriteResult.LANDED) or (result is WriteResult.STOPPED and not flight.stopped):
            return False
        flight.reported = True
        self.happened[f"transfer_{result}"] += 1
        if result is WriteResult.UNSETTLED and flight.left:
            self.unsettled.append((flight.mover, flight.peer))
        else:
            self.flights.remove(flight)
        move = flight.move
        ended: WriteEnded | ReadEnded
        if isinstance(move, Write):
            ended = WriteEnded(move.attempt, move.write, result, flight.moved, "simulated")
        else:
            ended = ReadEnded(move.attempt, move.read, result, flight.moved, "simulated")
        told = self.do(flight.mover, ended)
        check(all(half is flight.half for half in told), f"the end of {name} changed more than its own: {told}")
        check_source(flight)
        return True

    def sever(self, dead: Process) -> None:
        """A process is proved to touch memory no more, nor to have any: what it moved, and what is moved to it, ends.

        Engines of the living learn it later.
        """
        self.flights = [flight for flight in self.flights if flight.mover is not dead]
        for flight in self.flights:
            if flight.peer is dead:
                flight.severed |= bool(flight.left) and flight.mover is flight.decode
                flight.left.clear()
        self.flights = [flight for flight in self.flights if not flight.reported or flight.left]


def check_source(flight: Flight) -> None:
    """What was read had not been given back; said only after decode might have taken it for a success."""
    check(not flight.astray, f"{flight.name} has read {flight.astray}: {flight.half}")
