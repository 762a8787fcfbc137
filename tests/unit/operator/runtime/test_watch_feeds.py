"""Feeds of watched resources: what kopf gets when the API server fails, and how often it is asked."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.resources import PODS, PREFILL_POOLS
from pdpool_operator.runtime.store import Store
from pdpool_operator.runtime.watch_feeds import BACKOFF_LIMIT_S, GONE_LINE, PACE_S, WatchFeeds

from tests.fake_api import Call, FakeApi
from tests.serving import serving

LIST, WATCH = "/api/v1/pods?limit=500", "/api/v1/pods?watch=true&resourceVersion={}"


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    one = FakeApi(bookmark_s=0.05)
    one.put(PODS, "llm", "a", {})
    async with serving(one.handle) as one.url:
        yield one


@pytest.fixture
async def feeds(api: FakeApi, clock: Clock) -> AsyncIterator[WatchFeeds]:
    client = ApiClient(Configuration(host=api.url))
    yield WatchFeeds(
        Api(client, timeout_s=1.0), [PODS, PREFILL_POOLS], Store(), clock=clock, sleep=clock.sleep, silent_s=0.5
    )
    await client.close()


async def listed(feeds: WatchFeeds) -> tuple[list[str], str]:
    body: Any = await (await feeds.request(method="get", url=LIST)).json()
    return [item["metadata"]["name"] for item in body["items"]], body["metadata"]["resourceVersion"]


async def watched(feeds: WatchFeeds, since: str, *, lines: int = 100) -> list[bytes]:
    """Return the lines of one watch until it ends, at most so many."""
    found = []
    async with await feeds.request(method="get", url=WATCH.format(since)) as answer:
        async for line in answer.content.iter_chunked(1):
            found.append(line)
            if len(found) == lines:
                break
    return found


async def test_list_then_watch_shows_the_change(feeds, api):
    assert await listed(feeds) == (["a"], "1")
    api.put(PODS, "llm", "b", {})
    (line,) = await watched(feeds, "1", lines=1)
    assert json.loads(line)["object"]["metadata"]["name"] == "b"


async def test_version_follows_bookmarks(feeds, api):
    await listed(feeds)
    api.put(PREFILL_POOLS, "llm", "other", {})
    await watched(feeds, "1", lines=1)
    assert feeds.version(PODS) == "2"


async def test_silent_watch_ends_and_may_be_resumed(feeds, api):
    await listed(feeds)

    async def silent(request: web.Request, call: Call) -> web.StreamResponse | None:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await asyncio.sleep(60)  # the client gives up long before
        return answer

    api.fault = silent
    assert await asyncio.wait_for(watched(feeds, "1"), 5) == []


async def test_hanging_watch_ends(feeds, api):
    await listed(feeds)

    async def hangs(*_: Any) -> None:
        await asyncio.sleep(60)  # the client gives up long before

    api.fault = hangs
    assert await asyncio.wait_for(watched(feeds, "1"), 5) == []


@pytest.mark.parametrize("status", [410, 403, 404, 400])
async def test_refused_watch_makes_kopf_list_again(feeds, api, status):
    async def refuses(*_: Any) -> web.Response:
        return web.json_response({"message": "no"}, status=status)

    await listed(feeds)
    api.fault = refuses
    assert await watched(feeds, "1") == [GONE_LINE]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_busy_server_keeps_the_place_of_the_watch(feeds, api, status):
    async def refuses(*_: Any) -> web.Response:
        return web.json_response({"message": "no"}, status=status)

    await listed(feeds)
    api.fault = refuses
    assert await watched(feeds, "1") == []


async def test_pages_forgotten_in_between_are_listed_again(feeds, api):
    refusals = []

    async def forgets(request: web.Request, _: Call) -> web.Response | None:
        if not refusals:
            refusals.append(request)
            return web.json_response({"message": "too old"}, status=410)
        return None

    api.fault = forgets
    assert (await listed(feeds))[0] == ["a"]


async def test_pauses_grow_to_a_limit(feeds, api, clock):
    left = 12

    async def fails(*_: Any) -> web.Response | None:
        nonlocal left
        left -= 1
        return web.json_response({}, status=500) if left else None

    api.fault = fails
    await listed(feeds)
    # A pause is the difference of two readings of the clock, whose last digits are rounded.
    pauses = [round(pause, 6) for pause in clock.slept]
    assert all(a <= b or b == BACKOFF_LIMIT_S for a, b in itertools.pairwise(pauses))
    assert min(pauses) >= PACE_S
    assert pauses[-1] == BACKOFF_LIMIT_S


async def test_failing_feed_is_out_of_sight_until_a_watch_opens(feeds, api, clock):
    await listed(feeds)
    assert feeds.blind() == (0.0, "")

    async def fails(*_: Any) -> web.Response:
        return web.json_response({}, status=500)

    api.fault = fails
    await watched(feeds, "1")
    clock.now += 20
    seconds, what = feeds.blind()
    assert seconds >= 20
    assert what == "pods"
    api.fault = None
    await watched(feeds, "1", lines=1)
    assert feeds.blind() == (0.0, "")


async def test_first_list_that_fails_counts_from_its_start(feeds, api, clock):
    async def hangs(*_: Any) -> None:
        await asyncio.sleep(60)  # the client gives up long before

    clock.now += 3600  # a standby asks for nothing
    api.fault = hangs
    listing = asyncio.create_task(listed(feeds))
    await asyncio.wait([listing], timeout=1.5)  # longer than the deadline of a call
    listing.cancel()
    assert clock.slept
    assert feeds.blind()[0] < 60


async def test_age_counts_from_the_last_confirmation(feeds, clock):
    assert feeds.age_s(PODS, "llm") == float("inf")
    await listed(feeds)
    clock.now += 7
    assert feeds.age_s(PODS, "llm") == pytest.approx(7)
    await watched(feeds, "1", lines=1)
    assert feeds.age_s(PODS, "llm") == 0
    assert feeds.age_s(PREFILL_POOLS, "llm") == float("inf")


async def test_group_that_is_not_served_has_no_kinds(feeds, api):
    async def nothing(*_: Any) -> web.Response:
        return web.json_response({"message": "no"}, status=404)

    api.fault = nothing
    assert (await (await feeds.request(method="get", url="/apis/pdpool.dev/v1alpha1")).json())["resources"] == []


async def test_kopf_must_not_write(feeds):
    with pytest.raises(RuntimeError, match="must only read"):
        await feeds.request(method="patch", url="/api/v1/namespaces/llm/pods/a")
