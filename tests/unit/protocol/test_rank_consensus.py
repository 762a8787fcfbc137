"""Ranks agree by key: one verdict, the root cause, and no success that some rank does not share."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pdpool_connector.protocol.rank_consensus import Key, RankStatus, agree
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

KEYS = [Key(7, 0, "a"), Key(7, 1, "a"), Key(8, 0, "b")]
A = KEYS[0]


def ok(phase: Phase) -> TransferStatus:
    return TransferStatus(phase, releasable=phase is Phase.DONE)


def failed(cause: Cause = Cause.TRANSFER_FAILED, message: str = "link down") -> TransferStatus:
    return TransferStatus(Phase.FAILED, cause, message)


statuses = st.one_of(
    st.sampled_from([phase for phase in Phase if phase is not Phase.FAILED]).map(ok),
    st.builds(failed, st.sampled_from(Cause), st.sampled_from(["x", "y"])),
)
views = st.lists(st.dictionaries(st.sampled_from(KEYS), statuses), min_size=1, max_size=5)


def test_all_done_is_done() -> None:
    assert agree([{A: ok(Phase.DONE)}] * 4) == {A: RankStatus(Phase.DONE, releasable=True)}


def test_ranks_whose_allocators_go_in_step_give_pages_back_when_the_last_of_them_may() -> None:
    free, held = replace(failed(), releasable=True), failed()
    assert [agree([{A: free}, {A: last}])[A].releasable for last in (held, free, ok(Phase.DONE))] == [False, True, True]
    assert not agree([{A: free}, {A: ok(Phase.TRANSFERRING)}])[A].releasable
    assert agree([{A: free}, {}])[A].releasable, "a rank that shows nothing has nothing to give back"
    assert not agree([{A: ok(Phase.DONE)}, {}])[A].releasable, "but then it is not over"


def test_a_rank_that_failed_fails_the_ranks_that_are_done() -> None:
    verdict = agree([{A: ok(Phase.DONE)}, {A: failed()}, {A: ok(Phase.TRANSFERRING)}])[A]
    assert verdict == RankStatus(Phase.FAILED, 1, Cause.TRANSFER_FAILED, "link down")


def test_a_rank_that_failed_fails_the_request_though_others_have_dropped_it_or_never_had_it() -> None:
    assert agree([{}, {A: failed()}, {}])[A] == RankStatus(Phase.FAILED, 1, Cause.TRANSFER_FAILED, "link down", (0, 2))


def test_a_rank_that_does_not_show_a_request_keeps_it_from_being_done() -> None:
    assert agree([{A: ok(Phase.DONE)}, {}])[A] == RankStatus(Phase.WAITING, absent=(1,))


def test_requests_are_matched_by_key_whatever_the_order_of_a_view() -> None:
    first = {KEYS[0]: ok(Phase.DONE), KEYS[1]: failed(), KEYS[2]: ok(Phase.READY)}
    second = {KEYS[2]: ok(Phase.DONE), KEYS[1]: ok(Phase.DONE), KEYS[0]: ok(Phase.DONE)}
    phases = {key: verdict.phase for key, verdict in agree([first, second]).items()}
    assert phases == {KEYS[0]: Phase.DONE, KEYS[1]: Phase.FAILED, KEYS[2]: Phase.READY}


def test_what_a_rank_was_told_does_not_hide_what_another_found() -> None:
    verdict = agree([{A: failed(Cause.PEER_ABORTED, "told")}, {A: failed(Cause.TRANSFER_FAILED, "no route")}])[A]
    assert (verdict.rank, verdict.cause, verdict.message) == (1, Cause.TRANSFER_FAILED, "no route")


def test_no_hand_offs_no_verdicts() -> None:
    assert agree([{}, {}]) == {}
    assert agree([]) == {}


@given(views)
def test_every_request_that_is_shown_gets_one_verdict(views) -> None:
    assert set(agree(views)) == {key for view in views for key in view}


@given(views)
def test_done_only_if_every_rank_is_done_and_failed_exactly_if_one_failed(views) -> None:
    for key, verdict in agree(views).items():
        shown = [view.get(key) for view in views]
        assert (verdict.phase is Phase.DONE) == all(
            status is not None and status.phase is Phase.DONE for status in shown
        )
        assert (verdict.phase is Phase.FAILED) == any(
            status is not None and status.phase is Phase.FAILED for status in shown
        )
        assert verdict.absent == tuple(rank for rank, status in enumerate(shown) if status is None)


@given(views)
def test_a_failure_names_a_rank_that_failed_so(views) -> None:
    for key, verdict in agree(views).items():
        if verdict.phase is Phase.FAILED:
            shown = views[verdict.rank][key]
            assert (shown.phase, shown.cause, shown.message) == (Phase.FAILED, verdict.cause, verdict.message)
        else:
            assert (verdict.rank, verdict.cause, verdict.message) == (None, None, "")


@given(views, st.randoms())
def test_the_order_of_ranks_does_not_matter(views, random) -> None:
    shuffled = random.sample(views, len(views))

    def outcome(of):
        return {key: (v.phase, v.cause, v.message, len(v.absent)) for key, v in agree(of).items()}

    assert outcome(shuffled) == outcome(views)


@given(views, st.sampled_from(KEYS))
def test_one_request_says_nothing_about_another(views, key) -> None:
    alone = agree([{key: view[key]} if key in view else {} for view in views])
    assert alone.get(key) == agree(views).get(key)


@given(views)
def test_a_failure_is_never_taken_back_by_a_rank_that_goes_on(views) -> None:
    later = [{key: s if s.phase is Phase.FAILED else ok(Phase.DONE) for key, s in view.items()} for view in views]
    for key, verdict in agree(views).items():
        if verdict.phase is Phase.FAILED:
            assert agree(later)[key] == verdict


@given(st.lists(st.sampled_from(Cause), min_size=1, max_size=4))
def test_every_cause_has_its_place(causes) -> None:
    verdict = agree([{A: failed(cause)} for cause in causes])[A]
    assert verdict.cause in causes
