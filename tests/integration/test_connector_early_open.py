"""Decode opens its half when the request arrives, and offers memory later: what ends meanwhile, and what matches."""

import contextlib
import signal
import time

import pytest

from tests.integration.cable import Cable
from tests.integration.connector_peer import Side
from tests.integration.handoffs import TIMEOUTS, fill, offer, open_both, settle_empty

SOON_S = 2.0
"""Each side learns within this that the other one has ended a hand-off, or has died."""
PATIENT = {**TIMEOUTS, "match_s": 60.0}
"""A wait for the other half outlives these tests: no hand-off ends by it."""


@pytest.fixture
def pair(sides) -> tuple[Side, Side]:
    prefill, decode = sides("prefill", timeouts=PATIENT), sides("decode", timeouts=PATIENT)
    fill(prefill, 1)
    return prefill, decode


def open_early(prefill: Side, decode: Side, room: int = 7, name: str = "r", **more) -> None:
    """Open both halves of a hand-off for which decode has no memory yet; prefill has matched them."""
    prefill.open(name, room, **more)
    decode.open(name, room, prefill=prefill.bootstrap, **more)
    prefill.settle(lambda stats: stats["attempts"]["matched"]["reqs"] >= 1)


def ends(side: Side, cause: str, name: str = "r", since: float | None = None) -> dict:
    """The half ends with this cause, soon after `since`, and its pages are free."""
    status = side.until(name, "releasable")
    assert status["cause"] == cause, status
    assert since is None or status["at"] - since < SOON_S
    return status


class TestEndBeforeOffer:
    """Something ends the hand-off while decode has offered no memory."""

    def test_killed_decode_ends_prefills_half(self, pair) -> None:
        prefill, decode = pair
        open_early(prefill, decode)
        decode.kill()
        ends(prefill, "peer_lost", since=time.monotonic())

    def test_killed_prefill_ends_decodes_half(self, pair) -> None:
        prefill, decode = pair
        open_early(prefill, decode)
        prefill.kill()
        ends(decode, "peer_lost", since=time.monotonic())

    @pytest.mark.parametrize("cause", ["aborted", "too_long"])
    def test_abort_at_decode_ends_prefills_half(self, pair, cause: str) -> None:
        prefill, decode = pair
        open_early(prefill, decode)
        aborted = time.monotonic()
        decode.abort("r", cause=cause)
        ends(decode, cause, since=aborted)
        ends(prefill, "peer_aborted" if cause == "aborted" else cause, since=aborted)
        settle_empty(prefill, decode)

    def test_abort_at_prefill_makes_the_offer_void(self, pair) -> None:
        prefill, decode = pair
        open_early(prefill, decode)
        aborted = time.monotonic()
        prefill.abort("r")
        ends(decode, "peer_aborted", since=aborted)
        decode.offer("r", [8, 3])
        assert decode.status("r")["releasable"], "memory was offered to a hand-off that has ended"
        offer(decode, prefill, 8, name="next")  # the same pages
        decode.abort("next")
        ends(decode, "aborted", "next")

    @pytest.mark.parametrize("first", ["prefill", "decode"])
    def test_abort_before_the_other_half_ends_it(self, pair, first: str) -> None:
        prefill, decode = pair
        if first == "prefill":
            prefill.open("r", 7)
            prefill.abort("r")
            ends(prefill, "aborted")
            decode.open("r", 7, prefill=prefill.bootstrap)
            ends(decode, "peer_aborted", since=time.monotonic())
        else:
            decode.open("r", 7, prefill=prefill.bootstrap)
            prefill.settle(lambda stats: stats["attempts"]["parked"]["reqs"] == 1)
            decode.abort("r")
            ends(decode, "aborted")
            prefill.open("r", 7)
            ends(prefill, "peer_aborted", since=time.monotonic())

    def test_frozen_decode_ends_by_prefills_deadline(self, pair) -> None:
        prefill, decode = pair
        open_early(prefill, decode, deadline_s=3.0)
        decode.signal(signal.SIGSTOP)
        ends(prefill, "timed_out")
        decode.signal(signal.SIGCONT)
        ends(decode, "timed_out")

    def test_frozen_decode_offers_when_it_goes_on(self, pair) -> None:
        prefill, decode = pair
        open_early(prefill, decode)
        prefill.send("r", [1, 2])
        decode.signal(signal.SIGSTOP)
        time.sleep(3.0)  # silence, longer than any retry
        assert prefill.status("r")["phase"] == "waiting"
        decode.signal(signal.SIGCONT)
        decode.offer("r", [8, 3])
        decode.until("r", "done")

    def test_partition_ends_both_halves(self, pair) -> None:
        prefill, decode = pair
        with contextlib.closing(Cable(prefill)) as wire:
            prefill.open("r", 7)
            decode.open("r", 7, prefill=wire.bootstrap)
            prefill.settle(lambda stats: stats["attempts"]["matched"]["reqs"] == 1)
            wire.plugged = False
            wire.cut()
            for side in (prefill, decode):
                ends(side, "peer_lost")

    @pytest.mark.parametrize("half", ["prefill", "decode"])
    def test_half_alone_ends_after_match_timeout(self, sides, half: str) -> None:
        short = {**TIMEOUTS, "match_s": 1.0}
        prefill, decode = sides("prefill", timeouts=short), sides("decode", timeouts=short)
        if half == "prefill":
            prefill.open("r", 7)
            ends(prefill, "timed_out")
        else:
            decode.open("r", 7, prefill=prefill.bootstrap)
            ends(decode, "timed_out")

    def test_matched_halves_outlive_match_timeout(self, sides) -> None:
        short = {**TIMEOUTS, "match_s": 0.5}
        prefill, decode = sides("prefill", timeouts=short), sides("decode", timeouts=short)
        fill(prefill, 1)
        open_early(prefill, decode)
        time.sleep(3 * short["match_s"])
        prefill.send("r", [1, 2])
        decode.offer("r", [8, 3])
        decode.until("r", "done")


class TestRoomsUsedAgain:
    """Several hand-offs in one room, of one prompt or of several, at once or one after the other."""

    def test_samples_of_one_prompt_all_arrive(self, pair) -> None:
        """`n` of OpenAI's API: the samples share room and prompt, and their caches are the same."""
        prefill, decode = pair
        prefill.pages[:, 20:24] = prefill.pages[:, [20]]
        for sample in range(4):
            prefill.open(f"s{sample}", 9, rid="r", prompt="p")
            prefill.send(f"s{sample}", [20 + sample], aux_slot=sample)
        for sample in (2, 0, 3, 1):
            offer(decode, prefill, 9, name=f"s{sample}", rid="r", prompt="p", pages=[40 + sample])
        for sample in range(4):
            decode.until(f"s{sample}", "done")
            prefill.until(f"s{sample}", "done")
        assert (decode.pages[:, 40:44] == prefill.pages[:, 20:24]).all()

    def test_list_of_prompts_in_one_room_arrives(self, pair) -> None:
        """The two sides open the prompts in unlike orders; two of them are the same."""
        prefill, decode = pair
        prompts = ["one", "two", "three", "one"]
        prefill.pages[:, 23] = prefill.pages[:, 20]
        for number, prompt in enumerate(prompts):
            prefill.open(f"p{number}", 9, rid="r", prompt=prompt)
            prefill.send(f"p{number}", [20 + number])
        for number, prompt in reversed(list(enumerate(prompts))):
            offer(decode, prefill, 9, name=f"p{number}", rid="r", prompt=prompt, pages=[40 + number])
        for number in range(len(prompts)):
            decode.until(f"p{number}", "done")
        assert (decode.pages[:, 40:44] == prefill.pages[:, 20:24]).all()

    def test_equal_request_ids_match_first(self, pair) -> None:
        prefill, decode = pair
        for name in "abcd":
            prefill.open(name, 9, prompt="p")
            prefill.send(name, [20 + ord(name) - ord("a")])
        for name in "dbac":
            target = 40 + ord(name) - ord("a")
            offer(decode, prefill, 9, name=name, prompt="p", pages=[target])
            decode.until(name, "done")
        assert (decode.pages[:, 40:44] == prefill.pages[:, 20:24]).all()

    def test_abort_of_one_sample_leaves_the_others(self, pair) -> None:
        prefill, decode = pair
        for number, name in enumerate("abc"):
            open_both(prefill, decode, 9, name=name, prompt="p", pages=[40 + number])
            prefill.until(name, "ready")
        decode.abort("b")
        ends(prefill, "peer_aborted", "b")
        for name in "ac":
            prefill.send(name, [20])
            decode.until(name, "done")

    def test_room_serves_again_at_once(self, pair) -> None:
        prefill, decode = pair
        for turn in range(5):
            name, target = f"t{turn}", 10 + turn
            open_both(prefill, decode, 7, name=name, prompt="p", pages=[target])
            prefill.send(name, [30 + turn])
            decode.until(name, "done")
        assert (decode.pages[:, 10:15] == prefill.pages[:, 30:35]).all()

    @pytest.mark.parametrize("aborter", ["prefill", "decode"])
    def test_retry_after_abort_is_served(self, pair, aborter: str) -> None:
        """A router tries again in the same room, with the same id, as soon as one side has answered."""
        prefill, decode = pair
        first, second = (prefill, decode) if aborter == "prefill" else (decode, prefill)
        for turn in range(5):
            open_both(prefill, decode, 7, name=f"lost{turn}", rid="r", prompt="p", pages=[20 + turn])
            first.abort(f"lost{turn}")
            second.until(f"lost{turn}", "ended")
            open_both(prefill, decode, 7, name=f"t{turn}", rid="r", prompt="p", pages=[10 + turn])
            prefill.send(f"t{turn}", [30 + turn])
            decode.until(f"t{turn}", "done")
        assert (decode.pages[:, 10:15] == prefill.pages[:, 30:35]).all()

    def test_retraction_matches_the_longer_prompt(self, pair) -> None:
        """Decode retracts a request: abort, then open and offer for the prompt with what it has generated."""
        prefill, decode = pair
        open_both(prefill, decode, 7, name="first", rid="r", prompt="p")
        prefill.send("first", [1], last=False)
        decode.abort("first")
        decode.open("second", 7, rid="r", prefill=prefill.bootstrap, prompt="p and more")
        ends(prefill, "peer_aborted", "first")
        ends(decode, "aborted", "first")
        prefill.open("second", 7, rid="r", prompt="p and more")
        prefill.send("second", [1, 2, 4])
        decode.offer("second", [8, 3, 9])
        decode.until("second", "done")
        assert (decode.pages[:, [8, 3, 9]] == prefill.pages[:, [1, 2, 4]]).all()

    def test_late_abort_of_old_prompt_spares_the_retry(self, pair) -> None:
        prefill, decode = pair
        prefill.open("first", 7, rid="r", prompt="p")
        prefill.abort("first")
        ends(prefill, "aborted", "first")
        prefill.open("second", 7, rid="r", prompt="p and more")
        decode.open("first", 7, rid="r", prefill=prefill.bootstrap, prompt="p")
        ends(decode, "peer_aborted", "first")
        offer(decode, prefill, 7, name="second", rid="r", prompt="p and more")
        prefill.send("second", [1, 2])
        decode.until("second", "done")
