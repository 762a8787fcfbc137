"""Pools whose engines or connectors cannot hand over to each other."""

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.status.contradictions import contradictions

from tests.unit.operator.plan.makers import make_pool

SGLANG = {"engine": {"type": "SGLang"}}
NATIVE = {"transfer": {"connector": "Native"}}


@pytest.mark.parametrize(
    ("prefill", "decode", "fields"),
    [
        (SGLANG, SGLANG, []),
        (SGLANG, {}, ["engine.type is SGLang in PrefillPool chat, but Reference in DecodePool chat"]),
        (
            SGLANG | NATIVE,
            SGLANG,
            ["transfer.connector is Native in PrefillPool chat, but Pdpool in DecodePool chat"],
        ),
        (
            SGLANG | {"transfer": {"backend": "Mooncake"}},
            SGLANG,
            ["transfer.backend is Mooncake in PrefillPool chat, but NIXL in DecodePool chat"],
        ),
        (SGLANG | {"parallelism": {"tensor": 2}}, SGLANG, []),
    ],
)
def test_unlike_engines_and_connectors_are_named(prefill, decode, fields):
    assert list(contradictions(make_pool(**prefill), make_pool(Role.DECODE, **decode))) == fields
