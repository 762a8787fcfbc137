"""Pools whose engines or connectors cannot hand over to each other."""

from typing import Any

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


def args(*words: str) -> dict[str, Any]:
    return SGLANG | {"template": {"spec": {"containers": [{"name": "engine", "image": "x", "args": list(words)}]}}}


@pytest.mark.parametrize(
    ("prefill", "decode", "fields"),
    [
        (
            args("--page-size=64"),
            args("--page-size", "32"),
            ["template args --page-size is 64 in PrefillPool chat, but 32 in DecodePool chat"],
        ),
        (
            args("--kv-cache-dtype=fp8_e5m2", "--page-size=64"),
            args("--kv-cache-dtype=fp8_e4m3", "--page-size=64"),
            ["template args --kv-cache-dtype is fp8_e5m2 in PrefillPool chat, but fp8_e4m3 in DecodePool chat"],
        ),
        (args("--page-size=1", "--page-size=64"), args("--page-size=64"), []),
        (args("--page-size=64"), args(), []),
        (args("--kv-cache-dtype=auto"), args("--kv-cache-dtype=bfloat16"), []),
        (args("--page-size=64") | NATIVE, args("--page-size=32") | NATIVE, []),
        (args("--mem-fraction-static=0.8"), args("--mem-fraction-static=0.9"), []),
    ],
    ids=["page size", "cache type", "last one counts", "absent", "auto", "own connector", "other flag"],
)
def test_unlike_flags_that_both_sides_share_are_named(prefill, decode, fields):
    assert list(contradictions(make_pool(**prefill), make_pool(Role.DECODE, **decode))) == fields
