"""Plays a world at random: which steps, in which order, is decided by a seed and written down as a schedule."""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from pdpool_connector.protocol.events import WriteResult

from tests.simulation.ending import finish, judge_calm
from tests.simulation.kinds import MACHINES, Direction, Machines
from tests.simulation.memory import ViolationError
from tests.simulation.shrink import shrink
from tests.simulation.world import Step, World

SHAPES: tuple[dict[str, int], ...] = (
    {"p0": 1, "p1": 1, "d0": 1, "d1": 1},
    {"p0": 2, "d0": 1, "d1": 1},
    {"p0": 1, "p1": 3, "d0": 1},
    {"p0": 2, "d0": 3, "d1": 1},
)
ROOMS = 2
STEPS = 700
REQUESTS = 16
TROUBLES = {"crash": 3.0, "shut_down": 1.0, "drain": 0.5, "freeze": 2.0, "cut": 2.0, "lost": 4.0, "fence": 6.0}

Weighted = tuple[float, Callable[[], Step | None]]


class Player:
    """One run. `schedule` holds the steps taken so far; `world` is where they led."""

    def __init__(self, seed: int, direction: Direction, machines: Machines = MACHINES, *, steps: int = STEPS) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        tell_prompts = seed // len(SHAPES) % 3 < 2
        self.world = World(SHAPES[seed % len(SHAPES)], machines, direction, prompts=tell_prompts)
        self.steps = steps
        self.schedule: list[Step] = []
        self.asked = 0
        pace = self.random.choice([8.0, 3.0, 0.5])
        trouble = self.random.choice([0.0, 0.1, 0.5, 1.5])
        self.calm = not trouble
        self.kinds: list[Weighted] = [
            (0.5, self.wait),
            (8.0, self.letter),
            (pace, self.flight),
            (4.0, self.pairing),
            (self.random.choice([4.0, 0.6]), self.post),
            (4.0, self.send),
            (1.2, self.ask),
            (0.5 if self.calm else 0.2, self.abort),
            (0.03 if self.calm else 0.0, lambda: Step("drain", (self.slot(),))),
            (0.2, self.decline),
            (0.1, self.lose_post),
            (0.1, lambda: Step("arrive_late")),
            (0.35 * trouble, self.trouble),
            (0.5 * trouble, self.forge),
            (0.15 * trouble, self.ask_again),
            (0.6 * trouble, self.relief),
        ]

    def run(self) -> World:
        """Play, let the faults stop, and judge. Raises ViolationError."""
        self.play()
        judge(self.world, calm=self.calm)
        return self.world

    def play(self) -> None:
        """Take the steps, faults among them, and stop in the midst of it."""
        calls = [call for _, call in self.kinds]
        weights = [weight for weight, _ in self.kinds]
        for chosen in self.random.choices(calls, weights, k=self.steps):
            step = chosen()
            if step is not None:
                self.schedule.append(step)
                self.world.apply(step)

    # --- What may happen next ---

    def slot(self) -> str:
        return self.random.choice(list(self.world.processes))

    def wait(self) -> Step:
        if self.calm:
            return Step("wait", (self.random.uniform(0.0, 0.03),))
        fate = self.random.random()
        if fate < 0.03:
            return Step("wait", (self.random.uniform(8.0, 40.0),))
        if fate < 0.7:
            return Step("wait_for_due")
        return Step("wait", (self.random.uniform(0.01, 0.5),))

    def letter(self) -> Step | None:
        letters = self.world.network.letters
        if not letters:
            return None
        fate = self.random.random()
        kind = "lose" if fate < 0.05 else "double" if fate < 0.08 else "linger" if fate < 0.12 else "deliver"
        return Step(kind, (self.random.choice(letters).name,))

    def flight(self) -> Step | None:
        if not self.world.flights:
            return None
        flight = self.random.choice(self.world.flights)
        fate = self.random.random()
        if not flight.left:
            return Step("settle", (flight.name, WriteResult.FAILED if flight.severed else WriteResult.LANDED))
        if flight.stopped and fate < 0.5:
            return Step("settle", (flight.name, WriteResult.STOPPED))
        if (fate > 0.97 and not self.calm) or (not flight.peer.alive and fate > 0.5):
            return Step("settle", (flight.name, self.random.choice([WriteResult.FAILED, WriteResult.UNSETTLED])))
        return Step("land", (flight.name,))

    def pairing(self) -> Step | None:
        wanted = self.world.wanted()
        unnoticed = self.world.unnoticed()
        if unnoticed and (not wanted or self.random.random() < 0.5):
            return Step("lost", self.random.choice(unnoticed))
        if not wanted:
            return None
        pair = self.random.choice(wanted)
        return Step(self.random.choices(["greet", "link", "refuse"], [10, 10, 0 if self.calm else 1])[0], pair)

    def ask(self) -> Step | None:
        if self.asked >= REQUESTS:
            return None
        instances = list(self.world.shape)
        pages = self.random.randint(0, 3)
        fields = (
            self.asked,
            self.random.choice([name for name in instances if name[0] == "p"]),
            self.random.choice([name for name in instances if name[0] == "d"]),
            self.random.randrange(ROOMS),
            self.random.choice([0, 0, 0, 1]),
            pages,
            self.random.choice([0, 0, self.random.randint(0, pages)]),
            self.random.choice([0, 0, 1, 2]),
            f"r{self.asked}",
        )
        self.asked += 1
        return Step("ask", fields)

    def post(self) -> Step | None:
        return Step("post", self.random.choice(list(self.world.to_post))) if self.world.to_post else None

    def lose_post(self) -> Step | None:
        """The router dies between the two halves: decode has its half, prefill never gets it."""
        tags = [tag for tag, slot in self.world.to_post if slot[0] == "p"]
        return Step("lose_post", (self.random.choice(tags),)) if tags else None

    def send(self) -> Step | None:
        process = self.world.processes[self.slot()]
        live = [half for half in process.halves.values() if not half.releasable and not half.closed]
        if process.role != "prefill" or not live:
            return None
        half = self.random.choice(live)
        return Step("send", (half.tag, process.slot, self.random.randint(half.sent, len(half.pages))))

    def abort(self) -> Step | None:
        process = self.world.processes[self.slot()]
        live = [half for half in process.halves.values() if not half.ended]
        if self.random.random() < 0.1:
            live = list(process.halves.values())
        return Step("abort", (self.random.choice(live).tag, process.slot)) if live else None

    def decline(self) -> Step | None:
        return Step("decline", self.random.choice(list(self.world.to_post))) if self.world.to_post else None

    def ask_again(self) -> Step | None:
        again = [process.halves for process in self.world.processes.values() if process.role == "decode"]
        tags = [half.tag for halves in again for half in halves.values()]
        return Step("ask_again", (self.random.choice(tags), REQUESTS + len(self.schedule))) if tags else None

    def forge(self) -> Step | None:
        letters = self.world.network.letters
        if not letters:
            return None
        letter = self.random.choice(letters)
        own = letter.source[0] == "p" and self.random.random() < 0.5
        others = [slot for slot in self.world.processes if slot[0] == letter.source[0]]
        sender = letter.source if own else self.random.choice(others)
        return Step("forge", (letter.name, sender, self.random.randrange(ROOMS) if own else letter.frame.room))

    def trouble(self) -> Step | None:
        kind = self.random.choices(list(TROUBLES), list(TROUBLES.values()))[0]
        if kind == "lost":
            links = [(self.world.everyone[d].slot, p) for d, p in sorted(self.world.linked)]
            links += [(self.world.everyone[p].slot, d) for d, p in sorted(self.world.greeted)]
            return Step(kind, self.random.choice(links)) if links else None
        if kind == "fence":
            dead = [i for i, process in self.world.everyone.items() if not process.alive and not process.fenced]
            return Step(kind, (self.random.choice(dead),)) if dead else None
        if kind == "cut":
            return Step(kind, (self.slot(), self.slot()))
        return Step(kind, (self.slot(),))

    def relief(self) -> Step | None:
        frozen = [slot for slot, process in self.world.processes.items() if process.frozen]
        if frozen and self.random.random() < 0.5:
            return Step("thaw", (self.random.choice(frozen),))
        cuts = [(s, self.world.everyone[t].slot) for s, t in sorted(self.world.network.cuts)]
        return Step("mend", self.random.choice(cuts)) if cuts else None


def judge(world: World, *, calm: bool) -> None:
    """Let the faults stop, and judge what is left. Raises ViolationError."""
    finish(world)
    if calm:
        judge_calm(world)


class Failure(NamedTuple):
    """A seed that broke a promise, and the fewest steps that still do."""

    seed: int
    direction: Direction
    what: str
    steps: int
    trace: list[Step]

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, {self.direction}: {self.what}",
            f"the shortest trace, {len(self.trace)} of {self.steps} steps:",
        ]
        return "\n".join(lines + [f"  {step}" for step in self.trace])


def replay(player: Player, schedule: list[Step]) -> str | None:
    """What a schedule breaks when it is played again, or None; steps that do not apply any more are left out."""
    played = player.world
    world = World(played.shape, played.machines, played.direction, prompts=played.prompts)
    try:
        for step in schedule:
            world.apply(step)
        judge(world, calm=player.calm)
    except ViolationError as error:
        return str(error)
    return None


def kind(what: str) -> str:
    """What is broken, without which request broke it: a shorter schedule must break the same."""
    return re.sub(r"\d+", "", what.split(":")[0])


def explain(player: Player, what: str) -> Failure:
    """Shorten what a player has played until it broke something."""
    trace = shrink(player.schedule, lambda steps: kind(replay(player, steps) or "") == kind(what))
    return Failure(player.seed, player.world.direction, replay(player, trace) or what, len(player.schedule), trace)
