"""Requests of the operator to connectors, through their admin endpoints."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from ..api.names import admin_url
from ..observe.http import Unanswered, request
from ..plan.model import Fence
from .api import within_budget
from .keys import Keys

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Told:
    """Result of a fence: `outcome` is `given`, `refused` or `unanswered`.

    `words` are the connector's refusal, or why there was no answer.
    """

    fence: Fence
    outcome: str
    words: str = ""


class Engines:
    """Sends change requests to connectors. Each request is signed for its pod alone.

    `write_budget` is called before every request, as for requests to the API server.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        keys: Keys,
        who: str,
        *,
        write_budget: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._http, self._keys, self._who, self._write_budget = http, keys, who, write_budget

    async def fence(self, fence: Fence) -> Told:
        """Send a connector the proof that a process has ended."""
        proof = {
            "kind": "container_terminated",
            "pod_uid": fence.peer_uid,
            "container_id": fence.container_id,
            "seen_by": f"kubelet, reported by {self._who}",
        }
        authorization = self._keys.authorization(fence.key_epoch, "fence", fence.pod_uid, self._who)
        url = f"{admin_url(fence.ip, fence.rank)}/v1/fence"
        timeout_s = min(TIMEOUT_S, within_budget(self._write_budget, f"POST {url}"))
        try:
            status, body = await request(
                self._http,
                "POST",
                url,
                timeout_s=timeout_s,
                headers={"Authorization": authorization},
                json={"incarnation": fence.incarnation, "proofs": [proof]},
            )
        except Unanswered as silence:
            return Told(fence, "unanswered", str(silence))
        if status == 200:
            return Told(fence, "given")
        return Told(fence, "refused", f"http {status}: {body[:200].decode(errors='replace')}")
