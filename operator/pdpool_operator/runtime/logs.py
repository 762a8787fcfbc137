"""Logs as one JSON object per line. The object that a record is about is in its fields."""

import json
import logging
import sys
from datetime import UTC, datetime

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


def set_up(level: str) -> None:
    """Send all logs to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf logs whole event bodies below INFO, and each watch at INFO. Clients log each request.
    for noisy in ("kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))
