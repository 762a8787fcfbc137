"""The condition HoldsProvable: whether the memory that engines hold for lost peers can be released."""

from collections.abc import Iterable, Sequence

from ..api.base import Condition, ConditionStatus
from ..api.reasons import ConditionType, Reason
from ..api.wording import some
from ..plan.fences import Unproven
from .chain import ConditionWriter


def holds_provable(writer: ConditionWriter, unproven: Sequence[Unproven]) -> Condition:
    """False while engines hold memory for processes whose end cannot be proved."""
    if not unproven:
        message = "No engine holds memory for a lost peer whose end cannot be proved"
        return writer.write(ConditionType.HOLDS_PROVABLE, ConditionStatus.TRUE, Reason.NOTHING_UNPROVEN, message)
    lines = [f"{holder} holds memory for process {_some(names)}: {why}" for (holder, why), names in _grouped(unproven)]
    advice = (
        "Force deletion is no proof. If the node is switched off, declare it: kubectl pdpool fence NODE. Otherwise "
        "make sure that the process has ended, then restart the holder"
    )
    message = f"{some(lines, '; ')}. {advice}"
    return writer.write(ConditionType.HOLDS_PROVABLE, ConditionStatus.FALSE, Reason.PEER_UNPROVEN, message)


def _grouped(unproven: Sequence[Unproven]) -> Iterable[tuple[tuple[str, str], list[str]]]:
    """Group process names by the pod that holds the memory, over all ranks, and by why there is no proof."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in unproven:
        groups.setdefault((one.holder, one.why), []).append(one.hold.incarnation[:8])
    return groups.items()


def _some(names: Iterable[str]) -> str:
    return some(sorted(set(names)), ", ")
