"""Logs as one JSON object per line. The object that a record is about is in its fields."""

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

from .api_errors import UnavailableError

FIELDS = ("kind", "namespace", "object", "reason")
"""Fields that callers pass with `extra=`."""


class JsonFormatter(logging.Formatter):
    """Formats time, level, logger and message, then the object's fields, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line."""
        entry: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {field: str(value) for field in FIELDS if (value := getattr(record, field, None)) is not None}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


OUTAGE_REMINDER_S = 60.0
"""Interval of lines about an API server that goes on failing."""

KOPF_RETRIES = "Request attempt "
"""Begin of kopf's lines about calls that failed (kopf/_cogs/clients/api.py). It writes one for each try, as an error.
"""


class OutageFilter(logging.Filter):
    """Lets pass one warning a minute about failed calls of the API, with the number of those it held back.

    An outage fails every call. One line for each would hide everything else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed_at: float | None = None
        self._held_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written. Change its level and text if it is about an outage."""
        if not _is_outage(record):
            return True
        now = self._clock()
        if self._passed_at is not None and now - self._passed_at < OUTAGE_REMINDER_S:
            self._held_back += 1
            return False
        if self._held_back and self._passed_at is not None:
            since = now - self._passed_at
            record.msg = f"{record.getMessage()} ({self._held_back} more failed calls in the last {since:.0f} s)"
            record.args = ()
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        self._passed_at, self._held_back = now, 0
        return True


def _is_outage(record: logging.LogRecord) -> bool:
    args = record.args if isinstance(record.args, tuple) else ()
    return any(isinstance(arg, UnavailableError) for arg in args) or (
        record.name.startswith("kopf") and record.getMessage().startswith(KOPF_RETRIES)
    )


def set_up(level: str) -> None:
    """Send all logs to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(OutageFilter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf logs whole event bodies below INFO, and each watch at INFO. Clients log each request.
    for noisy in ("kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))
