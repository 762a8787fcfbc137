"""What a real pair shows on its admin endpoints, `/metrics` and `/v1/state`, of hand-offs that go on and that end."""

import shutil
import time
from itertools import count

from pdpool_connector.layout.checksum import sampled
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.asking import get_json, web
from tests.integration.connector_peer import Side
from tests.integration.handoffs import meet
from tests.integration.small_side import until


def state(side: Side) -> dict:
    return get_json(f"http://{side.admin}/v1/state")


def metric(side: Side, name: str, **labels: str) -> float:
    """The one sample of `/metrics` that has this name and these labels."""
    families = text_string_to_metric_families(web.get(f"http://{side.admin}/metrics").text)
    wanted = ("pdpool_connector_" + name, {"rank": "0", **labels})
    (value,) = [one.value for family in families for one in family.samples if (one.name, one.labels) == wanted]
    return value


def under_way(prefill: Side, decode: Side) -> None:
    """A hand-off whose write has begun and does not land before it is let."""
    prefill.call("hold_writes")
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.send("r", [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] == 1)


def test_the_age_of_a_hold_grows_until_its_peer_is_fenced_and_is_gone_then(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    under_way(prefill, decode)
    assert state(decode)["held_oldest_s"] is None
    prefill.kill()
    decode.until("r", "ended")
    until(lambda: state(decode)["holds"] == 1)
    told, scraped = state(decode)["held_oldest_s"], metric(decode, "held_oldest_seconds")
    until(lambda: state(decode)["held_oldest_s"] >= told + 0.3)
    until(lambda: metric(decode, "held_oldest_seconds") >= scraped + 0.3)
    decode.call("fence", incarnation=prefill.incarnation)
    decode.until("r", "releasable")
    until(lambda: state(decode)["held_oldest_s"] is None)
    assert metric(decode, "held_oldest_seconds") == 0.0


def test_the_time_from_an_abort_to_the_release_of_its_pages_is_counted_once_they_are_released(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    under_way(prefill, decode)
    decode.abort("r")
    decode.until("r", "ended")
    ended_by = time.monotonic()
    prefill.until("r", "ended")
    until(lambda: state(decode)["outcomes"]["aborted"] == 1)
    assert metric(decode, "release_seconds_count") == 0, "its pages may still be written to"
    kept_s = time.monotonic() - ended_by
    prefill.call("release_writes")
    for side in (prefill, decode):
        side.until("r", "releasable")
        until(lambda side=side: metric(side, "release_seconds_count") == 1)
    assert metric(decode, "release_seconds_sum") >= kept_s


def test_some_hand_offs_are_checked_where_nobody_says_how_many(sides) -> None:
    first = next(number for number in count(1) if sampled(number, 1 / 64))
    prefill, decode = sides("prefill"), sides("decode")
    for room in range(first):
        meet(prefill, decode, room, name=f"r{room}")
        prefill.send(f"r{room}", [1, 2])
        decode.until(f"r{room}", "done")
    until(lambda: state(decode)["checksums"] == {"matched": 1, "mismatched": 0, "skipped": 0})


def test_a_flight_record_that_cannot_be_written_is_counted(sides, tmp_path) -> None:
    prefill = sides("prefill", flight_dir=str(tmp_path / "flights"))
    assert metric(prefill, "flights_lost_total", reason="unwritten") == 0
    shutil.rmtree(tmp_path / "flights")
    prefill.open("r", 7)
    prefill.abort("r")
    prefill.until("r", "releasable")
    until(lambda: metric(prefill, "flights_lost_total", reason="unwritten") == 1)


def test_an_attempt_that_has_ended_is_remembered_for_late_frames(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    assert metric(prefill, "tombstones") == 0
    meet(prefill, decode, 7)
    prefill.send("r", [1, 2])
    prefill.until("r", "done")
    until(lambda: metric(prefill, "tombstones") == state(prefill)["tombstones"] == 1)
