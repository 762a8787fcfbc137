"""The condition TransferReady, and what a pool's status says of versions and transports."""

from collections.abc import Iterable, Sequence

from ..api.base import Condition, ConditionStatus
from ..api.rdma import Memlock, RdmaMode, RdmaSpec
from ..api.reasons import ConditionType, Reason
from ..api.wording import some
from ..diagnose.model import Diagnosis
from ..diagnose.transport import UNKNOWN, uses_another
from .chain import ConditionWriter, shortened

MAX_SUMMARY = 128


def transfer_ready(
    writer: ConditionWriter, rdma: RdmaSpec | None, diagnoses: Sequence[Diagnosis]
) -> tuple[Condition, ...]:
    """Return the condition of a pool that wants RDMA, and nothing for another."""
    if rdma is None or rdma.mode is RdmaMode.OFF:
        return ()
    pairs = [pair for diagnosis in diagnoses for pair in diagnosis.pairs]
    other = [str(pair) for pair in pairs if uses_another(pair)]
    unknown = [pair for pair in pairs if pair.transport == UNKNOWN]
    kind = ConditionType.TRANSFER_READY
    if other:
        message = f"{some(other, '; ')}. {_consequence(rdma, diagnoses)}. {_advice(rdma)}"
        return (writer.write(kind, ConditionStatus.FALSE, Reason.NOT_RDMA, message),)
    if not pairs:
        message = "No engine has paired with a peer yet, so the transport is not known"
        return (writer.write(kind, ConditionStatus.UNKNOWN, Reason.NOT_PAIRED, message),)
    if unknown:
        shown = some([f"{pair.writer} to {pair.target}" for pair in unknown], "; ")
        message = f"The transfer backend does not report its transport: {shown}"
        return (writer.write(kind, ConditionStatus.UNKNOWN, Reason.TRANSPORT_UNKNOWN, message),)
    return (writer.write(kind, ConditionStatus.TRUE, Reason.RDMA_IN_USE, "All paired engines transfer by RDMA"),)


def transports_in_use(diagnoses: Iterable[Diagnosis]) -> str:
    """Return transfer backends with their transports, such as `nixl rdma`. Empty while no engine has paired."""
    return _summary(
        f"{pair.backend} {pair.transport or 'unknown'}".strip() for diagnosis in diagnoses for pair in diagnosis.pairs
    )


def engines_in_use(diagnoses: Iterable[Diagnosis]) -> str:
    """Return engines with their versions, as the connectors report them."""
    return _summary(
        track.answer.engine
        for diagnosis in diagnoses
        for track in diagnosis.subject.tracks
        if track.answer is not None and track.answer.engine
    )


def connectors_in_use(diagnoses: Iterable[Diagnosis]) -> str:
    """Return the versions of pdpool's connector."""
    return _summary(
        f"pdpool {track.answer.version}"
        for diagnosis in diagnoses
        for track in diagnosis.subject.tracks
        if track.answer is not None and track.answer.version
    )


def _summary(texts: Iterable[str]) -> str:
    return shortened(some(sorted(set(texts))), MAX_SUMMARY)


def _consequence(rdma: RdmaSpec, diagnoses: Sequence[Diagnosis]) -> str:
    if rdma.mode is RdmaMode.PREFERRED:
        return "rdma.mode is Preferred, so they serve all the same"
    unfit = [diagnosis.subject.name for diagnosis in diagnoses if diagnosis.unfit]
    if not unfit:
        return "rdma.mode is Required, so the instances of the other pool are not available"
    return f"rdma.mode is Required, so {some(unfit)} {'is' if len(unfit) == 1 else 'are'} not available"


def _advice(rdma: RdmaSpec) -> str:
    memory = (
        "ulimit -l in the container is unlimited"
        if rdma.memlock is Memlock.NODE_LIMIT
        else "the container runs as root with IPC_LOCK"
    )
    return (
        f"Check on both sides that the pod has {rdma.resource}, that /dev/infiniband has devices in it, that {memory}, "
        f"and that UCX_TLS, UCX_NET_DEVICES and MC_FORCE_TCP do not exclude the device"
    )
