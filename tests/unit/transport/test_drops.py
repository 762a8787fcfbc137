"""Counting what was dropped, without filling the log."""

import logging

from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport.drops import Drops


def test_all_is_counted_and_little_logged(caplog) -> None:
    now = 0.0
    drops = Drops(lambda: now, Timeouts(drop_log_s=7.0))
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            drops.note("malformed", "x" * 10_000)
        drops.note("stale", "late")
        now = 7.0
        drops.note("malformed", "again")
    assert drops.counts() == {"malformed": 1001, "stale": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert max(len(record.getMessage()) for record in caplog.records) < 300


def test_detail_is_logged_in_one_line(caplog) -> None:
    Drops().note("stranger", "Open from \x1b[2J\nx")
    (record,) = caplog.records
    assert record.getMessage().endswith("Open from \\x1b[2J\\nx")
