"""A hand-off that fails: the peer is sent the failure before the engine can see it."""

import numpy as np
from pdpool_connector import Cause, ConnectorConfig, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.transport.control import ControlServer

PAGES = np.arange(2, dtype=np.int32)


class Failing(LocalBackend):
    """Raises for each chunk."""

    def submit(self, *_: object) -> None:
        raise RuntimeError("the link is down")

    submit_at_once = submit


def test_failure_is_sent_before_the_engine_sees_it(memory, monkeypatch) -> None:
    seen: list[tuple[str, Phase]] = []
    flush = ControlServer.flush

    def note_frame(frame) -> float:
        seen.append((type(frame).__name__, sending.status.phase))
        return 0.0

    def note_flush(server) -> None:
        flush(server)
        seen.append(("flush", sending.status.phase))

    config = ConnectorConfig("127.0.0.1", frame_filter=note_frame)
    prefill = PrefillConnector(config, memory, backend=Failing())
    with prefill, DecodeConnector(ConnectorConfig("127.0.0.1"), memory) as decode:
        sending = prefill.open(7, "r")
        monkeypatch.setattr(ControlServer, "flush", note_flush)
        receiving = decode.open(prefill.bootstrap_address, 7, "r")
        receiving.offer(PAGES, aux_slot=0)
        sending.send(PAGES, start=0, last=True, aux_slot=0)
        assert sending.wait(30).cause is Cause.TRANSFER_FAILED
        receiving.wait(30)
        monkeypatch.undo()
    names = [name for name, _ in seen]
    sent = names.index("flush", names.index("Ended"))
    assert seen[sent][1] is not Phase.FAILED
