"""What the operator tells connectors through their admin endpoints."""

from dataclasses import dataclass

import aiohttp

from ..api.names import admin_url
from ..observe.http import Unanswered, request
from ..plan.model import Fence
from .keys import Signer

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Told:
    """What came of it: `outcome` is `given`, `refused` (by the connector, in its words) or `unanswered`."""

    fence: Fence
    outcome: str
    words: str = ""


class Engines:
    """Asks connectors to change something; each request is signed for its pod alone."""

    def __init__(self, http: aiohttp.ClientSession, signer: Signer, who: str) -> None:
        self._http, self._signer, self._who = http, signer, who

    async def fence(self, fence: Fence) -> Told:
        """Tell a connector that a process has ended."""
        proof = {
            "kind": "container_terminated",
            "pod_uid": fence.peer_uid,
            "container_id": fence.container_id,
            "seen_by": f"kubelet, told by {self._who}",
        }
        try:
            status, body = await request(
                self._http,
                "POST",
                f"{admin_url(fence.ip, fence.rank)}/v1/fence",
                timeout_s=TIMEOUT_S,
                headers={"Authorization": self._signer.authorization("fence", fence.pod_uid, self._who)},
                json={"incarnation": fence.incarnation, "proofs": [proof]},
            )
        except Unanswered as silence:
            return Told(fence, "unanswered", str(silence))
        if status == 200:
            return Told(fence, "given")
        return Told(fence, "refused", f"http {status}: {body[:200].decode(errors='replace')}")
