"""The end of a random run: faults stop, everything must end by itself, and what is held must have a reason."""

from collections import Counter
from collections.abc import Iterator

from pdpool_connector.protocol.status import Cause, Phase

from tests.simulation.common import require
from tests.simulation.parts import Half, Process
from tests.simulation.snapshot import containers
from tests.simulation.world import DEADLINE_S, TIMEOUTS, World

SETTLE_S = DEADLINE_S + TIMEOUTS.quiesce_s + 5
FORGET_S = 3 * (TIMEOUTS.result_s + TIMEOUTS.acked_s)
MOST_ACTIONS = 20_000
FULL = "remembers as many"
"""Part of the message of a hand-off that was refused because the table of ended ones is full."""


def finish(world: World, *, calm: bool) -> None:
    """Let faults stop, judge holds, fence the dead, and judge what is left. Raises ViolationError."""
    heal(world)
    play_on(world, SETTLE_S)
    judge_holds(world)
    for source, target in world.unsettled:
        # Only the end of one of its two processes proves that an unsettled write is over.
        if source.alive and target.alive:
            world.crash((source, target)[len(world.trace) % 2].slot)
    world.unsettled.clear()
    for process in list(world.everyone.values()):
        if not process.alive and not process.fenced:
            world.fence(process)
    heal(world)
    play_on(world, SETTLE_S + FORGET_S)
    judge_end(world)
    if calm:
        judge_calm(world)
    if world.late:
        epilogue(world)


def heal(world: World) -> None:
    """Frozen processes go on, cuts end, and each side learns of the connections that the other has lost."""
    world.cuts.clear()
    for process in world.processes.values():
        process.frozen = False
    for here, there in world.unnoticed():
        world.lose_peer(here, there)
    for decode, prefill in world.connections():
        if (decode, prefill) in world.linked - world.greeted:
            world.lose_peer(decode, prefill)


def play_on(world: World, seconds: float) -> None:
    """Everything that can happen without a fault happens, until nothing does for so long."""
    end, actions = world.now + seconds, 0
    while True:
        while (action := next(world.progress(), None)) is not None:
            world.take(action)
            actions += 1
            require(actions < MOST_ACTIONS, f"it does not come to rest: {world.trace[-12:]}")
        if world.now >= end:
            return
        due = [when for p in world.processes.values() if (when := p.machine.next_deadline) is not None]
        world.wait(max(min([end, *due]) - world.now, 0.0))


def epilogue(world: World) -> None:
    """Frames of long ago arrive and harm nothing: the same requests come once more, and they get their data."""
    late = [letter for letter in world.late if letter.target.alive]
    attempts = {letter.frame.attempt for letter in late}
    again = {world.everyone[attempt.decode].halves[attempt.number].ask for attempt in attempts}
    world.late.clear()
    world.letters += late
    fresh = 1000
    for number, ask in enumerate(sorted(again), fresh):
        ranks = [*world.ranks_of(ask.prefill), *world.ranks_of(ask.decode)]
        if not any(process.machine.draining for process in ranks):
            world.ask(ask._replace(tag=number))
    play_on(world, SETTLE_S)
    for process, half in halves(world):
        if half.ask.tag >= fresh:
            ok = half.status.phase is Phase.DONE or FULL in half.status.message
            require(ok, f"a late frame has harmed {half} on {process.slot}")
    play_on(world, FORGET_S)
    judge_end(world)


def judge_holds(world: World) -> None:
    """What is held is held because of a process that is not proved dead, or of an unsettled write, and nothing else."""
    unproved = {process for process in world.everyone.values() if not process.alive and not process.fenced}
    unproved |= {process for pair in world.unsettled for process in pair}
    for _, half in halves(world):
        reasons = {p for p in unproved if p.instance in (half.ask.prefill, half.ask.decode)}
        require(
            not half.status.ended or half.status.releasable or bool(reasons),
            "memory is held for no reason that lives",
            half,
        )


def judge_end(world: World) -> None:
    """Nothing is left behind, and the two sides agree."""
    require(not world.to_post, f"requests were never taken: {world.to_post}")
    for process, half in halves(world):
        require(half.status.releasable, "memory was never released", half)
        judge_agreement(world, process, half)
    alive = {process.incarnation for process in world.processes.values()}
    for process in world.processes.values():
        machine = process.machine
        require(not process.owner, f"memory of {process.slot} is left with an owner")
        require(machine.rows == 0, f"{machine.rows} rows are left on {process.slot}")
        require(machine.tombstones == 0, f"{machine.tombstones} tombstones are left on {process.slot}")
        require(machine.next_deadline is None, f"a deadline is left on {process.slot}")
        for label in machine.queues.labels:
            require(machine.queues.count(label) == 0, f"queue {label} of {process.slot} is not empty")
        for name, table in containers(machine):
            names = {writer.incarnation for row in table.values() for writer in row} if name == "_links" else table
            strangers = [str(key) for key in names if str(key) not in alive and name != "_fenced"]
            require(not strangers, f"{name} of {process.slot} still holds {strangers}")


def judge_agreement(world: World, process: Process, half: Half) -> None:
    """Success at decode is success at prefill, and a cause that names an engine's act has such an act."""
    one = [(p, other) for p, other in everyones(world) if may_be_one(other, half)]
    status = half.status
    done = [p.slot for p, other in one if p.side == "d" and other.ask.tag == half.ask.tag and _done(other)]
    if len(set(done)) == world.shape[half.ask.decode]:
        wrote = any(p.side == "p" and (_done(other) or not p.alive) for p, other in one)
        require(wrote, f"all decode ranks have it, and prefill has not sent it: {half}; {[str(o) for _, o in one]}")
    if status.cause is Cause.ABORTED:
        require(half.aborted, "no engine has aborted it", half)
    if status.cause is Cause.PEER_ABORTED:
        require(any(other.aborted for _, other in one), "no engine has aborted it", half)


def _done(half: Half) -> bool:
    return half.status.phase is Phase.DONE


def may_be_one(one: Half, other: Half) -> bool:
    """Whether the two may be halves of one hand-off."""
    a, b = one.ask, other.ask
    return (a.prefill, a.decode, a.room, a.prompt) == (b.prefill, b.decode, b.room, b.prompt)


def judge_calm(world: World) -> None:
    """Where nothing goes wrong, everything is handed over, except what an engine gave up, or had no room for."""
    given_up = Counter(half.ask for _, half in everyones(world) if half.aborted or half.status.cause is Cause.REFUSED)
    for process, half in everyones(world):
        if half.status.phase is Phase.DONE:
            continue
        group = [ask for ask in world.asks if (ask.room, ask.prompt) == (half.ask.room, half.ask.prompt)]
        if any(ask.tag in world.lost_asks for ask in group):
            soon = half.over <= half.opened + TIMEOUTS.match_s + 1.0
            require(soon, f"{process.slot} waited long for a request that was lost", half)
            continue
        require(any(given_up[ask] for ask in group), "it failed, though nothing went wrong", half)
        timed_out = half.status.cause is Cause.TIMED_OUT
        messages = [other.status.message for _, other in everyones(world) if other.ask in group]
        require(not timed_out or any(FULL in m for m in messages), f"{process.slot} was not informed", half)


def halves(world: World) -> Iterator[tuple[Process, Half]]:
    """Halves of the processes that run now."""
    return ((process, half) for process in world.processes.values() for half in process.halves.values())


def everyones(world: World) -> Iterator[tuple[Process, Half]]:
    """Halves of all processes that ever were."""
    return ((process, half) for process in world.everyone.values() for half in process.halves.values())
