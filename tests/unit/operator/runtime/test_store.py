"""The store of watched objects, and reads from it: newest state wins, deletions stay, old knowledge is not used."""

from typing import Any

import pytest
from pdpool_operator.runtime.cached_reads import TRUSTED_S, CachedReads
from pdpool_operator.runtime.resources import CONFIG_MAPS, EVENTS, PODS, Resource
from pdpool_operator.runtime.store import Store

POOLS = Resource("pdpool.dev", "v1alpha1", "prefillpools", "PrefillPool")
LABELS = {"pdpool.dev/pool": "chat", "pdpool.dev/role": "prefill"}
SELECTOR = "pdpool.dev/pool=chat,pdpool.dev/role=prefill"


def pod(name: str, version: int, uid: str = "", *, namespace: str = "llm", **more: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "uid": uid or f"u-{name}", "resourceVersion": str(version)}
    return {"metadata": {**meta, "labels": LABELS}, **more}


@pytest.fixture
def gone() -> list[str]:
    return []


@pytest.fixture
def store(gone: list[str]) -> Store:
    one = Store(lambda obj: gone.append(obj["metadata"]["name"]))
    one.listed(PODS, None, [pod("a", 5), pod("b", 6)], "10")
    return one


def names(store: Store, namespace: str | None = "llm") -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in store.all(PODS, namespace, {}))


class TestNewestStateWins:
    @pytest.mark.parametrize("put", ["changed", "own write"])
    def test_newer_state_replaces(self, store, put):
        new = pod("a", 11, status="new")
        store.changed(PODS, "MODIFIED", new) if put == "changed" else store.put(PODS, new)
        assert store.get(PODS, "llm", "a")["status"] == "new"

    def test_older_event_after_an_own_write_is_ignored(self, store):
        store.put(PODS, pod("a", 12, status="mine"))
        store.changed(PODS, "MODIFIED", pod("a", 11, status="old"))
        assert store.get(PODS, "llm", "a")["status"] == "mine"

    def test_versions_compare_as_numbers(self, store):
        store.put(PODS, pod("a", 9))
        store.put(PODS, pod("a", 10, status="ten"))
        assert store.get(PODS, "llm", "a")["status"] == "ten"

    def test_objects_carry_their_kind(self, store):
        assert store.get(PODS, "llm", "a")["kind"] == "Pod"


class TestDeletions:
    def test_deleted_object_is_gone(self, store):
        store.changed(PODS, "DELETED", pod("a", 11))
        assert names(store) == ["b"]

    def test_late_answer_does_not_revive(self, store):
        store.changed(PODS, "DELETED", pod("a", 13))
        store.put(PODS, pod("a", 12))
        assert names(store) == ["b"]

    def test_deletion_of_an_older_uid_keeps_the_newer(self, store):
        store.changed(PODS, "DELETED", pod("a", 11))
        store.put(PODS, pod("a", 12, uid="second"))
        store.changed(PODS, "DELETED", pod("a", 11))
        assert names(store) == ["a", "b"]

    def test_list_shows_missed_deletions(self, store, gone):
        store.listed(PODS, None, [pod("a", 5)], "20")
        assert (names(store), gone) == (["a"], ["b"])

    def test_own_object_newer_than_the_list_stays(self, store, gone):
        store.put(PODS, pod("c", 21))
        store.listed(PODS, None, [pod("a", 5), pod("b", 6)], "20")
        assert (names(store), gone) == (["a", "b", "c"], [])

    def test_list_of_one_namespace_keeps_others(self, store, gone):
        store.put(PODS, pod("x", 7, namespace="other"))
        store.listed(PODS, "llm", [], "20")
        assert (names(store, None), sorted(gone)) == (["x"], ["a", "b"])

    def test_recreated_object_in_a_list_replaces(self, store):
        store.listed(PODS, None, [pod("a", 15, uid="second"), pod("b", 6)], "20")
        assert store.get(PODS, "llm", "a")["metadata"]["uid"] == "second"


class Live:
    """An API server with one other object, that counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def get(self, *_: Any) -> dict[str, Any]:
        self.asked += 1
        return pod("live", 99)

    async def list(self, *_: Any, **__: Any):
        self.asked += 1
        yield pod("live", 99)


class TestCachedReads:
    @pytest.fixture
    def ages(self) -> dict[Resource, float]:
        return {PODS: 0.0, POOLS: 0.0}

    @pytest.fixture
    def live(self) -> Live:
        return Live()

    @pytest.fixture
    def reads(self, live, store, ages) -> CachedReads:
        return CachedReads(live, store, lambda what, _: ages.get(what, float("inf")), [POOLS], "pdpool.dev/")

    async def listed(self, reads: CachedReads, *args: str) -> list[str]:
        return sorted([obj["metadata"]["name"] async for obj in reads.list(PODS, "llm", *args)])

    async def test_fresh_store_answers_alone(self, reads, live):
        assert await self.listed(reads, SELECTOR) == ["a", "b"]
        assert (await reads.get(PODS, "llm", "a"))["metadata"]["name"] == "a"
        assert await reads.get(PODS, "llm", "none") is None
        assert live.asked == 0

    @pytest.mark.parametrize("args", [(), ("app=x",), (SELECTOR, "regarding.uid=u")], ids=["all", "foreign", "fields"])
    async def test_other_objects_are_read_live(self, reads, args):
        assert await self.listed(reads, *args) == ["live"]

    async def test_old_store_is_not_used(self, reads, ages):
        ages[PODS] = TRUSTED_S + 1
        assert await self.listed(reads, SELECTOR) == ["live"]
        assert (await reads.get(PODS, "llm", "a"))["metadata"]["name"] == "live"

    @pytest.mark.parametrize("what", [EVENTS, CONFIG_MAPS])
    async def test_unwatched_resources_are_read_live(self, reads, what):
        assert (await reads.get(what, "llm", "a"))["metadata"]["name"] == "live"

    async def test_whole_resource_is_listed_without_labels(self, reads, store, live):
        store.put(POOLS, pod("one", 3))
        found = [obj["metadata"]["name"] async for obj in reads.list(POOLS, "llm")]
        assert (found, live.asked) == (["one"], 0)

    async def test_selector_needs_every_label(self, reads):
        assert await self.listed(reads, "pdpool.dev/pool=another,pdpool.dev/role=prefill") == []


def test_pods_are_kept_without_the_owners_of_their_fields(store):
    body = pod("a", 11)
    body["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    store.changed(PODS, "MODIFIED", body)
    kept = store.get(PODS, "llm", "a")
    assert "managedFields" not in kept["metadata"]
    assert kept["metadata"]["resourceVersion"] == "11"
    assert body["metadata"]["managedFields"], "the body of the watch is not ours to change"
