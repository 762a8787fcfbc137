"""`explain`: why something needs attention, which side is at fault, and where to look next."""

from collections.abc import Iterator
from datetime import datetime

from pdpool_operator.api.base import Condition
from pdpool_operator.api.condition_docs import REASONS
from pdpool_operator.plan.selection import AT_FAULT

from .access import Access
from .fleet import Fleet, PoolView, ServiceView, View, attention, needs_attention
from .status import at_fault, outdated, unsaid
from .text import age

MEANING = {str(reason): text for reasons in REASONS.values() for reason, text in reasons.items()}
"""One sentence for each reason of a condition."""


def explain_lines(fleet: Fleet, access: Access, now: datetime) -> Iterator[str]:
    """Yield the text of `explain`."""
    if not fleet.services and not fleet.pools:
        yield access.nothing()
    for service in fleet.services:
        # The pools come first: a service repeats what its pools say.
        yield from _group((*service.pools, service), access, now)
    for pool in fleet.pools:
        yield from _group((pool,), access, now)


def _group(views: tuple[View, ...], access: Access, now: datetime) -> Iterator[str]:
    """Explain objects that work together. The last one names the group."""
    head = views[-1]
    findings = [line for view in views for line in _view(view, now)]
    needy = any(map(needs_attention, views))
    calm = "needs no attention" if findings else f"nothing to explain, {_well(head)}"
    yield f"{_title(head)}: {'needs attention' if needy else calm}"
    told: set[str] = set()
    for line in findings:
        if line not in told:
            yield f"  {line}"
        told.add(line)
    pools = [view for view in views if isinstance(view, PoolView)]
    culprits = [(pool, *fault) for pool in pools for fault in at_fault(pool)]
    for pool, index, word, _ in culprits:
        yield f"=> {pool.kind}/{pool.name} instance {index} is at fault ({word})."
    watched = [one for view in views if isinstance(view, ServiceView) for one in view.status.instances]
    guilty = [one for one in watched if one.verdict in AT_FAULT]
    yield from (f"=> {one.role} pod {one.pod} is at fault ({one.verdict})." for one in guilty)
    if needy:
        flags = access.flags(head.namespace)
        yield "next:"
        yield from (f"  kubectl logs {flags} {pod} -c engine --tail=100" for *_, pod in culprits if pod)
        yield from (f"  kubectl logs {flags} {one.pod} --tail=100" for one in guilty)
        yield f"  kubectl pdpool queues {head.name} {flags}"
        yield f"  kubectl get events {flags} --sort-by=.lastTimestamp"
    yield ""


def _view(view: View, now: datetime) -> Iterator[str]:
    if (note := outdated(view)) is not None:
        yield f"{_title(view)}: {note}"
    for condition in attention(view):
        yield from _condition(view, condition, now)
    if isinstance(view, PoolView):
        yield from (f"{name} is {verdict}: {message}" for name, verdict, message in unsaid(view))


def _condition(view: View, condition: Condition, now: datetime) -> Iterator[str]:
    since = age(condition.last_transition_time, now)
    yield f"{_title(view)}: {condition.type} is {condition.status} for {since}, reason {condition.reason}."
    if condition.reason in MEANING:
        yield f"  {MEANING[condition.reason]}"
    if condition.message:
        yield f"  {condition.message}"


def _well(view: View) -> str:
    ready = next((c for c in view.status.conditions if c.type == "Ready"), None)
    doing = f"Ready is {ready.status} ({ready.reason}): {ready.message}" if ready is not None else "no status"
    return f"queues {view.status.queues or 'not judged'}; {doing}"


def _title(view: View) -> str:
    return f"{view.kind}/{view.name}"
