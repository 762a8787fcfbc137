"""A service of prefill and decode instances in simulated time: requests, queues, and what can go wrong.

A request passes as in pdpool's reference engine:

    decode_prealloc -> decode_transfer                             -> runs at decode -> ends
    prefill_bootstrap -> (first chunk computed) -> prefill_inflight -> ends

It needs memory at decode first. Prefill then computes it in chunks, one request after the other. An action at an
instance whose loop is frozen happens when the loop runs again.
"""

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdpool_operator.api.names import Role

DAY_S = 86400.0
PREFILL_TOKENS_PER_S = 4000.0
CHUNK = 8192
TRANSFER_TOKENS_PER_S = 200_000.0
TOKEN_S = 0.04
"""Time of one token at decode."""
SLOTS = 32
"""Requests for which a decode instance has memory."""
DEADLINE_S = 300.0
"""A hand-off that has not completed by then fails at both sides."""
COMPILE_S = 20.0
"""The first step of a new engine compiles kernels. Its loop does not run meanwhile."""
STARTUP_S = 45.0
RECENT_S = 50.0
BOOTSTRAP, INFLIGHT = "prefill_bootstrap", "prefill_inflight"
PREALLOC, TRANSFER = "decode_prealloc", "decode_transfer"


@dataclass(eq=False, slots=True)
class Request:
    """One request and its pair of instances."""

    number: int
    prompt: int
    output: int
    prefill: "Engine"
    decode: "Engine"
    computed: int = 0
    handed_off: bool = False
    over: bool = False


@dataclass(slots=True)
class Queue:
    """A hand-off queue. Requests are in order of entry, with its time."""

    entered: dict[Request, float] = field(default_factory=dict)
    moved: int = 0
    moved_s: float = 0.0
    """When the last request moved on, or entered the empty queue."""

    def enter(self, request: Request, now: float) -> None:
        """Add a request."""
        if not self.entered:
            self.moved_s = now
        self.entered[request] = now

    def leave(self, request: Request, now: float, *, moved: bool) -> None:
        """Remove a request, if it is there. `moved`: it goes on to its next step."""
        if self.entered.pop(request, None) is not None and moved:
            self.moved, self.moved_s = self.moved + 1, now

    def oldest_s(self, now: float) -> float | None:
        """Age of the oldest request."""
        return now - next(iter(self.entered.values())) if self.entered else None


@dataclass(eq=False)
class Engine:
    """One instance: its pod, its process, and its faults."""

    role: Role
    index: int
    generation: int = 0
    """Number of its pod."""
    process: int = 0
    """Number of its process."""
    ready: bool = True
    leaving: bool = False
    reachable: bool = True
    ready_s: float = 0.0
    began_s: float = 0.0
    queues: dict[str, Queue] = field(default_factory=dict)
    running: set[Request] = field(default_factory=set)
    holding: set[Request] = field(default_factory=set)
    """Requests that have memory at decode."""
    backlog: deque[Request] = field(default_factory=deque)
    computing: Request | None = None
    chunk_began_s: float = 0.0
    computed_s: float = 0.0
    """When it last ended a chunk."""
    compiled: bool = True
    done: int = 0
    failed: int = 0
    done_s: float = 0.0
    """When a hand-off last finished."""
    routed: list[int] = field(default_factory=lambda: [0, 0])
    """Requests that succeeded and failed, as the router counts them."""
    recent: deque[tuple[float, bool]] = field(default_factory=deque)
    frozen_s: float | None = None
    silent_ranks: frozenset[int] = frozenset()
    deferred: list[Callable[[], None]] = field(default_factory=list)
    slowness: float = 1.0
    fails_all: bool = False
    fails_with: "Engine | None" = None
    leaks: bool = False
    leaked: Request | None = None
    frozen_gauge: dict[str, tuple[int, float, int]] | None = None
    """Length, time of the oldest entry and counter of each queue, as they were when the gauge froze."""

    def __post_init__(self) -> None:
        """Make the queues of its role."""
        own = (BOOTSTRAP, INFLIGHT) if self.role is Role.PREFILL else (PREALLOC, TRANSFER)
        self.queues = {name: Queue() for name in own}

    @property
    def name(self) -> str:
        """As the operator names the instance."""
        return f"chat-{self.role}-{self.index}"

    @property
    def pod_uid(self) -> str:
        """UID of its pod."""
        return f"{self.name}-{self.generation}"

    @property
    def ip(self) -> str:
        """Address of its pod."""
        return f"10.{1 if self.role is Role.PREFILL else 2}.{self.index}.{self.generation % 250}"

    @property
    def busy(self) -> bool:
        """Whether a request is anywhere in it."""
        return bool(self.running or any(queue.entered for queue in self.queues.values()))

    def outcome(self, now: float, *, ok: bool) -> None:
        """Count a request's end at the router."""
        self.routed[not ok] += 1
        self.recent.append((now, ok))
        while now - self.recent[0][0] > RECENT_S:
            self.recent.popleft()

    def ended_lately(self, now: float) -> tuple[int, int]:
        """Return how many requests succeeded and failed lately."""
        lately = [ok for at, ok in self.recent if now - at <= RECENT_S]
        return sum(lately), len(lately) - sum(lately)

    def beat_age_s(self, rank: int, now: float) -> float:
        """Seconds since the loop of a rank ran."""
        if self.frozen_s is not None and rank in self.silent_ranks:
            return now - self.frozen_s
        return now - self.chunk_began_s if self.computing is not None and self.frozen_s is None else 0.02


class World:
    """All instances, the arrivals, and a queue of events in simulated time."""

    def __init__(self, seed: int, *, instances: int = 2, peak_per_s: float = 1.0) -> None:
        self.now = 0.0
        self.rng = random.Random(f"world {seed}")
        self.peak_per_s = peak_per_s
        self.factor = 1.0
        """Factor of the rate of arrivals: above 1 in a burst, 0 while no requests arrive."""
        self.engines = {role: [Engine(role, i) for i in range(instances)] for role in (Role.PREFILL, Role.DECODE)}
        self.listed: dict[Role, frozenset[str]] = {
            role: frozenset(e.ip for e in engines) for role, engines in self.engines.items()
        }
        """Addresses to which the router sends requests."""
        self.pods_changed = True
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turns = itertools.count()
        self.after(0.0, self._arrivals)

    def after(self, delay: float, act: Callable[[], None]) -> None:
        """Do something after a delay."""
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), act))

    def run_until(self, end: float) -> None:
        """Let all events up to a moment happen."""
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end

    def all(self) -> Iterator[Engine]:
        """Return the instances of both roles."""
        return itertools.chain.from_iterable(self.engines.values())

    def rate(self) -> float:
        """Requests per second that arrive now, by the day curve."""
        daylight = math.sin(math.pi * self.now / DAY_S) ** 4
        return self.peak_per_s * (0.01 + 0.99 * daylight) * self.factor

    def _arrivals(self) -> None:
        most = self.peak_per_s * max(1.0, self.factor)
        if self.rng.random() < self.rate() / most:
            self._arrive()
        self.after(self.rng.expovariate(most), self._arrivals)

    def _arrive(self) -> None:
        turn = next(self._turns)
        prefills, decodes = (
            [e for e in self.engines[role] if e.ip in self.listed[role]] for role in (Role.PREFILL, Role.DECODE)
        )
        if not prefills or not decodes:
            return
        long = self.rng.random() < 0.003
        prompt = self.rng.randint(60_000, 400_000) if long else min(30_000, int(self.rng.expovariate(1 / 2000)) + 20)
        output = min(4000, int(self.rng.expovariate(1 / 250)) + 1)
        prefill, decode = prefills[turn % len(prefills)], decodes[turn // len(prefills) % len(decodes)]
        request = Request(turn, prompt, output, prefill, decode)
        if not (prefill.ready and decode.ready):
            self._fail(request)
            return
        prefill.queues[BOOTSTRAP].enter(request, self.now)
        decode.queues[PREALLOC].enter(request, self.now)
        self.after(DEADLINE_S, lambda: None if request.handed_off else self._fail(request))
        self._at(decode, lambda: self._admit(decode))

    def _at(self, engine: Engine, act: Callable[[], None]) -> None:
        """Do something at an instance, as soon as its loop runs."""
        if engine.frozen_s is None:
            act()
        else:
            engine.deferred.append(act)

    def _admit(self, decode: Engine) -> None:
        for request in list(decode.queues[PREALLOC].entered):
            if len(decode.holding) >= SLOTS:
                return
            decode.holding.add(request)
            decode.queues[PREALLOC].leave(request, self.now, moved=True)
            decode.queues[TRANSFER].enter(request, self.now)
            self._at(request.prefill, lambda request=request: self._offered(request))  # type: ignore[misc]

    def _offered(self, request: Request) -> None:
        prefill, decode = request.prefill, request.decode
        if request.over:
            return
        if prefill.fails_all or decode.fails_all or prefill.fails_with is decode:
            self._fail(request)
        elif prefill.leaks and prefill.leaked is None:
            prefill.leaked = request
            self._fail(request)
            prefill.queues[BOOTSTRAP].enter(request, self.now)
        else:
            prefill.backlog.append(request)
            self._compute(prefill)

    def _compute(self, prefill: Engine) -> None:
        """Begin the next chunk, unless one is under way."""
        while prefill.computing is None and prefill.backlog:
            request = prefill.backlog[0]
            if request.over or request.computed >= request.prompt:
                prefill.backlog.popleft()
                continue
            chunk = min(CHUNK, request.prompt - request.computed)
            prefill.computing, prefill.chunk_began_s = request, self.now
            seconds = chunk / PREFILL_TOKENS_PER_S * prefill.slowness + (0.0 if prefill.compiled else COMPILE_S)
            prefill.compiled, process = True, prefill.process
            computed = functools.partial(self._computed, request, chunk, process)
            self.after(seconds, functools.partial(self._at, prefill, computed))

    def _computed(self, request: Request, chunk: int, process: int) -> None:
        prefill = request.prefill
        if prefill.process != process:
            return
        prefill.computing, prefill.computed_s = None, self.now
        request.computed += chunk
        if not request.over:
            if request in prefill.queues[BOOTSTRAP].entered:
                prefill.queues[BOOTSTRAP].leave(request, self.now, moved=True)
                prefill.queues[INFLIGHT].enter(request, self.now)
            if request.computed >= request.prompt:
                seconds = chunk / TRANSFER_TOKENS_PER_S + 0.005
                self.after(seconds, lambda: self._at(request.decode, lambda: self._landed(request)))
        self._compute(prefill)

    def _landed(self, request: Request) -> None:
        """Decode has the whole cache."""
        decode, prefill = request.decode, request.prefill
        if request.over:
            return
        request.handed_off = True
        if decode.leaks and decode.leaked is None:
            decode.leaked = request
        else:
            decode.queues[TRANSFER].leave(request, self.now, moved=True)
            decode.done, decode.done_s = decode.done + 1, self.now
            decode.running.add(request)
            self.after(request.output * TOKEN_S * decode.slowness, lambda: self._at(decode, lambda: self._end(request)))
        self._at(prefill, lambda: self._sent(request))

    def _sent(self, request: Request) -> None:
        if request in request.prefill.queues[INFLIGHT].entered:
            request.prefill.queues[INFLIGHT].leave(request, self.now, moved=True)
            request.prefill.done, request.prefill.done_s = request.prefill.done + 1, self.now

    def _end(self, request: Request) -> None:
        if request.over:
            return
        request.over = True
        request.decode.running.discard(request)
        request.decode.holding.discard(request)
        for engine in (request.prefill, request.decode):
            engine.outcome(self.now, ok=True)
        self._admit(request.decode)

    def _fail(self, request: Request) -> None:
        """The request fails at both sides. A frozen instance notices later."""
        if request.over:
            return
        request.over = True
        for engine in (request.prefill, request.decode):
            engine.outcome(self.now, ok=False)
            self._at(engine, lambda engine=engine: self._forget(engine, request))  # type: ignore[misc]

    def _forget(self, engine: Engine, request: Request) -> None:
        if engine.ready and not request.handed_off:
            engine.failed += 1
        for queue in engine.queues.values():
            queue.leave(request, self.now, moved=False)
        engine.running.discard(request)
        engine.holding.discard(request)
        if engine.role is Role.DECODE:
            self._admit(engine)

    def thaw(self, engine: Engine) -> None:
        """Let a frozen loop run again."""
        engine.frozen_s, engine.silent_ranks = None, frozenset()
        deferred, engine.deferred = engine.deferred, []
        for act in deferred:
            self._at(engine, act)

    def freeze(self, engine: Engine, silent_ranks: frozenset[int]) -> None:
        """Stop the loop of an instance. Only the named ranks have no heartbeat."""
        engine.frozen_s, engine.silent_ranks = self.now, silent_ranks

    def unleak(self, engine: Engine) -> None:
        """Remove the leaked request."""
        request, engine.leaks, engine.leaked = engine.leaked, False, None
        if request is not None:
            self._fail(request)
            self._forget(engine, request)

    def stop(self, engine: Engine, *, new_pod: bool) -> None:
        """End the process. A new one is ready after a while."""
        requests = {r for queue in engine.queues.values() for r in queue.entered} | engine.running | engine.holding
        engine.ready, engine.deferred = False, []
        self.thaw(engine)
        for request in sorted(requests, key=lambda request: request.number):
            self._fail(request)
        fresh = Engine(engine.role, engine.index)
        engine.queues, engine.running, engine.holding = fresh.queues, set(), set()
        engine.backlog, engine.computing, engine.leaked = deque(), None, None
        engine.done = engine.failed = 0
        engine.process += 1
        engine.generation += new_pod
        if new_pod:
            engine.routed, engine.began_s = [0, 0], self.now
        self.pods_changed = True
        self.after(STARTUP_S, lambda: self._started(engine))

    def _started(self, engine: Engine) -> None:
        engine.ready, engine.ready_s, engine.leaving = True, self.now, False
        engine.compiled = engine.role is Role.DECODE
        self.pods_changed = True

    def replace_when_idle(self, engine: Engine, until: float) -> None:
        """Drain an instance, then replace its pod. `until`: when it is replaced although requests are left."""
        if not engine.leaving:
            engine.leaving = self.pods_changed = True
        if engine.busy and self.now < until:
            self.after(2.0, lambda: self.replace_when_idle(engine, until))
        else:
            self.stop(engine, new_pod=True)
