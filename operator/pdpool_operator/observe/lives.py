"""Remembers what the kubelet said of containers that have ended, also of pods that are gone from the API by now.

A pod that ends in order is seen with its containers terminated before its object goes; whoever looks only at what is
there now would miss that. What was said once stays true, so remembering it is safe, and forgetting it costs patience.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from . import parse
from .model import PodLife

REMEMBERED = 4096


class Lives:
    """By UID of the pod; the oldest are forgotten first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._lives: OrderedDict[str, PodLife] = OrderedDict()

    def note(self, pod: Mapping[str, Any]) -> bool:
        """Take in a pod as it is now or was last; whether that says something new."""
        life, uid = parse.pod_life(pod), pod["metadata"]["uid"]
        known = self._lives.get(uid)
        if life is None or life == known or (known is not None and known.over):
            return False
        self._lives[uid] = life
        self._lives.move_to_end(uid)
        while len(self._lives) > self._remembered:
            self._lives.popitem(last=False)
        return True

    def of(self, pod_uid: str) -> PodLife | None:
        """What is known of a pod."""
        return self._lives.get(pod_uid)
