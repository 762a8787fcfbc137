"""Requests of the operator to connectors, through their admin endpoints."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from ..api.names import admin_url
from ..observe.http import Unanswered, request
from ..plan.model import ContainerEnded, Fence, NodeOff, Purge, Purged
from ..runtime.keys import Keys
from ..runtime.write_budget import within_budget

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class FenceResult:
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
        self, http: aiohttp.ClientSession, keys: Keys, who: str, *, write_budget: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._http, self._keys, self._who, self._write_budget = http, keys, who, write_budget

    async def fence(self, fence: Fence) -> FenceResult:
        """Send a connector the proof that a process has ended.

        Raises:
            NotLeaderError: another operator may be the leader.
        """
        body = {"incarnation": fence.incarnation, "proofs": [self._proof(fence.proof)]}
        outcome, answer = await self._post(fence, "fence", body)
        return FenceResult(fence, outcome, "" if outcome == "given" else answer)

    def _proof(self, proof: ContainerEnded | NodeOff) -> Mapping[str, str]:
        if isinstance(proof, NodeOff):
            return {"kind": "node_out_of_service", "node": proof.node, "declared_by": proof.declared_by}
        return {
            "kind": "container_terminated",
            "pod_uid": proof.pod_uid,
            "container_id": proof.container_id,
            "seen_by": f"kubelet, reported by {self._who}",
        }

    async def purge(self, purge: Purge) -> Purged:
        """Have one rank of an engine end its old hand-offs.

        Raises:
            NotLeaderError: another operator may be the leader.
        """
        body = {"older_than_s": purge.older_than_s, "reason": purge.reason}
        outcome, answer = await self._post(purge, "purge", body)
        if outcome != "given":
            return Purged(purge, outcome, words=answer)
        try:
            count = json.loads(answer)["purged"]
        except (ValueError, TypeError, KeyError):
            count = None
        if not isinstance(count, int) or count < 0:
            return Purged(purge, "unanswered", words=f"invalid: {answer}")
        return Purged(purge, outcome, count)

    async def _post(self, to: Fence | Purge, operation: str, body: Mapping[str, object]) -> tuple[str, str]:
        """Return the outcome, and the answer in text."""
        authorization = self._keys.authorization(to.key_epoch, operation, to.pod_uid, self._who)
        url = f"{admin_url(to.ip, to.rank)}/v1/{operation}"
        timeout_s = min(TIMEOUT_S, within_budget(self._write_budget, f"POST {url}"))
        try:
            status, sent = await request(
                self._http,
                "POST",
                url,
                timeout_s=timeout_s,
                headers={"Authorization": authorization},
                json=dict(body),
            )
        except Unanswered as silence:
            return "unanswered", str(silence)
        text = sent[:200].decode(errors="replace")
        return ("given", text) if status == 200 else ("refused", f"http {status}: {text}")
