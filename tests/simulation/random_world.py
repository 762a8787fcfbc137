"""Random worlds: Hypothesis chooses what happens in a `World`, and shortens what breaks a promise."""

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.protocol.status import Cause

from tests.simulation.common import MACHINES, Machines, ViolationError
from tests.simulation.ending import finish
from tests.simulation.parts import Ask
from tests.simulation.world import World

SHAPES: tuple[dict[str, int], ...] = (
    {"p0": 1, "d0": 1},
    {"p0": 1, "p1": 1, "d0": 1, "d1": 1},
    {"p0": 2, "d0": 1, "d1": 1},
    {"p0": 1, "p1": 2, "d0": 2},
    {"p0": 2, "d0": 2, "d1": 1},
)
REQUESTS = 14
ROOMS = 2
STEPS = 60
FAULTS = (
    *("lose", "double", "linger", "forge", "cut", "lost", "refuse", "crash", "shut_down", "drain", "freeze", "fence"),
    *("abort", "retract", "lose_request", "refuse_request", "offer_late"),
    *("write_failed", "write_invalid", "write_unsettled", "land_late"),
)
"""What must happen in some run of `make simulate`; `land_late` counts units that land after their writer's result."""

CHOICE = st.integers(0, 255)
CHOICES = st.lists(CHOICE, min_size=1, max_size=12)
Item = TypeVar("Item")
in_trouble = precondition(lambda self: not self.calm)


class RandomWorld(RuleBasedStateMachine):
    """One run. A `calm` one has engines that abort, but no faults."""

    machines: ClassVar[Machines] = MACHINES
    runs: ClassVar[Counter[str]] = Counter()
    """How often everything happened, over all runs of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.calm = True
        self.world = World(SHAPES[0], self.machines)
        self.broken = False

    @initialize(shape=st.sampled_from(SHAPES), calm=st.integers(0, 3))
    def start(self, shape: dict[str, int], calm: int) -> None:
        self.calm = calm == 0
        self.world = World(shape, self.machines)

    # --- Without a fault ---

    def _go_on(self, choices: list[int]) -> None:
        for choice in choices:
            action = pick(list(self.world.progress()), choice)
            if action is not None:
                self.run(lambda action=action: self.world.take(action))

    @rule(choices=CHOICES)
    def go_on(self, choices: list[int]) -> None:
        self._go_on(choices)

    @rule(choices=CHOICES)
    def go_further(self, choices: list[int]) -> None:
        self._go_on(choices)

    @rule(
        prefill=CHOICE, decode=CHOICE, room=st.integers(0, ROOMS - 1), prompt=CHOICE, prefix=CHOICE, count=CHOICE,
        told=st.sampled_from(["pd", "pd", "pd", "p", "d", ""]), named=st.booleans(),
    )  # fmt: skip
    @precondition(lambda self: len(self.world.asks) < REQUESTS)
    def ask(
        self, prefill: int, decode: int, room: int, prompt: int, prefix: int, count: int, told: str, named: bool
    ) -> None:
        """A request comes, now and then two of the same prompt; where a side does not know it, in an own room."""
        world, tag = self.world, len(self.world.asks)
        instances = [[one for one in world.shape if one[0] == side] for side in "pd"]
        same = 4 * tag + prompt % 4
        ask = Ask(
            tag,
            instances[0][prefill % len(instances[0])],
            instances[1][decode % len(instances[1])],
            room if told == "pd" else 100 + tag,
            same,
            prefix % (same % 4 + 1) if prefix % 2 else 0,
            told,
            named,
        )
        self.run(lambda: world.ask(ask))
        if count % 4 == 0 and told == "pd":
            self.run(lambda: world.ask(ask._replace(tag=tag + 1, prefix=0)))

    @rule(choice=CHOICE)
    def abort(self, choice: int) -> None:
        halves = [(p, half) for p in self.world._running() for half in p.halves.values()]
        live = [pair for pair in halves if not pair[1].status.ended]
        if pair := pick(live or halves, choice):
            self.happens("abort", lambda: self.world.abort(*pair))

    @rule(choice=CHOICE)
    def refuse_request(self, choice: int) -> None:
        """The engine of a rank has no room for a request, ever: it opens its half and aborts it."""
        posts = [post for post in self.world.to_post if post in self.postable()]
        if post := pick(posts, choice):
            process = self.world.processes[post[1]]

            def refuse() -> None:
                half = self.world.post(*post)
                self.world.abort(process, half, Cause.TOO_LONG)

            self.happens("refuse_request", refuse)

    def postable(self) -> list[tuple[Ask, str]]:
        """Requests that their engines can take now."""
        world = self.world
        return [
            (ask, slot)
            for ask, slot in world.to_post
            if not (process := world.processes[slot]).frozen and (process.side == "d" or process.has(ask.size))
        ]

    @rule(choice=CHOICE)
    def lose_request(self, choice: int) -> None:
        """The router dies between the two sides: one of them never gets the request."""
        if post := pick(self.world.to_post, choice):
            ask, side = post[0], post[1][0]

            def lose() -> None:
                self.world.to_post = [one for one in self.world.to_post if one[0] != ask or one[1][0] != side]
                self.world.lost_asks.add(ask.tag)

            self.happens("lose_request", lose)

    @rule(choice=CHOICE, late=st.integers(0, 7))
    def drain(self, choice: int, late: int) -> None:
        process = pick(self.world._running(), choice)
        if process and not process.machine.draining and not late:
            self.happens("drain", lambda: self.world.drain(process.slot))

    @rule(choice=CHOICE)
    def offer_late(self, choice: int) -> None:
        """The engine offers memory for what has ended meanwhile."""
        ended = [
            (p, half) for p in self.world._running("d") for half in p.halves.values()
            if half.status.ended and not half.offered and p.free("aux")
        ]  # fmt: skip
        if pair := pick(ended, choice):
            self.happens("offer_late", lambda: self.world.offer_late(*pair))

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.run(lambda: self.world.wait(0.01 if self.calm else seconds))

    # --- Faults ---

    @in_trouble
    @rule(kind=st.sampled_from(["lose", "double", "linger"]), choice=CHOICE)
    def disturb_frame(self, kind: str, choice: int) -> None:
        world = self.world
        if letter := pick([one for one in world.letters if not one.target.frozen], choice):
            if kind == "lose":
                self.happens(kind, lambda: world.letters.remove(letter))
            elif kind == "double":
                self.happens(kind, lambda: world.deliver(letter, again=True))
            else:
                self.happens(kind, lambda: world.late.append(letter))

    @in_trouble
    @rule(choice=CHOICE, who=CHOICE, room=st.booleans())
    def forge(self, choice: int, who: int, room: bool) -> None:
        """A process that has no part in it sends a frame; prefill's own process mixes up the room."""
        world = self.world
        letter = pick([one for one in world.letters if not one.target.frozen], choice)
        if letter is None:
            return
        side, instance = letter.source[0], letter.source.split(".")[0]
        if room and side == "p":
            frame = msgspec.structs.replace(letter.frame, room=letter.frame.room + 1)
        else:
            others = [one for one in world.processes.values() if one.side == side and one.instance != instance]
            other = pick(others, who)
            if other is None:
                return
            frame = msgspec.structs.replace(letter.frame, sender=other.incarnation)
        self.happens("forge", lambda: world.forge(letter, frame))

    @in_trouble
    @rule(here=CHOICE, there=CHOICE)
    def cut(self, here: int, there: int) -> None:
        """No frame passes in this direction, until a second cut ends it."""
        link = (pick(self.world.slots, here), pick(self.world.slots, there))
        self.happens("cut", lambda: self.world.cuts.symmetric_difference_update({link}))

    @in_trouble
    @rule(choice=CHOICE)
    def freeze(self, choice: int) -> None:
        """A process stops as by SIGSTOP, or goes on."""
        process = self.world.processes[self.world.slots[choice % len(self.world.slots)]]

        def freeze() -> None:
            process.frozen = not process.frozen

        self.happens("freeze", freeze)

    @in_trouble
    @rule(choice=CHOICE, unlink=st.booleans())
    def lost(self, choice: int, unlink: bool) -> None:
        pairs = [pair for pair in self.world.connections() if not pair[0].frozen]
        if pair := pick(pairs, choice):
            self.happens("lost", lambda: self.world.lose_peer(*pair, unlink=unlink))

    @in_trouble
    @rule(choice=CHOICE)
    def refuse(self, choice: int) -> None:
        """A prefill instance cannot be reached."""
        waits = [(p, prefill) for p in self.world._running("d") for prefill in sorted(p.wants)]
        waits = [pair for pair in waits if pair[1] in self.world.wanted(pair[0])]
        if pair := pick(waits, choice):
            self.happens("refuse", lambda: self.world.refuse(*pair))

    @in_trouble
    @rule(choice=CHOICE, orderly=st.integers(0, 2))
    def end_process(self, choice: int, orderly: int) -> None:
        if process := pick(self.world._running(), choice):
            if orderly:
                self.happens("crash", lambda: self.world.crash(process.slot))
            else:
                self.happens("shut_down", lambda: self.world.shut_down(process.slot))

    @in_trouble
    @rule(choice=CHOICE)
    def fence(self, choice: int) -> None:
        dead = [one for one in self.world.everyone.values() if not one.alive and not one.fenced]
        process = pick(dead, choice)
        if process and not any(one.frozen for one in self.world.processes.values()):
            self.happens("fence", lambda: self.world.fence(process))

    @in_trouble
    @rule(choice=CHOICE)
    def retract(self, choice: int) -> None:
        """Decode gives up a request to make room, and the router sends it to both sides once more, as it was."""
        world = self.world
        halves = [(p, half) for p in world._running("d") for half in p.halves.values() if not half.status.ended]
        if (pair := pick(halves, choice)) and len(world.asks) < REQUESTS:
            self.happens("retract", lambda: world.abort(*pair))
            self.run(lambda: world.ask(pair[1].ask._replace(tag=len(world.asks))))

    @in_trouble
    @rule(choice=CHOICE, result=st.sampled_from([WriteResult.FAILED, WriteResult.UNSETTLED, WriteResult.INVALID]))
    def fail_write(self, choice: int, result: WriteResult) -> None:
        flights = [
            flight for flight in self.world.flights
            if flight.left and not flight.reported and flight.source.alive and not flight.source.frozen
            and (result is not WriteResult.INVALID or not flight.moved)
        ]  # fmt: skip
        if flight := pick(flights, choice):
            self.run(lambda: self.world.settle(flight, result))

    @in_trouble
    @rule(choices=CHOICES)
    def land(self, choices: list[int]) -> None:
        """Bytes land, among them those of the dead and of unsettled writes."""
        for choice in choices:
            if flight := pick([one for one in self.world.flights if one.left], choice):
                self.run(lambda flight=flight: self.world.land(flight))

    # --- The end ---

    def teardown(self) -> None:
        if self.broken:
            return
        self.run(lambda: finish(self.world, calm=self.calm))
        type(self).runs += self.world.happened
        type(self).runs["runs"] += 1
        type(self).runs["requests"] += len(self.world.asks)

    def happens(self, kind: str, act: Callable[[], object]) -> None:
        """A fault."""
        self.world.happened[kind] += 1
        self.world.trace.append(kind)
        self.run(act)

    def run(self, act: Callable[[], object]) -> None:
        """Anything that may break a promise."""
        try:
            act()
        except ViolationError as error:
            self.broken = True
            trace = "\n".join(f"  {step}" for step in self.world.trace[-60:])
            raise ViolationError(f"{error}\nwhat happened:\n{trace}") from None


def pick(items: list[Item], choice: int) -> Item | None:
    """One of the items; None when there is none."""
    return items[choice % len(items)] if items else None


def play(number: int, runs: int, machines: Machines = MACHINES, *, shorten: bool = True) -> Counter[str]:
    """So many runs from one seed; returns how often everything happened. Raises ViolationError.

    `shorten`: search for the shortest run that breaks a promise, which takes a while.
    """
    kind: Any = type("RandomWorld", (RandomWorld,), {"machines": machines, "runs": Counter()})
    phases = [Phase.generate, Phase.shrink] if shorten else [Phase.generate]
    run_state_machine_as_test(
        seed(number)(kind),
        settings=settings(
            max_examples=runs,
            stateful_step_count=STEPS,
            phases=phases,
            database=None,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return kind.runs  # type: ignore[no-any-return]
