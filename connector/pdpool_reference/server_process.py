"""The engine as a process: start, listen, print the addresses, drain on SIGTERM, exit."""

import asyncio
import contextlib
import logging
import signal
import sys

from aiohttp import web
from pdpool_connector.backends.base import BackendUnavailableError

from pdpool_reference.http_edge import CLOSE_S, listen
from pdpool_reference.options import EngineOptions
from pdpool_reference.process_setup import set_up_process
from pdpool_reference.ranks import RankLostError
from pdpool_reference.server import Api, ready_line
from pdpool_reference.server_engine import Engine
from pdpool_reference.weights import WeightsError

IMPATIENT_GRACE_S = 1.0
"""Rest of the grace after a second SIGTERM."""
HURRIED_CLOSE_S = 0.5
"""CLOSE_S of an engine without a grace period: a kubelet may leave it 2 s."""

log = logging.getLogger(__name__)


def run_engine(options: EngineOptions) -> int:
    """Run one engine until a signal ends it. Returns the exit code."""
    set_up_process()
    logging.getLogger("aiohttp.server").addFilter(_without_bytes)
    return asyncio.run(_Process(options).run())


def _cannot_start(error: Exception) -> int:
    """Log that a port, model or transfer backend of the command line is not available. Returns the exit code."""
    log.error("the engine cannot start: %s", error)
    return 1


def _without_bytes(record: logging.LogRecord) -> bool:
    """Keep clients' bytes out of the log: aiohttp quotes what it cannot parse."""
    record.exc_info = None if record.exc_info and isinstance(record.exc_info[1], web.HTTPException) else record.exc_info
    if record.exc_info and record.exc_info[1].__class__.__module__ == "aiohttp.http_exceptions":
        record.exc_info = None
        record.msg, record.args = (
            "refused bytes that are not HTTP/1.1; sglang-router also tries gRPC with new workers",
            (),
        )
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


class _Process:
    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._impatient = asyncio.Event()
        self._crashed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._loop = loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            engine = Engine(self._options, crashed=self._on_crash)
            engine.start()
        except (OSError, WeightsError, RankLostError, BackendUnavailableError) as error:
            return _cannot_start(error)
        runners: list[web.BaseRunner] = []
        try:
            try:
                await self._listen(engine, runners)
            except OSError as error:
                return _cannot_start(error)
            await self._stop.wait()
            if not self._crashed:
                await self._drain(engine)
        finally:
            # On another thread: remaining requests fail over this loop while the scheduler stops.
            await asyncio.to_thread(engine.stop)
            for runner in runners:
                await runner.cleanup()
        log.info("stopped")
        return 1 if self._crashed else 0

    async def _listen(self, engine: Engine, runners: list[web.BaseRunner]) -> None:
        options, api = self._options, Api(engine)
        close_s = min(CLOSE_S, HURRIED_CLOSE_S + options.shutdown_grace_s)
        port = await listen(api.app(), options.host, options.port, runners, close_s)
        host = f"[{options.host}]" if ":" in options.host else options.host
        log.info("%s engine of %s listens on %s:%d", options.mode, options.served_model_name, host, port)
        sys.stdout.write(ready_line(f"http://{host}:{port}", api.addresses()) + "\n")
        sys.stdout.flush()

    async def _drain(self, engine: Engine) -> None:
        """Let requests end, up to the grace; a second signal cuts it short."""
        engine.drain()
        drained = asyncio.create_task(engine.when_drained(self._options.shutdown_grace_s))
        impatient = asyncio.create_task(self._impatient.wait())
        await asyncio.wait((drained, impatient), return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            await asyncio.wait((drained,), timeout=IMPATIENT_GRACE_S)
        impatient.cancel()
        if drained.done() and drained.result():
            log.info("drained")
        else:
            drained.cancel()
            log.warning("stopping before all requests have ended: %d sequences are left", engine.running())

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._impatient.set()
        self._stop.set()

    def _on_crash(self) -> None:
        self._crashed = True
        self._post(self._stop)

    def _post(self, event: asyncio.Event) -> None:
        """Set an event from another thread; the loop may be closed already when the process ends."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(event.set)
