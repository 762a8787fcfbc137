"""The condition PeersUnreachable."""

from collections.abc import Sequence

from ..api.base import Condition, ConditionStatus
from ..api.reasons import ConditionType, Reason
from ..api.wording import some
from ..diagnose.model import Diagnosis
from .chain import ConditionWriter


def peers_unreachable(writer: ConditionWriter, diagnoses: Sequence[Diagnosis]) -> tuple[Condition, ...]:
    """Return the condition of a pool with instances that cannot reach the other side, and nothing for another."""
    cuts = sorted({cut for diagnosis in diagnoses for cut in diagnosis.cuts})
    if not cuts:
        return ()
    avoided = [diagnosis.subject.name for diagnosis in diagnoses if diagnosis.avoided]
    out = f"{some(avoided)} left the rotation for it. " if avoided else ""
    message = (
        f"{some([str(cut) for cut in cuts], '; ')}; all of them answer the operator. {out}"
        f"Look at the network between these nodes"
    )
    return (writer.write(ConditionType.PEERS_UNREACHABLE, ConditionStatus.TRUE, Reason.PEER_SILENT, message),)
