"""Kubernetes events about our objects: one event object per (object, reason, message), with a count of repetitions.

The name of an event is derived from its content. So a repetition, also by the next operator, finds the first event.
Messages are the operator's own sentences about objects. They carry no prompt, key or secret, and are cut to the length
that the API allows.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from .api import Api
from .api_errors import ApiError, ConflictError, NotFoundError
from .bounded_map import BoundedMap
from .resources import EVENTS, Resource
from .write_budget import NotLeaderError

NOTE_LIMIT = 1024
"""Bytes of `note` that events.k8s.io/v1 accepts."""
REMEMBERED = 4096
CONTROLLER = "pdpool.dev/operator"

log = logging.getLogger(__name__)


class Recorder:
    """Writes events. An event that cannot be written is logged and has no other effect."""

    def __init__(self, api: Api, instance: str, now: Callable[[], datetime]) -> None:
        self._api = api
        self._instance = instance[:128]
        self._now = now
        self._counts = BoundedMap[str, int](REMEMBERED)

    async def emit(self, about: Resource, obj: Mapping[str, Any], type_: str, reason: str, message: str) -> None:
        """Record that `reason` (with `message`) happened to `obj`.

        The event is also logged, because logs last longer than the one hour of events.
        """
        meta = obj["metadata"]
        where = {"kind": about.kind, "namespace": meta["namespace"], "object": meta["name"]}
        log.info("%s: %s", reason, message, extra=where)
        note = message.encode()[:NOTE_LIMIT].decode(errors="ignore")
        digest = hashlib.sha256("\0".join((meta["uid"], type_, reason, note)).encode()).hexdigest()[:16]
        name = f"{meta['name'][:200]}.{digest}"
        count = self._counts.get(name, 0) + 1
        try:
            if count == 1 and await self._create(name, about, meta, type_, reason, note):
                self._counts[name] = 1
                return
            self._counts[name] = await self._again(name, max(count, 2), about, meta, type_, reason, note)
        except (ApiError, NotLeaderError) as error:
            log.warning("event not recorded: %s", error, extra={"reason": reason})

    async def _create(
        self, name: str, about: Resource, meta: Mapping[str, Any], type_: str, reason: str, note: str
    ) -> bool:
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "eventTime": self._stamp(),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": reason,
            "type": type_,
            "reason": reason,
            "note": note,
            "regarding": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
        }
        try:
            await self._api.create(EVENTS, body)
        except ConflictError:
            return False
        return True

    async def _again(
        self, name: str, count: int, about: Resource, meta: Mapping[str, Any], type_: str, reason: str, note: str
    ) -> int:
        series = {"series": {"count": count, "lastObservedTime": self._stamp()}}
        try:
            await self._api.merge(EVENTS, meta["namespace"], name, series)
        except NotFoundError:  # the API server keeps events for an hour
            await self._create(name, about, meta, type_, reason, note)
            return 1
        return count

    def _stamp(self) -> str:
        return self._now().isoformat(timespec="microseconds").replace("+00:00", "Z")
