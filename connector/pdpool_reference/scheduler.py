"""The scheduler's thread: takes commands from the HTTP side, runs the engine turn by turn, sleeps when it is idle."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from pdpool_reference.kv import PAGE_TOKENS
from pdpool_reference.request import Failure, GenerationRequest, RequestError
from pdpool_reference.scheduler_batch import Computes, admit, compute
from pdpool_reference.scheduler_core import Core
from pdpool_reference.scheduler_queues import State
from pdpool_reference.scheduler_report import Report

IDLE_BEAT_S = 0.5
"""An idle scheduler wakes this often. It reports to the connector and /health that it lives, and checks deadlines."""
MAX_COMMANDS = 4096
_SHUTTING_DOWN: Final = Failure(503, "shutting_down", "the engine is shutting down")

log = logging.getLogger(__name__)
T = TypeVar("T")


class Scheduler:
    """Owns a Core on a thread of its own. Methods may be called from any thread and return at once.

    Args:
        mode: Unified, prefill or decode.
        model: Computes steps over the paged cache.
        total_pages: Pages of the cache.
        max_queued: Most sequences in the engine at a time.
        make_core: Makes the core from the callback for sequences that end.
        on_crash: Called on the scheduler's thread after a turn raised and all sequences have failed.
    """

    def __init__(
        self,
        *,
        mode: str,
        model: Computes,
        total_pages: int,
        max_queued: int,
        make_core: Callable[[Callable[[GenerationRequest], None]], Core],
        on_crash: Callable[[], None],
    ) -> None:
        self.mode = mode
        self.report = Report(mode=mode, max_tokens=total_pages * PAGE_TOKENS)
        self.freeze_gauges = False
        self.leaking = False
        self._model = model
        self._max_queued = max_queued
        self._core = make_core(self._ended)
        self._on_crash = on_crash
        self._cond = threading.Condition()
        self._commands: deque[Callable[[Core], None]] = deque()
        self._open: set[GenerationRequest] = set()
        self._wake = False
        self._frozen = False
        self._stopping = False
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="scheduler", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Sequences that are left fail now, not after the present step, which may take seconds."""
        with self._cond:
            self._stopping = True
            self._cond.notify()
        self._fail_open(_SHUTTING_DOWN)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. Returns False after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def crash(self, error: Exception) -> None:
        """Make the next turn raise `error`: the engine cannot go on."""
        with self._cond:
            self._commands.append(partial(_raise, error))
            self._cond.notify()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take the sequences of one HTTP request, all or none. Raises RequestError (503) when the engine is full."""
        with self._cond:
            if self._stopping:
                raise RequestError("the engine is shutting down", status=503, code="shutting_down")
            held = len(self._open)
            if held + len(requests) > self._max_queued:
                message = f"the engine holds {held} sequences; {len(requests)} more would exceed {self._max_queued}"
                raise RequestError(message, status=503, code="queue_full")
            self._open.update(requests)
            self._commands.extend(partial(_submit, request) for request in requests)
            self._cond.notify()

    def abort(self, requests: Sequence[GenerationRequest]) -> None:
        """End these sequences, unless they have ended."""
        with self._cond:
            self._commands.extend(partial(_abort, request) for request in requests)
            self._cond.notify()

    def call(self, what: Callable[[Core], T]) -> "Future[T]":
        """Run `what` on the scheduler's thread between two turns. Raises RequestError (503) if too much waits."""
        future: Future[T] = Future()

        def run(core: Core) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(what(core))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)

        with self._cond:
            if self._stopping or len(self._commands) >= MAX_COMMANDS:
                raise RequestError("the scheduler does not take commands", status=503, code="scheduler_busy")
            self._commands.append(run)
            self._cond.notify()
        return future

    def loads(self) -> "Future[Report]":
        """Return a fresh report, made by the scheduler's thread: a frozen scheduler does not answer."""
        return self.call(lambda core: self._make_report(core))

    def wake(self) -> None:
        """Run one turn: something outside has changed."""
        with self._cond:
            self._wake = True
            self._cond.notify()

    def freeze(self, frozen: bool) -> None:
        """Hang, or stop hanging."""
        with self._cond:
            self._frozen = frozen
            self._cond.notify()

    def leak(self, leaking: bool) -> None:
        """Keep the next sequence that ends, or free those that were kept."""

        def apply(core: Core) -> None:
            core.leak_next = leaking
            if not leaking:
                core.purge_leaked(time.monotonic())

        self.call(apply)
        self.leaking = leaking

    @property
    def frozen(self) -> bool:
        """Whether `freeze` holds."""
        return self._frozen

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        return self._stopping

    @property
    def open_sequences(self) -> int:
        """Sequences taken and not ended, those still in the command queue included."""
        return len(self._open)

    def beat_age_s(self) -> float:
        """Seconds since the last turn."""
        return time.monotonic() - self._last_beat

    # ------------------------------------------------------------------ the scheduler's thread

    def _main(self) -> None:
        failure = _SHUTTING_DOWN
        try:
            while self._turn():
                pass
        except Exception as error:
            with self._cond:
                stopping, self._stopping = self._stopping, True
            if stopping:
                log.info("the scheduler ends in the midst of a step: %s", error)
            else:
                log.exception("the scheduler crashed")
                failure = Failure(500, "engine_crashed", "the engine's scheduler crashed")
                self._fail_open(failure)
                self._on_crash()
        self._let_go(failure)

    def _turn(self) -> bool:
        """Run one turn; then wait if it computed nothing. Returns False when the thread shall end."""
        with self._cond:
            self._cond.wait_for(lambda: self._stopping or not self._frozen)
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
            self._wake = False
        for command in commands:
            command(self._core)
        now = time.monotonic()
        self._core.advance(now)
        admit(self._core, now)
        worked = compute(self._core, self._model, now)
        self._last_beat = time.monotonic()
        self._core.side.beat(self._last_beat)
        self._publish()
        if not worked:
            with self._cond:
                self._cond.wait_for(self._something_to_do, timeout=IDLE_BEAT_S)
        return True

    def _something_to_do(self) -> bool:
        return bool(self._commands) or self._wake or self._stopping

    def _ended(self, request: GenerationRequest) -> None:
        """Stop counting a sequence before its client has the whole answer."""
        with self._cond:
            self._open.discard(request)
        self._publish()

    def _publish(self) -> None:
        if not self.freeze_gauges:
            self.report = self._make_report(self._core)

    def _fail_open(self, failure: Failure) -> None:
        """Fail every sequence that has not ended. Its client gets no later output."""
        with self._cond:
            left = list(self._open)
        for request in left:
            request.sink(failure)

    def _let_go(self, failure: Failure) -> None:
        """End what is left in the core, so that peers learn the reason. The clients have theirs.

        If this raises too, peers learn it when the connector closes.
        """
        with self._cond:
            commands = list(self._commands)
            self._commands.clear()
        try:
            for command in commands:
                command(self._core)
            now = time.monotonic()
            for seq in self._core.queues.all():
                self._core.fail(seq, failure, now)
        except Exception as error:  # noqa: BLE001 - the engine ends
            log.warning("sequences were not ended: %s", error)

    def _make_report(self, core: Core) -> Report:
        queues = core.queues
        return Report(
            mode=self.mode,
            running=queues.count(State.COMPUTING, State.RUNNING),
            waiting=queues.count(State.WAITING),
            used_tokens=core.used_pages() * PAGE_TOKENS,
            max_tokens=self.report.max_tokens,
            prefill_bootstrap=queues.count(State.BOOTSTRAP),
            prefill_inflight=queues.count(State.INFLIGHT),
            decode_prealloc=queues.count(State.PREALLOC),
            decode_transfer=queues.count(State.TRANSFER),
            held=len(core.held),
        )


def _raise(error: Exception, core: Core) -> None:
    del core
    raise error


def _submit(request: GenerationRequest, core: Core) -> None:
    core.submit(request, time.monotonic())


def _abort(request: GenerationRequest, core: Core) -> None:
    core.abort(request, time.monotonic())
