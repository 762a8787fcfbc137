"""Logs as one JSON object a line, with the object in question as fields."""

import json
import logging
import sys
from datetime import UTC, datetime

FIELDS = ("kind", "namespace", "object", "reason")
"""Given by `extra=` where they are known."""


class JsonFormatter(logging.Formatter):
    """time, level, logger, message; then what is known of the object; then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
    # kopf logs whole event bodies below INFO, and each watch it opens at INFO; clients log each request.
    for noisy in ("kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level)))
