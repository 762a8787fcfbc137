"""Remembers on which node each pod was started, also for pods that are deleted by now. A pod never moves."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

REMEMBERED = 16384


class PodNodes:
    """By UID of the pod. The pods that were not seen for longest are forgotten first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._nodes: OrderedDict[str, str] = OrderedDict()

    def note(self, pod: Mapping[str, Any]) -> None:
        """Take in a pod's present or last state."""
        node, uid = str((pod.get("spec") or {}).get("nodeName") or ""), str(pod["metadata"]["uid"])
        if not node:
            return
        self._nodes[uid] = node
        self._nodes.move_to_end(uid)
        while len(self._nodes) > self._remembered:
            self._nodes.popitem(last=False)

    def of(self, pod_uid: str) -> str | None:
        """Return the name of a pod's node. None if it is not known."""
        return self._nodes.get(pod_uid)
