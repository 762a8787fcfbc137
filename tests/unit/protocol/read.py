"""Short words for what tests of READ say again and again."""

from pdpool_connector.protocol import frames as f

from tests.unit.protocol.sides import DECODE, PREFILL, DecodeRead, PrefillRead, about, ids, reads


def computed(number: int = 1, *, sender: str = PREFILL, pages=(4, 5), last: bool = True, **changes) -> f.Computed:
    fields: dict[str, object] = {"sequence": 0, "start": 0, "aux_slot": 2 if last else -1, "state": b""}
    return f.Computed(**about(number, sender=sender), **(fields | {"pages": ids(*pages), "last": last} | changes))


def said(kind: type[f.Frame], number: int = 1, *, sender: str = DECODE, **fields: object) -> f.Frame:
    defaults: dict[type[f.Frame], dict[str, object]] = {
        f.Done: {"bytes_moved": 10},
        f.Failed: {"cause": "aborted", "message": "client left"},
        f.Drained: {"cause": "aborted", "message": "client left", "request_id": "r"},
        f.Abort: {"cause": "aborted", "message": "client left", "request_id": "r"},
    }
    return kind(**about(number, sender=sender), **(defaults.get(kind, {}) | fields))


def sending(**changes: object) -> PrefillRead:
    """A prefill that has told decode of all its pages."""
    side = PrefillRead()
    side.request()
    side.opened(**changes)
    side.send()
    return side


def receiving() -> tuple[DecodeRead, object]:
    """A decode that reads, and its read."""
    side = DecodeRead()
    side.open()
    (read,) = reads(side.hear(computed()))
    return side, read
