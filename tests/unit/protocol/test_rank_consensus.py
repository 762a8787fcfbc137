"""Ranks agree by key: one status, the root cause, and success only where all ranks have it."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pdpool_connector.protocol.rank_consensus import Key, RankStatus, agree
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

KEYS = [Key(7, "a"), Key(7, "b"), Key(8, "b")]
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


def test_common_release_waits_for_last_rank() -> None:
    free, held = replace(failed(), releasable=True), failed()
    assert [agree([{A: free}, {A: last}])[A].releasable for last in (held, free, ok(Phase.DONE))] == [False, True, True]
    assert not agree([{A: free}, {A: ok(Phase.TRANSFERRING)}])[A].releasable
    assert agree([{A: free}, {}])[A].releasable, "a rank that shows nothing has nothing to give back"
    assert not agree([{A: ok(Phase.DONE)}, {}])[A].releasable, "but then it is not over"


def test_failed_rank_fails_ranks_that_are_done() -> None:
    status = agree([{A: ok(Phase.DONE)}, {A: failed()}, {A: ok(Phase.TRANSFERRING)}])[A]
    assert status == RankStatus(Phase.FAILED, 1, Cause.TRANSFER_FAILED, "link down")


def test_failed_rank_counts_though_others_are_absent() -> None:
    assert agree([{}, {A: failed()}, {}])[A] == RankStatus(Phase.FAILED, 1, Cause.TRANSFER_FAILED, "link down", (0, 2))


def test_absent_rank_prevents_done() -> None:
    assert agree([{A: ok(Phase.DONE)}, {}])[A] == RankStatus(Phase.WAITING, absent=(1,))


def test_requests_are_matched_by_key() -> None:
    first = {KEYS[0]: ok(Phase.DONE), KEYS[1]: failed(), KEYS[2]: ok(Phase.READY)}
    second = {KEYS[2]: ok(Phase.DONE), KEYS[1]: ok(Phase.DONE), KEYS[0]: ok(Phase.DONE)}
    phases = {key: status.phase for key, status in agree([first, second]).items()}
    assert phases == {KEYS[0]: Phase.DONE, KEYS[1]: Phase.FAILED, KEYS[2]: Phase.READY}


def test_found_cause_goes_before_received_cause() -> None:
    status = agree([{A: failed(Cause.PEER_ABORTED, "received")}, {A: failed(Cause.TRANSFER_FAILED, "no route")}])[A]
    assert (status.rank, status.cause, status.message) == (1, Cause.TRANSFER_FAILED, "no route")


def test_no_views_give_no_status() -> None:
    assert agree([{}, {}]) == {}
    assert agree([]) == {}


@given(views)
def test_every_shown_request_gets_one_status(views) -> None:
    assert set(agree(views)) == {key for view in views for key in view}


@given(views)
def test_done_needs_all_and_failed_needs_one(views) -> None:
    for key, status in agree(views).items():
        shown = [view.get(key) for view in views]
        assert (status.phase is Phase.DONE) == all(one is not None and one.phase is Phase.DONE for one in shown)
        assert (status.phase is Phase.FAILED) == any(one is not None and one.phase is Phase.FAILED for one in shown)
        assert status.absent == tuple(rank for rank, status in enumerate(shown) if status is None)


@given(views)
def test_failure_names_rank_that_failed(views) -> None:
    for key, status in agree(views).items():
        if status.phase is Phase.FAILED:
            shown = views[status.rank][key]
            assert (shown.phase, shown.cause, shown.message) == (Phase.FAILED, status.cause, status.message)
        else:
            assert (status.rank, status.cause, status.message) == (None, None, "")


@given(views, st.randoms())
def test_order_of_ranks_does_not_matter(views, random) -> None:
    shuffled = random.sample(views, len(views))

    def outcome(of):
        return {key: (v.phase, v.cause, v.message, len(v.absent)) for key, v in agree(of).items()}

    assert outcome(shuffled) == outcome(views)


@given(views, st.sampled_from(KEYS))
def test_requests_do_not_affect_each_other(views, key) -> None:
    alone = agree([{key: view[key]} if key in view else {} for view in views])
    assert alone.get(key) == agree(views).get(key)


@given(views)
def test_failure_stays_when_other_ranks_go_on(views) -> None:
    later = [{key: s if s.phase is Phase.FAILED else ok(Phase.DONE) for key, s in view.items()} for view in views]
    for key, status in agree(views).items():
        if status.phase is Phase.FAILED:
            assert agree(later)[key] == status


@given(st.lists(st.sampled_from(Cause), min_size=1, max_size=4))
def test_every_cause_has_a_rank(causes) -> None:
    status = agree([{A: failed(cause)} for cause in causes])[A]
    assert status.cause in causes
