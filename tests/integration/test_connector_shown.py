"""What a real pair shows on its admin endpoints, `/metrics` and `/v1/state`, of hand-offs that go on and that end."""

import shutil
import time
from itertools import count

from pdpool_connector.layout.checksum import sampled
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.asking import get_json, web
from tests.integration.connector_peer import Side
from tests.integration.handoffs import hold_a_write, open_both
from tests.waiting import until


def state(side: Side) -> dict:
    return get_json(f"http://{side.admin}/v1/state")


def metric(side: Side, name: str, **labels: str) -> float:
    """The one sample of `/metrics` that has this name and these labels."""
    families = text_string_to_metric_families(web.get(f"http://{side.admin}/metrics").text)
    wanted = ("pdpool_connector_" + name, {"rank": "0", **labels})
    (value,) = [one.value for family in families for one in family.samples if (one.name, one.labels) == wanted]
    return value


def test_age_of_hold_grows_until_its_fence(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    hold_a_write(prefill, decode)
    assert state(decode)["held_oldest_s"] is None
    prefill.kill()
    decode.until("r", "ended")
    until(lambda: state(decode)["holds"] == 1)
    shown, scraped = state(decode)["held_oldest_s"], metric(decode, "held_oldest_seconds")
    until(lambda: state(decode)["held_oldest_s"] >= shown + 0.3)
    until(lambda: metric(decode, "held_oldest_seconds") >= scraped + 0.3)
    decode.call("fence", incarnation=prefill.incarnation)
    decode.until("r", "releasable")
    until(lambda: state(decode)["held_oldest_s"] is None)
    assert metric(decode, "held_oldest_seconds") == 0.0


def test_release_time_is_counted_at_release(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    hold_a_write(prefill, decode)
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


def test_default_checks_one_hand_off_in_64(sides) -> None:
    first = next(number for number in count(1) if sampled(number, 1 / 64))
    prefill, decode = sides("prefill"), sides("decode")
    for room in range(first):
        open_both(prefill, decode, room, name=f"r{room}")
        prefill.send(f"r{room}", [1, 2])
        decode.until(f"r{room}", "done")
    until(lambda: state(decode)["checksums"] == {"matched": 1, "mismatched": 0, "skipped": 0})


def test_unwritten_flight_record_is_counted(sides, tmp_path) -> None:
    prefill = sides("prefill", flight_dir=str(tmp_path / "flights"))
    assert metric(prefill, "flights_lost_total", reason="unwritten") == 0
    shutil.rmtree(tmp_path / "flights")
    prefill.open("r", 7)
    prefill.abort("r")
    prefill.until("r", "releasable")
    until(lambda: metric(prefill, "flights_lost_total", reason="unwritten") == 1)


def test_ended_attempt_is_remembered_for_late_frames(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    assert metric(prefill, "tombstones") == 0
    open_both(prefill, decode, 7)
    prefill.send("r", [1, 2])
    prefill.until("r", "done")
    until(lambda: metric(prefill, "tombstones") == state(prefill)["tombstones"] == 1)
