"""An outage of the API server: one warning a minute, with the number of failed calls. Other lines are untouched."""

import logging

import pytest
from pdpool_operator.runtime.api_errors import InvalidError, UnavailableError
from pdpool_operator.runtime.logs import OUTAGE_REMINDER_S, OutageFilter

DOWN = UnavailableError(0, "ClientError", "connection refused", "list /api/v1/pods")
KOPF_LINE = "Request attempt #1/5 failed; will retry: GET https://api/v1/pods -> ClientConnectorError()"


class Logs:
    def __init__(self) -> None:
        self.now = 0.0
        self.filter = OutageFilter(lambda: self.now)

    def write(self, level: int, name: str, text: str, *args: object) -> tuple[str, str] | None:
        record = logging.LogRecord(name, level, "x.py", 1, text, args, None)
        return (record.levelname, record.getMessage()) if self.filter.filter(record) else None

    def fail(self) -> tuple[str, str] | None:
        return self.write(logging.WARNING, "pdpool_operator", "reconcile failed: %s", DOWN)

    def kopf_fails(self) -> tuple[str, str] | None:
        return self.write(logging.ERROR, "kopf.clients", KOPF_LINE)


@pytest.mark.parametrize("how", ["fail", "kopf_fails"])
def test_an_outage_is_one_warning_and_then_a_count(how: str) -> None:
    logs = Logs()
    first, *others = [getattr(logs, how)() for _ in range(10)]
    assert first is not None
    assert first[0] == "WARNING"
    assert others == [None] * 9
    logs.now = OUTAGE_REMINDER_S
    later = getattr(logs, how)()
    assert later is not None
    assert later[1].endswith("(9 more failed calls in the last 60 s)")


def test_both_clients_share_one_line() -> None:
    logs = Logs()
    assert logs.kopf_fails() is not None
    assert logs.fail() is None


def test_other_lines_pass_unchanged_during_an_outage() -> None:
    logs = Logs()
    logs.fail()
    refused = InvalidError(422, "Invalid", "spec.x: bad", "patch /x")
    assert logs.write(logging.WARNING, "pdpool_operator", "reconcile failed: %s", refused) is not None
    assert logs.write(logging.ERROR, "kopf.objects", "Event processing has failed") == (
        "ERROR",
        "Event processing has failed",
    )
