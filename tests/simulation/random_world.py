"""Random worlds: Hypothesis chooses what happens in a `World`, and shortens what breaks a promise."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.protocol.status import Cause

from tests.simulation.common import MACHINES, Machines, ViolationError
from tests.simulation.ending import finish
from tests.simulation.parts import Ask, Letter
from tests.simulation.world import World

SHAPES: tuple[dict[str, int], ...] = (
    {"p0": 1, "d0": 1, "d1": 1},
    {"p0": 1, "p1": 1, "d0": 1, "d1": 1},
    {"p0": 2, "d0": 1, "d1": 1},
    {"p0": 1, "p1": 2, "d0": 2},
    {"p0": 2, "d0": 2, "d1": 1},
)
REQUESTS = 14
ROOMS = 2
STEPS = 70
FAULTS = (
    *("lose", "double", "linger", "forge", "cut", "lost", "refuse", "crash", "shut_down", "drain", "freeze", "fence"),
    *("abort", "retract", "lose_request", "refuse_request", "offer_late"),
    *("write_failed", "write_invalid", "write_unsettled", "land_late"),
)
"""What must happen in some run of `make simulate`; `land_late` counts units that land after their writer's result."""

ENGINES = ("abort", "refuse_request", "lose_request", "drain", "offer_late")
TROUBLES = (
    *("lose", "double", "linger", "forge", "cut", "freeze", "lost", "refuse", "crash", "shut_down", "fence", "retract"),
    *("fail_write", "land"),
)
KINDS = (*("go_on",) * 5, *("ask",) * 2, *("trouble",) * 3, "engine_acts", "wait")
"""Kinds of steps. One rule draws them: Hypothesis disables half of the rules in each run, and without requests, for
example, a run shows nothing."""
CHOICES = st.binary(min_size=9, max_size=24)
"""Numbers below 256, each for one choice. One draw of bytes costs Hypothesis far less than many draws of numbers."""
Item = TypeVar("Item")


class RandomWorld(RuleBasedStateMachine):
    """One run. A `calm` one has engines that abort, but no faults."""

    machines: ClassVar[Machines] = MACHINES
    runs: ClassVar[Counter[str]] = Counter()
    """How often everything happened, over all runs of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.calm = True
        self.troubles: list[str] = []
        self.world = World(SHAPES[0], self.machines)
        self.broken = False

    @initialize(
        shape=st.sampled_from(SHAPES),
        calm=st.integers(0, 3),
        troubles=st.sets(st.sampled_from(TROUBLES), min_size=1, max_size=5),
    )
    def start(self, shape: dict[str, int], calm: int, troubles: set[str]) -> None:
        """Every fourth run is calm; each of the others has a few kinds of faults."""
        self.calm = calm == 0
        self.troubles = sorted(troubles)
        # Ranks that take requests in different order may block each other for lack of memory: that is no calm.
        self.world = World(shape, self.machines, scale=8 if self.calm else 1)

    @rule(choices=CHOICES)
    def step(self, choices: bytes) -> None:
        kind = KINDS[choices[0] % len(KINDS)]
        getattr(self, "_go_on" if kind == "trouble" and self.calm else f"_{kind}")(choices[1:])

    def _go_on(self, choices: bytes) -> None:
        for choice in choices:
            action = pick(list(self.world.progress()), choice)
            if action is not None:
                self.run(partial(self.world.take, action))

    def _ask(self, choices: bytes) -> None:
        """A request comes, now and then two of the same prompt; where a side does not know it, in an own room."""
        if len(self.world.asks) >= REQUESTS:
            return
        prefill, decode, room, prompt, prefix, knows, named, count = choices[:8]
        world, tag = self.world, len(self.world.asks)
        instances = [[one for one in world.shape if one[0] == side] for side in "pd"]
        number = 4 * tag + prompt % 4
        sides = ("pd", "pd", "pd", "pd", "p", "d", "")[knows % 7]
        ask = Ask(
            tag=tag,
            prefill=instances[0][prefill % len(instances[0])],
            decode=instances[1][decode % len(instances[1])],
            room=room % ROOMS if sides == "pd" else 100 + tag,
            prompt=number,
            prefix=prefix % (number % 4 + 1) if prefix % 2 else 0,
            knows=sides,
            named=bool(named % 2),
        )
        self.run(lambda: world.ask(ask))
        if count % 4 == 0 and sides == "pd":
            self.run(lambda: world.ask(ask._replace(tag=tag + 1, prefix=0)))

    def _engine_acts(self, choices: bytes) -> None:
        getattr(self, f"_{ENGINES[choices[0] % len(ENGINES)]}")(choices[1], 0)

    def _trouble(self, choices: bytes) -> None:
        kind, one, other = choices[:3]
        getattr(self, f"_{self.troubles[kind % len(self.troubles)]}")(one, other)

    def _wait(self, choices: bytes) -> None:
        seconds = (0.01, 0.2, 0.2, 0.5, 0.5, 1.0, 4.0)[choices[0] % 7]
        self.run(lambda: self.world.wait(0.01 if self.calm else seconds))

    # --- What engines and routers do ---

    def _abort(self, one: int, _: int) -> None:
        """An engine aborts a half, now and then one that has ended."""
        halves = [(p, half) for p in self.world.running() for half in p.halves.values()]
        live = [pair for pair in halves if not pair[1].status.ended]
        if pair := pick((one % 4 and live) or halves, one):
            self.happens("abort", lambda: self.world.abort(*pair))

    def _refuse_request(self, one: int, _: int) -> None:
        """The engine of a rank has no room for a request, ever: it opens its half and aborts it."""
        if (post := pick(self.world.postable(), one)) and one % 3 == 0:

            def refuse() -> None:
                half = self.world.post(*post)
                self.world.abort(self.world.processes[post[1]], half, Cause.TOO_LONG)

            self.happens("refuse_request", refuse)

    def _lose_request(self, one: int, _: int) -> None:
        """The router dies between the two sides: one of them never gets the request."""
        if (post := pick(self.world.to_post, one)) and one % 3 == 0:
            ask, side = post[0], post[1][0]

            def lose() -> None:
                self.world.to_post = [other for other in self.world.to_post if (other[0], other[1][0]) != (ask, side)]
                self.world.lost_asks.add(ask.tag)

            self.happens("lose_request", lose)

    def _drain(self, one: int, _: int) -> None:
        process = pick(self.world.running(), one)
        if process and not process.machine.draining and one % 2 == 0:
            self.happens("drain", lambda: self.world.drain(process.slot))

    def _offer_late(self, one: int, _: int) -> None:
        """The engine offers memory for what has ended meanwhile."""
        halves = [(p, half) for p in self.world.running("d") if p.free("aux") for half in p.halves.values()]
        if pair := pick([pair for pair in halves if pair[1].status.ended and not pair[1].offered], one):
            self.happens("offer_late", lambda: self.world.offer_late(*pair))

    def _retract(self, one: int, _: int) -> None:
        """Decode gives up a request to make room, and the router sends it to both sides once more, as it was."""
        world = self.world
        halves = [(p, half) for p in world.running("d") for half in p.halves.values() if not half.status.ended]
        if (pair := pick(halves, one)) and len(world.asks) < REQUESTS:
            self.happens("retract", lambda: world.abort(*pair))
            self.run(lambda: world.ask(pair[1].ask._replace(tag=len(world.asks))))

    # --- Faults ---

    def _letter(self, choice: int) -> Letter | None:
        return pick([one for one in self.world.letters if not one.target.frozen], choice)

    def _lose(self, one: int, _: int) -> None:
        if letter := self._letter(one):
            self.happens("lose", lambda: self.world.letters.remove(letter))

    def _double(self, one: int, _: int) -> None:
        if letter := self._letter(one):
            self.happens("double", lambda: self.world.deliver(letter, again=True))

    def _linger(self, _: int, __: int) -> None:
        """Copies of frames, about attempts that their receivers know, arrive long after everything has ended."""
        letters = [letter for letter in self.world.letters if letter.target.machine.find(letter.frame.attempt)]
        if letters:
            self.happens("linger", lambda: self.world.late.extend(letters[:3]))

    def _forge(self, one: int, other: int) -> None:
        """A process that has no part in it sends a frame, or prefill's own process mixes up the room."""
        letter = self._letter(one)
        if letter is None:
            return
        side, instance = letter.source[0], letter.source.split(".")[0]
        strangers = [p for p in self.world.processes.values() if p.side == side and p.instance != instance]
        if side == "p" and other % 2:
            frame = msgspec.structs.replace(letter.frame, room=letter.frame.room + 1)
        elif stranger := pick(strangers, other):
            frame = msgspec.structs.replace(letter.frame, sender=stranger.incarnation)
        else:
            return
        self.happens("forge", lambda: self.world.forge(letter, frame))

    def _cut(self, one: int, other: int) -> None:
        """No frame passes in this direction, until a second cut ends it."""
        link = (self.world.slots[one % len(self.world.slots)], self.world.slots[other % len(self.world.slots)])
        self.happens("cut", lambda: self.world.cuts.symmetric_difference_update({link}))

    def _freeze(self, one: int, _: int) -> None:
        """A process stops as by SIGSTOP, or goes on."""
        self.happens("freeze", lambda: self.world.freeze(self.world.slots[one % len(self.world.slots)]))

    def _lost(self, one: int, other: int) -> None:
        pairs = [pair for pair in self.world.connections() if not pair[0].frozen]
        if pair := pick(pairs, one):
            self.happens("lost", lambda: self.world.lose_peer(*pair, unlink=bool(other % 2)))

    def _refuse(self, one: int, _: int) -> None:
        """A prefill instance cannot be reached."""
        waits = [
            (p, prefill) for p in self.world.running("d") for prefill in self.world.wanted(p) if prefill in p.wants
        ]
        if pair := pick(waits, one):
            self.happens("refuse", lambda: self.world.refuse(*pair))

    def _crash(self, one: int, _: int) -> None:
        if process := pick(self.world.running(), one):
            self.happens("crash", lambda: self.world.crash(process.slot))

    def _shut_down(self, one: int, _: int) -> None:
        if process := pick(self.world.running(), one):
            self.happens("shut_down", lambda: self.world.shut_down(process.slot))

    def _fence(self, one: int, other: int) -> None:
        """A process is proved dead, one that has ended, or now and then one that ends just now."""
        dead = [p for p in self.world.everyone.values() if not p.alive and not p.fenced]
        if any(p.frozen for p in self.world.processes.values()):
            return
        if other % 2 and (running := pick(self.world.running(), one)):
            self._crash(one, 0)
            dead = [running]
        if process := pick(dead, one):
            self.happens("fence", lambda: self.world.fence(process))

    def _fail_write(self, one: int, other: int) -> None:
        result = (WriteResult.FAILED, WriteResult.UNSETTLED, WriteResult.INVALID)[other % 3]
        flights = [flight for flight in self.world.settleable() if flight.left]
        if (flight := pick(flights, one)) and (result is not WriteResult.INVALID or not flight.moved):
            self.run(lambda: self.world.settle(flight, result))

    def _land(self, one: int, other: int) -> None:
        """Bytes land, among them those of the dead and of unsettled writes."""
        for choice in range(one, one + other % 8):
            if flight := pick([one for one in self.world.flights if one.left], choice):
                self.run(partial(self.world.land, flight))

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
