from typing import Any, cast

import pytest
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.models import DisaggregatedService
from pdpool_operator.observe.cluster import Cluster
from pdpool_operator.observe.lives import Lives

from tests.unit.operator.plan.makers import T0

SERVICE = DisaggregatedService.parse(
    {
        "metadata": {"name": "chat", "namespace": "llm", "uid": "u"},
        "spec": {"prefill": {"poolRef": {"name": "chat"}}, "decode": {"poolRef": {"name": "chat"}}},
    }
)


class OneBadPool:
    """An API server of which only a PrefillPool from some other version of the API is asked."""

    async def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        bad = {"metadata": {"name": name, "namespace": namespace, "uid": "p"}, "spec": {"replicas": -1}}
        return bad if resource.kind == "PrefillPool" else None

    async def list(self, *_: object):
        for nothing in ():
            yield nothing


async def test_a_pool_that_does_not_fit_its_model_is_not_taken_for_no_pool():
    cluster = Cluster(
        cast("Any", OneBadPool()), cast("Any", None), cast("Any", None), lambda _: "key", Lives(), lambda: T0
    )
    with pytest.raises(SpecInvalid, match=r"PrefillPool chat: spec\.replicas"):
        await cluster.service(SERVICE)
