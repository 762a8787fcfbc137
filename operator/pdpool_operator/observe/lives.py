"""Remembers the kubelet's reports of ended containers, also for pods that are deleted by now.

A pod that ends in order shows terminated containers before its object is deleted. A reader of only the present objects
would miss that. A report stays true for ever, so remembering it is safe. A forgotten report only delays release.
"""

from collections.abc import Mapping
from typing import Any

from ..runtime.bounded_map import BoundedMap
from . import parse
from .model import PodLife

REMEMBERED = 4096


class Lives:
    """By UID of the pod. The oldest are forgotten first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._lives = BoundedMap[str, PodLife](remembered)

    def note(self, pod: Mapping[str, Any]) -> bool:
        """Take in a pod's present or last state; return whether it adds something new."""
        life, uid = parse.pod_life(pod), pod["metadata"]["uid"]
        known = self._lives.get(uid)
        if life is None or life == known or (known is not None and known.over):
            return False
        self._lives[uid] = life
        return True

    def of(self, pod_uid: str) -> PodLife | None:
        """Return what is known of a pod."""
        return self._lives.get(pod_uid)
