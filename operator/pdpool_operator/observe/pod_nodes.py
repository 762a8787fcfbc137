"""Remembers on which node each pod was started, also for pods that are deleted by now. A pod never moves."""

from collections.abc import Mapping
from typing import Any

from ..runtime.bounded_map import BoundedMap

REMEMBERED = 16384


class PodNodes:
    """By UID of the pod. The pods that were not seen for longest are forgotten first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._nodes = BoundedMap[str, str](remembered)

    def note(self, pod: Mapping[str, Any]) -> None:
        """Take in a pod's present or last state."""
        node, uid = str((pod.get("spec") or {}).get("nodeName") or ""), str(pod["metadata"]["uid"])
        if node:
            self._nodes[uid] = node

    def of(self, pod_uid: str) -> str | None:
        """Return the name of a pod's node. None if it is not known."""
        return self._nodes.get(pod_uid)
