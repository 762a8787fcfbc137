"""What a pool's plan reports beside its steps: what it waits for, lacking room, and pods of another build."""

from ..api.base import format_time
from ..api.reasons import Reason
from ..api.wording import some
from .model import Plan, Progress
from .pool_drains import DRAIN_POLL_S
from .pool_state import PoolState
from .selection import available


def waiting_for(state: PoolState) -> Progress | None:
    """Return what the plan waits for when it has no action."""
    leaving = [instance.name for instance in state.observed.instances if instance.deleting]
    if leaving:
        return Progress(Reason.SCALING_DOWN, f"Waiting for {', '.join(leaving)} to be deleted")
    outdated = [instance for instance in state.present if state.outdated(instance)]
    if state.kept_out:
        what = some([f"{i.name} out of the rotation (PoolOperation {i.kept_out_by})" for i in state.kept_out])
        pauses = "; the update waits for its end" if outdated else ""
        return Progress(Reason.DRAINING, f"An operation keeps {what}{pauses}")
    waiting = [instance.name for instance in state.present if not available(instance)]
    if outdated:
        at_fault = [i.name for i in state.present if i.index in state.selector.at_fault and i.name not in waiting]
        what = some(waiting + at_fault)
        return Progress(Reason.UPDATING, f"{len(outdated)} instances run an earlier spec; waiting for {what}")
    if waiting:
        return Progress(Reason.STARTING, f"Waiting for {some(waiting)} to be Ready")
    return None


def lacking_room(state: PoolState) -> Plan:
    """Announce that the only serving instance will be drained to make room for its successor."""
    for new in state.present if state.selection.surge else ():
        until = None if state.outdated(new) else state.selector.no_room_until(new)
        if until is not None:
            old = some([i.name for i in state.present if state.outdated(i)])
            cause = new.pod.unschedulable or "; ".join(new.pod.warnings) if new.pod else new.create_error
            message = (
                f"There is no room for {new.name} beside {old}: {cause}. At {format_time(until)} {old} will be "
                f"drained to make room. The pool then serves nothing until {new.name} is Ready. Add capacity to avoid "
                f"that"
            )
            return Plan(
                progress=Progress(Reason.UPDATING, message),
                requeue_after_s=max(DRAIN_POLL_S, (until - state.now).total_seconds()),
            )
    return Plan()


def built_otherwise(state: PoolState) -> tuple[str, ...]:
    """Return instances of the current spec whose pod another version of the builders rendered."""
    return tuple(
        instance.name
        for instance in state.present
        if instance.pod is not None
        and not state.surplus(instance)
        and not state.outdated(instance)
        and instance.pod.build_hash != state.build_hash(instance)
    )


def same_build(state: PoolState) -> tuple[str, ...]:
    """Return instances whose pod was built from another spec, but as the current spec says."""
    return tuple(
        i.name for i in state.present if i.pod and i.pod.spec_hash != state.spec_hash and not state.outdated(i)
    )
