"""Reads inside a running connector for soak and tests, in a turn of the owning thread, because its tables change."""

from concurrent.futures import Future

from pdpool_connector import DecodeConnector, PrefillConnector

ANSWER_S = 10.0


def rows(connector: PrefillConnector | DecodeConnector) -> int:
    """Return the number of hand-offs that the machine keeps, including tombstones.

    Raises:
        TimeoutError: no turn runs in time.
    """
    if not connector._reactor._thread.is_alive():
        return connector._machine.rows
    answer: Future[int] = Future()
    connector._reactor.post(lambda: answer.set_result(connector._machine.rows))
    return answer.result(ANSWER_S)
