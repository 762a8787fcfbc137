"""What soak and tests read inside a running connector: in a turn of its owner, for its tables change under others."""

from concurrent.futures import Future

from pdpool_connector import DecodeConnector, PrefillConnector

ANSWER_S = 10.0


def rows(connector: PrefillConnector | DecodeConnector) -> int:
    """How many hand-offs the machine keeps, remembered ends included. Raises TimeoutError when no turn comes."""
    if not connector._reactor._thread.is_alive():
        return connector._machine.rows
    answer: Future[int] = Future()
    connector._reactor.post(lambda: answer.set_result(connector._machine.rows))
    return answer.result(ANSWER_S)
