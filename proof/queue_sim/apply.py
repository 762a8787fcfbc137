"""Makes incidents happen in a run, and ends them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pdpool_operator.api.names import Role

from proof.queue_sim.faults import Incident, Kind
from proof.queue_sim.world import BOOTSTRAP, PREALLOC, TRANSFER, Engine

if TYPE_CHECKING:
    from proof.queue_sim.run import Run

Undo = Callable[[], None]

BURST = 8.0
CLOCK_STEP_S = 20.0
SLOWNESS = {Role.PREFILL: 4.0, Role.DECODE: 10.0}
DRAIN_S = 120.0


def engine_of(run: "Run", incident: Incident) -> Engine:
    """Return the instance that the incident concerns."""
    return run.world.engines[incident.role][incident.index]


def peer_of(run: "Run", incident: Incident) -> Engine:
    """Return the instance of the other role that a failure of one pair concerns."""
    other = Role.DECODE if incident.role is Role.PREFILL else Role.PREFILL
    return run.world.engines[other][incident.index]


def _frozen(run: "Run", incident: Incident) -> Undo:
    return _freeze(run, incident, frozenset({0, 1}))


def _rank_frozen(run: "Run", incident: Incident) -> Undo:
    return _freeze(run, incident, frozenset({1}))


def _freeze(run: "Run", incident: Incident, ranks: frozenset[int]) -> Undo:
    engine, process = engine_of(run, incident), engine_of(run, incident).process
    if engine.ready:
        run.world.freeze(engine, ranks)

    def end() -> None:
        if engine.process == process and engine.frozen_s is not None:
            if int(incident.at_s) % 2:
                run.world.thaw(engine)
            else:
                run.world.stop(engine, new_pod=False)

    return end


def _fails_all(run: "Run", incident: Incident) -> Undo:
    engine = engine_of(run, incident)
    engine.fails_all = True
    return lambda: setattr(engine, "fails_all", False)


def _peer_failing(run: "Run", incident: Incident) -> Undo:
    prefill, decode = sorted((engine_of(run, incident), peer_of(run, incident)), key=lambda e: e.role, reverse=True)
    prefill.fails_with = decode
    return lambda: setattr(prefill, "fails_with", None)


def _leaked(run: "Run", incident: Incident) -> Undo:
    engine = engine_of(run, incident)
    engine.leaks = True
    return lambda: run.world.unleak(engine)


def _gauge_frozen(run: "Run", incident: Incident) -> Undo:
    engine, now = engine_of(run, incident), run.world.now
    engine.frozen_gauge = {
        name: (2 if name in {BOOTSTRAP, PREALLOC, TRANSFER} else 0, now, queue.moved)
        for name, queue in engine.queues.items()
    }
    return lambda: setattr(engine, "frozen_gauge", None)


def _slow(run: "Run", incident: Incident) -> Undo:
    engine = engine_of(run, incident)
    engine.slowness = SLOWNESS[engine.role]
    return lambda: setattr(engine, "slowness", 1.0)


def _restart(run: "Run", incident: Incident) -> Undo:
    run.world.stop(engine_of(run, incident), new_pod=False)
    return _nothing


def _roll_out(run: "Run", incident: Incident) -> Undo:
    for number, engine in enumerate(run.world.engines[incident.role]):
        start = number * (DRAIN_S + 90)
        until = run.world.now + start + DRAIN_S
        run.world.after(
            start,
            lambda engine=engine, until=until: run.world.replace_when_idle(engine, until),  # type: ignore[misc]
        )
    return _nothing


def _scrape_gap(run: "Run", incident: Incident) -> Undo:
    engine = engine_of(run, incident)
    engine.reachable = False
    return lambda: setattr(engine, "reachable", True)


def _operator_restart(run: "Run", incident: Incident) -> Undo:
    del incident
    run.restart_operator()
    return _nothing


def _clock_step(run: "Run", incident: Incident) -> Undo:
    sign = 1 if int(incident.at_s) % 2 else -1
    run.step_clock(sign * CLOCK_STEP_S)
    return lambda: run.step_clock(-sign * CLOCK_STEP_S)


def _router_restart(run: "Run", incident: Incident) -> Undo:
    del incident
    for engine in run.world.all():
        engine.routed = [0, 0]
    return _nothing


def _burst(run: "Run", incident: Incident) -> Undo:
    return _factor(run, BURST, incident)


def _quiet(run: "Run", incident: Incident) -> Undo:
    return _factor(run, 0.0, incident)


def _factor(run: "Run", factor: float, incident: Incident) -> Undo:
    del incident
    run.world.factor = factor
    return lambda: setattr(run.world, "factor", 1.0)


def _nothing() -> None:
    pass


APPLY: Mapping[Kind, Callable[["Run", Incident], Undo]] = {
    Kind.FROZEN: _frozen,
    Kind.RANK_FROZEN: _rank_frozen,
    Kind.FAILS_ALL: _fails_all,
    Kind.PEER_FAILING: _peer_failing,
    Kind.LEAKED: _leaked,
    Kind.GAUGE_FROZEN: _gauge_frozen,
    Kind.SLOW: _slow,
    Kind.RESTART: _restart,
    Kind.ROLL_OUT: _roll_out,
    Kind.SCRAPE_GAP: _scrape_gap,
    Kind.OPERATOR_RESTART: _operator_restart,
    Kind.CLOCK_STEP: _clock_step,
    Kind.ROUTER_RESTART: _router_restart,
    Kind.BURST: _burst,
    Kind.QUIET: _quiet,
}
