"""Decides which router pods the Service of a router lists: the reachable ones, or all if none is.

Kubernetes lists a pod of a lost node until the node controller notices the loss, about 40 s later. Meanwhile its share
of new connections fails. The operator notices it within seconds. It labels the pod, and the Service selects by label.

Let  unreachable  be the routers to which connections fail. Then

    label = "false"                   if unreachable, Ready, and another router is reachable and listed
    label = "true"                    if reachable, or without a label
    label = the present one           otherwise
"""

from collections.abc import Sequence

from ..api.names import LABEL_REACHABLE
from ..api.reasons import Reason
from ..observe.model import ObservedRouter
from .model import Event, EventType, Patch


def label_routers(routers: Sequence[ObservedRouter]) -> tuple[tuple[Patch, ...], tuple[Event, ...]]:
    """Return the patches of router pods whose label is to change, and the events about it."""
    patches, events = [], []
    for router in routers:
        pod, wanted = router.pod, _label(router, routers)
        if pod.terminating or pod.labelled_reachable == wanted:
            continue
        patches.append(Patch("Pod", pod.name, {"metadata": {"uid": pod.uid, "labels": {LABEL_REACHABLE: wanted}}}))
        if wanted == "false":
            words = f"Connections to {pod.name} fail: its Service lists it no longer"
            events.append(Event(EventType.WARNING, Reason.ROUTER_REMOVED, words))
        elif pod.labelled_reachable == "false":
            words = f"Connections to {pod.name} succeed: its Service lists it again"
            events.append(Event(EventType.NORMAL, Reason.ROUTER_ADDED, words))
    return tuple(patches), tuple(events)


def _label(router: ObservedRouter, routers: Sequence[ObservedRouter]) -> str:
    if router.reachable is False and router.pod.ready and any(_serves(other) for other in routers):
        return "false"
    if router.reachable:
        return "true"
    return router.pod.labelled_reachable or "true"


def _serves(router: ObservedRouter) -> bool:
    pod = router.pod
    return router.reachable is True and pod.takes_requests and pod.labelled_reachable == "true"
