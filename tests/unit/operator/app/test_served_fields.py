"""An installed CRD that lacks fields: they are named, counted, and left out of the status."""

import copy
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pdpool_operator.api import served
from pdpool_operator.api.pools import PoolStatus
from pdpool_operator.controller.reporter import Reporter
from pdpool_operator.controller.served_fields import ServedFields
from pdpool_operator.observe.keys import Key
from pdpool_operator.runtime.api_errors import UnavailableError
from pdpool_operator.runtime.resources import PREFILL_POOLS

KIND = "PrefillPool"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CONDITION = {
    "type": "Ready",
    "status": "True",
    "reason": "Complete",
    "message": "m",
    "lastTransitionTime": "2026-01-02T03:04:05Z",
    "observedGeneration": 3,
}
STATUS = {"observedGeneration": 3, "queues": "Idle", "replicas": 2, "conditions": [CONDITION]}


def document(*lacking: str, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return an OpenAPI document whose PrefillPool lacks fields. `kinds` restricts the kinds in it."""
    schemas = {}
    for kind, schema in copy.deepcopy(served.wanted()).items():
        for path in lacking if kind == KIND else ():
            remove(schema, path)
        group = {"group": "pdpool.dev", "version": "v1alpha1", "kind": kind}
        if not kinds or kind in kinds:
            schemas[f"dev.pdpool.v1alpha1.{kind}"] = schema | {"x-kubernetes-group-version-kind": [group]}
    return {"components": {"schemas": schemas | {"io.k8s.ObjectMeta": {"type": "object"}}}}


def remove(schema: Any, path: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        schema = schema["properties"][name.removesuffix("[]")]
        schema = schema["items"] if name.endswith("[]") else schema
    del schema["properties"][last]


class Api:
    """Serves an OpenAPI document, and records the statuses that are written."""

    def __init__(self, openapi: dict[str, Any] | None) -> None:
        self.document = openapi
        self.written: list[dict[str, Any]] = []

    async def openapi(self, group: str, version: str) -> dict[str, Any]:
        assert (group, version) == ("pdpool.dev", "v1alpha1")
        if self.document is None:
            raise UnavailableError(503, "", "down", "get")
        return self.document

    async def apply_status(self, _resource: Any, _live: Any, status: dict[str, Any]) -> None:
        self.written.append(status)


async def checked(*lacking: str, **more: Any) -> tuple[ServedFields, list[list[str]], Api]:
    reported: list[list[str]] = []
    api = Api(document(*lacking, **more))
    fields = ServedFields(api, reported.append)
    await fields.check()
    return fields, reported, api


FIELDS = ["spec.replicas", "spec.model.path", "status.queues", "status.conditions[].observedGeneration"]


@pytest.mark.parametrize("path", FIELDS)
async def test_missing_field_is_named_and_reported(path, caplog):
    _, reported, _ = await checked(path)
    assert reported == [[f"{KIND}.{path}"]]
    (record,) = [record for record in caplog.records if path in record.getMessage()]
    assert KIND in record.getMessage()


async def test_complete_crds_report_nothing(caplog):
    _, reported, _ = await checked()
    assert reported == [[]]
    assert not caplog.records


async def test_kind_that_is_not_served_is_not_missing_fields():
    _, reported, _ = await checked(kinds=("DecodePool",))
    assert reported == [[]]


async def test_schema_that_keeps_unknown_fields_lacks_none():
    openapi = document()
    pool = openapi["components"]["schemas"]["dev.pdpool.v1alpha1.PrefillPool"]
    pool["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    assert served.missing_fields(served.wanted()[KIND], pool) == ()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("status.queues", {key: value for key, value in STATUS.items() if key != "queues"}),
        ("status.conditions", {key: value for key, value in STATUS.items() if key != "conditions"}),
        (
            "status.conditions[].observedGeneration",
            STATUS | {"conditions": [{k: v for k, v in CONDITION.items() if k != "observedGeneration"}]},
        ),
        ("spec.replicas", STATUS),
    ],
)
async def test_status_is_stored_without_the_missing_field(path, expected):
    fields, _, _ = await checked(path)
    assert fields.storable(KIND, STATUS) == expected
    assert fields.storable("DecodePool", STATUS) == STATUS


async def test_upgraded_crd_gets_the_whole_status_again():
    fields, reported, api = await checked("status.queues")
    api.document = document()
    await fields.check()
    assert reported == [[f"{KIND}.status.queues"], []]
    assert fields.storable(KIND, STATUS) == STATUS


async def test_unreadable_description_keeps_what_was_known():
    fields, reported, api = await checked("status.queues")
    api.document = None
    await fields.check()
    assert len(reported) == 1
    assert "queues" not in fields.storable(KIND, STATUS)


def make_reporter(api: Any, fields: Any) -> Reporter:
    counter = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))
    metrics = SimpleNamespace(states=SimpleNamespace(show_conditions=lambda *_: None), status_writes=counter)
    return Reporter(api, fields, cast("Any", None), cast("Any", metrics), lambda: NOW)


async def test_condition_of_another_writer_asks_for_no_write():
    fields, _, api = await checked()
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Done", "lastTransitionTime": NOW.isoformat()}
    before = PoolStatus.model_validate(STATUS | {"conditions": [CONDITION, theirs]})
    after = PoolStatus.model_validate(STATUS)
    reporter = make_reporter(api, fields)
    assert await reporter.write_status(Key(KIND, "llm", "chat"), PREFILL_POOLS, {"status": {}}, before, after) is None
    assert api.written == []


async def test_change_of_a_missing_field_alone_writes_nothing():
    fields, _, api = await checked("status.queues")
    body = {"status": fields.storable(KIND, STATUS)}
    before = PoolStatus.model_validate(body["status"])
    after = PoolStatus.model_validate(STATUS | {"queues": "Stuck"})
    reporter = make_reporter(api, fields)
    key = Key(KIND, "llm", "chat")
    assert await reporter.write_status(key, PREFILL_POOLS, body, before, after) is None
    assert api.written == []
    more = after.model_copy(update={"replicas": 7})
    await reporter.write_status(key, PREFILL_POOLS, body, before, more)
    (status,) = api.written
    assert "queues" not in status
    assert status["replicas"] == 7
