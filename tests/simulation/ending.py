"""Once faults stop, everything must come to an end by itself; what has to be proved first, is held until it is."""

from collections import deque

from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.protocol.machine import MAX_FENCED
from pdpool_connector.protocol.status import Cause, Phase

from tests.simulation.ground import TIMING, check
from tests.simulation.hosts import DEADLINE_S
from tests.simulation.memory import Half
from tests.simulation.processes import Process
from tests.simulation.world import LATE_S, World

SETTLE_S = DEADLINE_S + TIMING.drain_s + 5
FORGET_S = 3 * (TIMING.verdict_s + TIMING.acked_s)


def finish(world: World) -> None:
    """Let the faults stop, judge what is held, fence the dead, and judge what is left. Raises ViolationError."""
    heal(world)
    play_on(world, SETTLE_S)
    call_again(world)
    judge_holds(world)
    world.vouch()
    for incarnation in list(world.everyone):
        world.fence(incarnation)
    heal(world)
    play_on(world, SETTLE_S)
    play_on(world, FORGET_S)
    judge_end(world)
    if world.arrive_late():
        epilogue(world)


def call_again(world: World) -> None:
    """Decodes that have given up saying how long ago something ended in READ have a next hand-off with that prefill."""
    for process, half in living_halves(world):
        forgotten = half.ended and not half.releasable and world.now > half.over + TIMING.verdict_s
        if world.direction == "read" and process.role == "prefill" and forgotten:
            for rank in range(world.shape[world.asks[half.tag].decode]):
                decode = world.processes[f"{world.asks[half.tag].decode}.{rank}"]
                if not world.is_linked(decode, process.instance):
                    decode.wants.add(process.instance)
    play_on(world, 1.0)


def epilogue(world: World) -> None:
    """Frames of long ago arrive, and harm nobody: every room starts clean and gets its own data."""
    rooms = sorted({(ask.prefill, ask.decode, ask.room, ask.sibling) for ask in world.asks.values()})
    fresh = 1 + max(world.asks)
    for tag, (prefill, decode, room, sibling) in enumerate(rooms, fresh):
        ranks = [world.processes[f"{i}.{rank}"] for i in (prefill, decode) for rank in range(world.shape[i])]
        if not any(process.machine.draining for process in ranks):
            world.ask(tag, prefill, decode, room, sibling, 1, 0, 1, f"r{tag}")
            for process in ranks:
                if process.role == "prefill":
                    world.post(tag, process.slot)
    play_on(world, SETTLE_S)
    halves = [(process, half) for process, half in living_halves(world) if half.tag >= fresh]
    # Late frames are remembered like others, and so many rooms at once can be more than there is room for.
    full = {half.tag for _, half in halves if half.last is not None and "remembers as many" in half.last.message}
    for process, half in halves:
        done = half.last is not None and half.last.phase is Phase.DONE
        check(done or half.tag in full, f"what came late has harmed {half} on {process.slot}")
    play_on(world, FORGET_S)
    judge_end(world)


def heal(world: World) -> None:
    """The frozen go on, cuts are mended, and whoever lost a peer learns it."""
    for slot in world.processes:
        world.thaw(slot)
    world.network.cuts.clear()
    for slot, peer in world.unnoticed():
        world.lost(slot, peer)
    for decode, prefill in sorted(world.linked - world.greeted):
        world.lost(world.everyone[decode].slot, prefill)


def play_on(world: World, seconds: float) -> None:
    """Everything that can happen without a fault happens, round by round, until nothing does for so long."""
    end = world.now + seconds
    while world.now < end:
        if not turn(world):
            before = world.now
            world.wait_for_due()
            if world.now == before:
                world.wait(0.25)


def turn(world: World) -> bool:
    """One round; False when there was nothing to do but wait."""
    busy = [world.post(*key) for key in list(world.to_post)]
    for process in world.processes.values():
        if process.role == "prefill":
            halves = [half for half in process.halves.values() if not half.ended and not half.closed]
            busy += [world.send(half.tag, process.slot, len(half.pages)) for half in halves]
    for slot, prefill in world.wanted():
        while world.greet(slot, prefill):
            busy.append(True)
        busy.append(world.link(slot, prefill))
    busy += [world.deliver(letter.name) for letter in list(world.network.letters)]
    for flight in list(world.flights):
        if flight.stopped and flight.left:
            busy.append(world.settle(flight.name, WriteResult.STOPPED))
        while world.land(flight.name):
            busy.append(True)
        busy.append(world.settle(flight.name, WriteResult.FAILED if flight.severed else WriteResult.LANDED))
    return any(busy)


def judge_holds(world: World) -> None:
    """What is still held is held because of a process that nobody has proved quiet, and for nothing else."""
    unproved = {process.incarnation for process in world.everyone.values() if not process.alive}
    unproved |= {side.incarnation for pair in world.unsettled for side in pair}
    for process, half in living_halves(world):
        if not half.ended or half.releasable:
            continue
        ask = world.asks[half.tag]
        other = ask.decode if process.role == "prefill" else ask.prefill
        reasons = {p.incarnation for p in world.everyone.values() if p.instance == other} & unproved
        check(bool(reasons), f"memory is held for no reason that lives: {half}")


def judge_end(world: World) -> None:
    """Nothing is left behind, and both sides tell the same story."""
    check(not world.to_post, f"requests were never taken in: {sorted(world.to_post)}")
    for process, half in living_halves(world):
        check(half.releasable, f"memory was never released: {half}")
        judge_agreement(world, process, half)
    for process in world.processes.values():
        owned = any(owner for pool in process.pools for owner in pool.owner)
        check(not owned, f"memory of {process.slot} is left with an owner")
        check(process.machine.rows == 0, f"{process.machine.rows} rows are left on {process.slot}")
        judge_tables(world, process)


def judge_tables(world: World, process: Process) -> None:
    """No table holds anything, but of peers that live: what they speak, and how far their attempts are forgotten."""
    machine, alive = process.machine, {other.incarnation for other in world.processes.values()}
    check(machine.next_deadline is None, f"a deadline is left on {process.slot}")
    for label in machine.census.labels:
        check(machine.census.count(label) == 0, f"queue {label} of {process.slot} is not empty")
    graves = getattr(machine, "_graves", None)
    tables = vars(machine) | (
        {f"graves.{name}": table for name, table in vars(graves).items()} if graves is not None else {}
    )
    for name, table in tables.items():
        if not isinstance(table, dict | set | list | deque) or name == "fired" or name.startswith("_on_"):
            continue
        if name == "_fenced":
            check(len(table) <= MAX_FENCED, f"{process.slot} remembers {len(table)} fenced processes")
            continue
        if name in ("_versions", "_behind", "graves._floor"):
            strangers = set(table) - alive
        elif name == "_links":
            assert isinstance(table, dict)
            strangers = {writer.incarnation for writers in table.values() for writer in writers} - alive
        else:
            strangers = set(map(str, table))
        check(not strangers, f"{name} of {process.slot} still holds {sorted(strangers)}")


def judge_agreement(world: World, process: Process, half: Half) -> None:
    """Success of all ranks that move is success on the other side; an abort that one was told of, somebody has said.

    It is the side that does not move which hears of success, so that it never believes in more than there was.
    """
    halves = [(p, other) for p in world.everyone.values() for other in p.halves.values()]
    assert half.last is not None
    mine = [other for p, other in halves if p.role == process.role and other.tag == half.tag]
    told, mover = ("decode", "prefill") if world.direction == "write" else ("prefill", "decode")
    if process.role == told and all(other.last and other.last.phase is Phase.DONE for other in mine):
        same = [(p, other) for p, other in halves if p.role == mover and other.request == half.request]
        agree = any(not p.alive or (other.last and other.last.phase is Phase.DONE) for p, other in same)
        check(agree, f"sides disagree: {half}; {[str(other) for _, other in same]}")
    if half.last.cause is Cause.ABORTED:
        check(half.aborted, f"nobody aborted it: {half}")
    if half.last.cause is Cause.SUPERSEDED and process.role == "decode" and world.shape[process.instance] == 1:
        # Ranks of one decode number their attempts each for itself, so theirs have no order among each other.
        newer = [other for other in process.halves.values() if other.request == half.request]
        check(any(other.handle > half.handle for other in newer), f"no newer attempt supersedes {half}")
    if half.last.cause is Cause.PEER_ABORTED:
        aborted = [other for _, other in halves if other.aborted and may_be_one(world, other, half)]
        check(bool(aborted), f"told of an abort that nobody said: {half}")


def may_be_one(world: World, one: Half, other: Half) -> bool:
    """Whether the two may be taken for halves of one request."""
    if world.prompts:
        return one.request == other.request
    return world.asks[one.tag].place == world.asks[other.tag].place


def judge_calm(world: World) -> None:
    """Where nothing goes wrong, all is handed over but what was aborted or had no room, and none waits long."""
    halves = [(process, half) for process in world.everyone.values() for half in process.halves.values()]
    refused = {half.request for _, half in halves if half.last and half.last.cause is Cause.REFUSED}
    aborted = {half.request for _, half in halves if half.aborted}
    full = "prefill remembers as many" if world.direction == "write" else "remembers as many"
    # Without prompts, a half whose counterpart was lost stays in its place, where the next request may be taken for it.
    lost = {ask.place for ask in world.asks.values() if ask.request in world.lost_asks and not world.prompts}
    for process, half in halves:
        assert half.last is not None
        if half.last.phase is Phase.DONE or world.asks[half.tag].place in lost:
            continue
        if half.request in world.lost_asks:
            soon = half.over <= half.posted + TIMING.meet_s + LATE_S
            check(soon or process.role == "prefill", f"decode was not told that prefill has no request: {half}")
        elif half.request in refused:
            said = [other.last.message for _, other in halves if other.request == half.request and other.last]
            told = half.last.cause is not Cause.TIMED_OUT or any(full in why for why in said)
            check(told, f"{process.role} was not told that the other side refused: {half}")
        else:
            check(half.request in aborted, f"it failed, though nothing went wrong: {half}")
            heard = half.last.cause in (Cause.ABORTED, Cause.PEER_ABORTED)
            check(heard, f"an abort was not heard of: {half}")


def living_halves(world: World) -> list[tuple[Process, Half]]:
    """Halves of the processes that run now."""
    return [(process, half) for process in world.processes.values() for half in process.halves.values()]
