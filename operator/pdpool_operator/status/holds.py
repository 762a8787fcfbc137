"""The condition HoldsProvable: whether what engines hold back for lost peers can become free."""

from collections.abc import Iterable, Sequence

from ..api.base import Condition, ConditionStatus
from ..api.reasons import Reason
from ..plan.fences import Unproven
from .chain import ConditionWriter

HOLDS_PROVABLE = "HoldsProvable"
SHOWN = 5


def holds_provable(writer: ConditionWriter, unproven: Sequence[Unproven]) -> Condition:
    """False while engines hold memory for processes whose end nobody has seen or will see."""
    if not unproven:
        message = "No engine holds memory for a peer that is gone without proof"
        return writer.write(HOLDS_PROVABLE, ConditionStatus.TRUE, Reason.NOTHING_UNPROVEN, message)
    lines = [f"{holder} holds memory for process {_some(names)}: {why}" for (holder, why), names in _grouped(unproven)]
    advice = "Deletion by force proves nothing. Make sure that the process runs no more, then restart the holder"
    message = f"{_more(lines, '; ')}. {advice}"
    return writer.write(HOLDS_PROVABLE, ConditionStatus.FALSE, Reason.PEER_UNPROVEN, message)


def _grouped(unproven: Sequence[Unproven]) -> Iterable[tuple[tuple[str, str], list[str]]]:
    """Names of processes by pod that holds, all ranks together, and why there is no proof."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in unproven:
        groups.setdefault((one.holder, one.why), []).append(one.hold.incarnation[:8])
    return groups.items()


def _some(names: Iterable[str]) -> str:
    return _more(sorted(set(names)), ", ")


def _more(items: Sequence[str], between: str) -> str:
    return between.join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
