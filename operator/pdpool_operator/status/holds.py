"""The condition HoldsProvable: whether what engines hold back for lost peers can become free."""

from collections.abc import Sequence

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
    shown = "; ".join(
        f"{one.holder} holds memory for process {one.hold.incarnation[:8]}: {one.why}" for one in unproven[:SHOWN]
    )
    more = f" and {len(unproven) - SHOWN} more" if len(unproven) > SHOWN else ""
    advice = "Deletion by force proves nothing. Make sure that the process runs no more, then restart the holder"
    message = f"{shown}{more}. {advice}"
    return writer.write(HOLDS_PROVABLE, ConditionStatus.FALSE, Reason.PEER_UNPROVEN, message)
