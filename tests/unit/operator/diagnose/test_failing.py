"""Which instances are found failing, from what routers and connectors have counted."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.outcomes import WINDOW, OutcomeTrack, count, count_router
from pdpool_operator.diagnose.pools import diagnose, subjects_of
from pdpool_operator.diagnose.standing import Standing
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.diagnose.trials import FORGIVEN_AFTER, LONGEST_PAUSE, PAUSE, TRIAL_LASTS, advance
from pdpool_operator.observe.model import ObservedPool
from pdpool_operator.observe.samples import Tally

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pod, make_pool, make_sample, seconds

LOOK_S = 3.0
P0, P1, D0, D1, D2 = "chat-prefill-0", "chat-prefill-1", "chat-decode-0", "chat-decode-1", "chat-decode-2"


class Play:
    """Two pools, one router, and what happens to their requests. Time passes from look to look."""

    def __init__(self, prefills: int = 1, decodes: int = 2) -> None:
        self.now = T0
        self.pools = {
            Role.PREFILL: self._pool(Role.PREFILL, prefills),
            Role.DECODE: self._pool(Role.DECODE, decodes),
        }
        self.incarnations: dict[str, str] = {}
        self.queues: dict[str, dict[str, tuple[int, float | None, int | None]]] = {}
        self.at_router: dict[str, Tally] = {}
        self.at_connector: dict[str, Tally] = {}
        self.router: dict[str, OutcomeTrack] | None = None
        self.tracks: dict[str, RankTrack] = {}
        self.standings: dict[str, Standing] = {}
        self.look()

    @staticmethod
    def _pool(role: Role, replicas: int) -> ObservedPool:
        pool = make_pool(role, replicas=replicas)
        return make_observed(pool, *(make_instance(pool, index) for index in range(replicas)))

    def change(self, name: str, **changes: object) -> None:
        """Change the pod of an instance."""
        for role, pool in self.pools.items():
            instances = tuple(
                replace(i, pod=replace(i.pod, **changes)) if i.name == name and i.pod else i for i in pool.instances
            )
            self.pools[role] = replace(pool, instances=instances)

    def requests(self, *engines: str, done: int = 0, failed: int = 0) -> None:
        """The router sent requests to these engines."""
        for name in engines:
            self.at_router[name] = _plus(self.at_router.get(name, Tally()), done, failed)

    def hand_offs(self, *engines: str, done: int = 0, failed: int = 0) -> None:
        """Hand-offs have ended at the connectors of these engines."""
        for name in engines:
            self.at_connector[name] = _plus(self.at_connector.get(name, Tally()), done, failed)

    def look(self, passes_s: float = LOOK_S) -> dict[str, Verdict]:
        """Take one sample of everything, and judge."""
        self.now += seconds(passes_s)
        urls = {i.name: names.engine_url(i.pod.ip) for i in self._instances() if i.pod and i.pod.ip}
        self.router = count_router(self.router, {urls[n]: t for n, t in self.at_router.items() if n in urls}, self.now)
        for instance in self._instances():
            assert instance.pod is not None
            sample = make_sample(
                self.now,
                pod_uid=instance.pod.uid,
                incarnation=self.incarnations.get(instance.name, "a" * 32),
                queues=self.queues.get(instance.name),
            )
            assert sample.connector is not None
            ended = self.at_connector.get(instance.name, Tally())
            sample = replace(sample, connector=replace(sample.connector, ended=ended))
            self.tracks[instance.pod.uid] = follow(self.tracks.get(instance.pod.uid), sample)
        sides = {role: self._subjects(role) for role in self.pools}
        prefill, decode = sides[Role.PREFILL], sides[Role.DECODE]
        self.standings = {
            **advance(prefill, decode, self.standings, self.now),
            **advance(decode, prefill, self.standings, self.now),
        }
        return {name: diagnosis.verdict for name, diagnosis in self.diagnoses().items()}

    def diagnoses(self) -> dict[str, Diagnosis]:
        prefill, decode = self._subjects(Role.PREFILL), self._subjects(Role.DECODE)
        both = (
            *diagnose(prefill, decode, stuck_after_s=10, now=self.now),
            *diagnose(decode, prefill, stuck_after_s=10, now=self.now),
        )
        return {d.subject.name: d for d in both}

    def out(self) -> set[str]:
        """Names of the instances that routers should not list."""
        return {d.subject.name for d in self.diagnoses().values() if d.subject.out}

    def _instances(self):
        return [instance for pool in self.pools.values() for instance in pool.instances]

    def _subjects(self, role: Role) -> tuple[Subject, ...]:
        tracks = {uid: {0: track} for uid, track in self.tracks.items()}
        routers = [self.router] if self.router is not None else []
        return subjects_of(self.pools[role], tracks, routers, self.standings)


def _plus(tally: Tally, done: int, failed: int) -> Tally:
    return Tally(tally.done + done, tally.failed + failed)


def failing(play: Play) -> set[str]:
    return {name for name, verdict in play.look().items() if verdict is Verdict.FAILING}


def served_well() -> Play:
    """Both decodes served until now."""
    play = Play()
    play.requests(D0, D1, P0, done=30)
    play.look()
    return play


def hangs(play: Play, looks: int) -> None:
    """A try fails at D1 after so many looks. D0 serves meanwhile."""
    for _ in range(looks):
        play.requests(D0, P0, done=4)
        play.look()
    play.requests(D1, P0, failed=1)
    play.look(0.5)


def decode_fails(play: Play, *bad: str, requests: int = 6) -> None:
    """Requests alternate between the decodes; those at the bad ones fail, also at their prefill."""
    decodes = [i.name for i in play.pools[Role.DECODE].instances]
    prefills = [i.name for i in play.pools[Role.PREFILL].instances]
    for decode, prefill in itertools.islice(itertools.cycle(itertools.product(decodes, prefills)), requests * 2):
        if decode in bad:
            play.requests(prefill, decode, failed=1)
        else:
            play.requests(prefill, decode, done=1)


def both_decodes_wait() -> Play:
    """Requests wait at both decodes, and no hand-off finishes."""
    play = Play()
    play.queues |= {name: {"decode_transfer": (32, 20.0, 100)} for name in (D0, D1)}
    return play


class TestFault:
    def test_failing_decode_is_named_and_leaves_rotation(self) -> None:
        play = Play()
        decode_fails(play, D1)
        assert failing(play) == {D1}
        assert play.out() == {D1}
        assert "6 of its last 6 requests failed" in play.diagnoses()[D1].message
        assert D0 in play.diagnoses()[D1].message

    def test_failing_prefill_is_named_with_two_decodes(self) -> None:
        play = Play(prefills=2)
        play.requests(P1, failed=6)
        play.requests(P0, done=6)
        play.requests(D0, D1, done=3, failed=3)
        assert failing(play) == {P1}

    def test_connector_failures_count_without_router(self) -> None:
        play = Play()
        play.hand_offs(D1, failed=3)
        play.hand_offs(D0, P0, done=5)
        play.hand_offs(P0, failed=3)
        assert failing(play) == {D1}

    def test_busy_instance_that_begins_to_fail_is_found_at_once(self) -> None:
        play = Play()
        for _ in range(10):
            play.requests(D0, D1, done=100)
            play.requests(P0, done=200)
            play.look()
        decode_fails(play, D1)
        assert failing(play) == {D1}

    def test_failing_decode_with_one_client_is_found_within_thirty_seconds(self) -> None:
        """A try that fails lasts 15 s. The router repeats it at the other decode, and goes on there."""
        play, began = Play(), T0
        while D1 not in play.out():
            for _ in range(5):
                play.look()
            play.requests(D1, P0, failed=1)
            play.requests(D0, P0, done=2)
            play.look(0.1)
            assert (play.now - began).total_seconds() < 35

    def test_decode_that_served_well_until_now_is_found_when_its_first_tries_have_failed(self) -> None:
        """Three clients wait 15 s for it. The router then repeats their requests at the other decode."""
        play = Play(prefills=2)
        play.requests(D1, P0, done=30)
        play.requests(D0, P1, done=30)
        for _ in range(5):
            play.look()
        play.requests(D1, P0, failed=2)
        play.requests(D1, P1, failed=1)
        play.look()
        assert play.out() == set()
        play.requests(D0, P1, done=3)
        play.look()
        assert play.out() == {D1}

    def test_decode_where_one_try_hangs_at_a_time_is_found_at_the_second(self) -> None:
        """Each try lasts 16 s. The router sends the other requests to the less busy decode."""
        play = served_well()
        began = play.now
        for _ in (1, 2):
            assert play.out() == set()
            hangs(play, looks=5)
        assert (play.now - began).total_seconds() < 35
        assert play.out() == {D1}

    @pytest.mark.parametrize("repeated", [(1, 0), (0, 1), (1, 1)])
    def test_decode_that_holds_up_all_clients_is_found_from_one_answer(self, repeated: tuple[int, int]) -> None:
        """Three clients wait 15 s at each try. The router has repeated only one or two at the other decode."""
        play = served_well()
        for times in repeated:
            for _ in range(5):
                play.look()
            assert play.out() == set()
            play.requests(D1, P0, failed=3)
            play.requests(D0, P0, done=times)
        play.look(0.5)
        assert play.out() == {D1}

    def test_two_of_three_failing_are_both_named(self) -> None:
        play = Play(decodes=3)
        decode_fails(play, D1, D2, requests=9)
        assert failing(play) == {D1, D2}

    def test_most_requests_failing_is_failing_too(self) -> None:
        play = Play()
        play.requests(D1, failed=10, done=4)
        play.requests(D0, done=20)
        play.requests(P0, failed=10, done=24)
        assert failing(play) == {D1}

    def test_failures_spread_over_a_minute_count(self) -> None:
        play = Play()
        for _ in range(6):
            play.requests(D1, P0, failed=1)
            play.requests(D0, P0, done=2)
            play.look()
            play.look()
        assert play.out() == {D1}

    def test_router_restart_does_not_hide_failures(self) -> None:
        play = Play()
        play.requests(D1, D0, P0, done=500)
        play.look()
        play.look(61)
        play.at_router = {}
        decode_fails(play, D1)
        assert failing(play) == {D1}

    def test_rank_with_the_most_failures_counts(self) -> None:
        play = Play()
        play.hand_offs(D1, failed=3)
        play.hand_offs(D0, P0, done=5)
        play.look()
        bad = play.tracks[f"uid-of-{D1}-0"]
        good = replace(bad, ended=OutcomeTrack(Tally(9, 0), ((play.now, Tally(9, 0)),)))
        for tracks in ((good, bad), (bad, good)):
            subject = Subject("chat", Role.DECODE, 1, make_pod(), leaving=False, tracks=tracks)
            assert subject.tally("connector", T0) == Tally(0, 3)

    def test_decode_that_begins_to_fail_explains_failures_of_prefill(self) -> None:
        play = Play(prefills=2)
        play.requests(P0, D0, done=8)
        play.requests(P0, P1, D1, done=1)
        play.look()
        play.requests(P1, D1, failed=3)
        play.look()
        play.requests(P0, D1, done=1, failed=1)
        play.requests(P0, D0, done=8)
        assert failing(play) == set()
        play.requests(D1, failed=4)
        play.requests(P0, D0, done=8)
        assert failing(play) == {D1}

    def test_failures_of_one_pair_name_neither_engine(self) -> None:
        """The network between the two may be cut. A failure with another engine of the other side decides."""
        play = Play(prefills=2)
        play.requests(P0, P1, D0, D1, done=8)
        play.look()
        play.requests(P1, D1, failed=3)
        play.look()
        play.requests(P0, D0, done=4)
        play.requests(P0, D1, done=4)
        assert failing(play) == set()
        play.requests(P1, D0, failed=1)
        assert failing(play) == {P1}

    def test_innocent_prefill_is_blocked_by_it(self) -> None:
        play = Play()
        play.queues[P0] = {"prefill_bootstrap": (4, 12.0, 100)}
        decode_fails(play, D1)
        play.look()
        play.queues[P0] = {"prefill_bootstrap": (4, 12.0, 101)}
        verdicts = play.look()
        assert verdicts == {P0: Verdict.BLOCKED, D0: Verdict.IDLE, D1: Verdict.FAILING}
        assert play.diagnoses()[P0].blames == (D1,)

    def test_prefill_is_saturated_a_minute_after_it_left(self) -> None:
        play = Play()
        decode_fails(play, D1)
        play.look()
        uid = f"uid-of-{D1}-0"
        play.standings[uid] = replace(play.standings[uid], since=play.now - seconds(58), times=9)
        for moved in range(3):
            play.queues[P0] = {"prefill_bootstrap": (4, 12.0, 100 + moved)}
            verdicts = play.look()
        assert verdicts == {P0: Verdict.SATURATED, D0: Verdict.IDLE, D1: Verdict.FAILING}


class TestLookAlikes:
    @pytest.mark.parametrize(
        "happens",
        [
            pytest.param(lambda play: play.requests(D0, P0, done=50), id="idle"),
            pytest.param(lambda play: (play.requests(D0, P0, done=50), play.requests(D1, P0, done=1)), id="slow"),
            pytest.param(lambda play: (play.requests(D0, P0, done=50), play.requests(D1, P0, failed=1)), id="one bad"),
            pytest.param(
                lambda play: (play.requests(D0, P0, done=50), play.requests(D1, P0, failed=2, done=1)), id="two bad"
            ),
            pytest.param(lambda play: (play.requests(D0, P0, done=2), play.requests(D1, P0, failed=2)), id="too few"),
            pytest.param(
                lambda play: (play.requests(D0, P0, done=4, failed=1), play.requests(D1, P0, failed=2)),
                id="few, and a sibling fails too",
            ),
            pytest.param(lambda play: play.requests(D0, D1, P0, done=20, failed=15), id="both fail as often"),
            pytest.param(lambda play: play.requests(D0, D1, P0, failed=30), id="both fail everything"),
            pytest.param(
                lambda play: (play.requests(D0, P0, done=1), play.requests(D1, P0, failed=3)), id="sibling hardly used"
            ),
            pytest.param(
                lambda play: (play.requests(D0, P0, done=99), play.requests(D1, P0, done=30, failed=10)), id="a quarter"
            ),
        ],
    )
    def test_is_not_failing(self, happens: Callable[[Play], object]) -> None:
        play = Play()
        happens(play)
        assert failing(play) == set()
        assert play.out() == set()

    def test_two_failures_soon_after_a_success_are_bad_luck(self) -> None:
        play = served_well()
        hangs(play, looks=2)
        hangs(play, looks=2)
        assert play.out() == set()

    def test_two_failures_with_a_success_between_them_are_bad_luck(self) -> None:
        play = served_well()
        hangs(play, looks=5)
        play.requests(D1, P0, done=1)
        hangs(play, looks=5)
        assert play.out() == set()

    def test_two_failures_while_a_sibling_fails_too_are_bad_luck(self) -> None:
        play = served_well()
        hangs(play, looks=5)
        play.requests(D0, P0, failed=1)
        hangs(play, looks=5)
        assert play.out() == set()

    def test_decode_that_waited_for_prefill_as_its_sibling_did_is_not_failing(self) -> None:
        play = both_decodes_wait()
        play.hand_offs(D1, P0, failed=4)
        assert failing(play) == set()
        play.hand_offs(D0, P0, done=8)
        assert failing(play) == set()

    def test_decode_whose_sibling_served_just_before_both_waited_is_not_failing(self) -> None:
        play = both_decodes_wait()
        play.hand_offs(D1, P0, done=3)
        assert failing(play) == set()
        play.hand_offs(D0, P0, done=5)
        assert failing(play) == set()
        play.look(35)
        play.hand_offs(D1, P0, failed=3)
        assert failing(play) == set()

    def test_failures_of_the_sibling_count_after_the_last_own_failure(self) -> None:
        play = both_decodes_wait()
        play.hand_offs(D0, P0, done=3)
        assert failing(play) == set()
        play.look(30)
        play.hand_offs(D1, D0, P0, failed=3)
        assert failing(play) == set()

    def test_decode_that_waited_and_fails_on_while_its_sibling_serves_is_failing(self) -> None:
        play = both_decodes_wait()
        play.hand_offs(D1, P0, failed=4)
        assert failing(play) == set()
        play.hand_offs(D0, P0, done=8)
        assert failing(play) == set()
        play.hand_offs(D1, P0, failed=1)
        assert failing(play) == {D1}

    def test_starting_instance_is_not_failing(self) -> None:
        play = Play()
        play.change(D1, ready=False)
        decode_fails(play, D1)
        assert failing(play) == set()

    def test_draining_instance_is_not_failing(self) -> None:
        play = Play()
        pool = play.pools[Role.DECODE]
        leaving = replace(pool.instances[1], drain_started=T0)
        play.pools[Role.DECODE] = replace(pool, instances=(pool.instances[0], leaving))
        decode_fails(play, D1)
        assert failing(play) == set()
        assert play.out() == set()

    def test_failures_before_the_first_look_do_not_count(self) -> None:
        play = Play()
        play.router = None
        decode_fails(play, D1)
        assert failing(play) == set()

    def test_failures_of_the_address_s_former_pod_do_not_count(self) -> None:
        play = Play()
        decode_fails(play, D1)
        play.change(D1, uid="another", created_at=play.now + seconds(LOOK_S + 1))
        assert failing(play) == set()

    def test_failures_older_than_a_minute_do_not_count(self) -> None:
        play = Play()
        play.requests(D1, P0, failed=1)
        play.requests(D0, P0, done=5)
        play.look()
        play.requests(D1, P0, failed=1)
        play.requests(D0, P0, done=5)
        play.look(61)
        play.look()
        assert play.out() == set()

    def test_router_restart_is_not_a_burst_of_failures(self) -> None:
        play = Play()
        play.requests(D1, D0, P0, done=500, failed=20)
        play.look()
        play.look(61)
        play.at_router = {D0: Tally(5, 0), D1: Tally(5, 0)}
        assert failing(play) == set()


class TestNoSibling:
    def test_one_pair_that_fails_everything_is_named(self) -> None:
        play = Play(decodes=1)
        play.requests(P0, D0, failed=3)
        assert play.look() == {P0: Verdict.NOTHING_FINISHES, D0: Verdict.NOTHING_FINISHES}
        assert play.out() == set()
        assert "every prefill instance" in play.diagnoses()[D0].message

    def test_fixed_pair_that_fails_names_both_of_its_engines(self) -> None:
        play = Play(prefills=2)
        play.requests(P0, D0, done=9)
        play.requests(P1, D1, failed=5)
        verdicts = play.look()
        assert {name for name, v in verdicts.items() if v is Verdict.NOTHING_FINISHES} == {P1, D1}
        assert play.out() == set()

    def test_single_burst_is_forgotten_within_a_minute(self) -> None:
        play = Play(decodes=1)
        play.requests(P0, D0, failed=9)
        play.look()
        assert play.look(41)[D0] is Verdict.NOTHING_FINISHES
        assert play.look(5)[D0] is Verdict.IDLE

    def test_failures_that_go_on_are_named_throughout(self) -> None:
        play = Play(decodes=1)
        seen = []
        for _ in range(12):
            play.requests(P0, D0, failed=1)
            seen.append(play.look(14)[D0])
        assert set(seen[2:]) == {Verdict.NOTHING_FINISHES}

    def test_one_success_ends_it(self) -> None:
        play = Play(decodes=1)
        play.requests(P0, D0, failed=5)
        play.look()
        play.requests(P0, D0, done=1)
        assert Verdict.NOTHING_FINISHES not in play.look().values()

    def test_prefill_beside_a_failing_decode_is_not_named(self) -> None:
        play = Play(prefills=2)
        play.requests(D1, failed=6)
        play.requests(D0, done=6)
        play.requests(P0, failed=3)
        play.requests(P1, failed=3, done=6)
        verdicts = play.look()
        assert verdicts[D1] is Verdict.FAILING
        assert verdicts[P0] is Verdict.IDLE


class TestTrial:
    def failed_once(self) -> Play:
        play = Play()
        decode_fails(play, D1)
        play.look()
        assert play.out() == {D1}
        return play

    def until_trial(self, play: Play) -> float:
        """Let time pass until the instance is back in the rotation; return how long that took."""
        began = play.now
        while D1 in play.out():
            assert play.look()[D1] is Verdict.FAILING
        return (play.now - began).total_seconds()

    def test_it_is_tried_again_after_the_pause(self) -> None:
        play = self.failed_once()
        assert self.until_trial(play) == pytest.approx(PAUSE.total_seconds(), abs=LOOK_S)
        assert play.look()[D1] is Verdict.FAILING
        assert "on trial" in play.diagnoses()[D1].message

    def test_successes_end_the_trial(self) -> None:
        play = self.failed_once()
        self.until_trial(play)
        play.requests(P0, D1, done=3)
        assert play.look()[D1] is Verdict.IDLE

    def test_two_failures_end_the_trial(self) -> None:
        play = self.failed_once()
        self.until_trial(play)
        play.requests(P0, D1, failed=2)
        play.requests(P0, D0, done=1)
        play.look()
        assert play.out() == {D1}

    def test_one_failure_does_not_end_the_trial(self) -> None:
        play = self.failed_once()
        self.until_trial(play)
        play.requests(P0, D1, failed=1)
        play.requests(P0, D0, done=1)
        play.look()
        assert play.out() == set()

    def test_failures_while_all_fail_do_not_end_the_trial(self) -> None:
        play = self.failed_once()
        self.until_trial(play)
        play.requests(P0, D0, D1, failed=9)
        play.look()
        assert play.out() == set()

    def test_pauses_double_up_to_the_longest(self) -> None:
        play = self.failed_once()
        pauses = []
        for _ in range(7):
            pauses.append(self.until_trial(play))
            play.requests(P0, D1, failed=2)
            play.requests(P0, D0, done=1)
            play.look()
        expected = [min(PAUSE * 2**n, LONGEST_PAUSE).total_seconds() for n in range(7)]
        assert pauses == pytest.approx(expected, abs=LOOK_S)

    def test_long_good_service_shortens_the_pause_again(self) -> None:
        play = self.failed_once()
        self.until_trial(play)
        play.requests(P0, D1, failed=2)
        play.requests(P0, D0, done=1)
        play.look()
        self.until_trial(play)
        play.requests(P0, D1, done=3)
        play.look()
        play.look(FORGIVEN_AFTER.total_seconds())
        decode_fails(play, D1)
        play.look()
        assert self.until_trial(play) == pytest.approx(PAUSE.total_seconds(), abs=LOOK_S)

    def test_trial_without_requests_ends_well(self) -> None:
        play = self.failed_once()
        self.until_trial(play)
        play.look(TRIAL_LASTS.total_seconds())
        assert play.look()[D1] is Verdict.IDLE

    def test_old_failures_do_not_count_after_a_trial(self) -> None:
        play = Play()
        play.requests(D1, P0, failed=30)
        play.requests(D0, P0, done=60)
        play.look()
        self.until_trial(play)
        play.requests(P0, D1, done=3)
        play.look()
        assert failing(play) == set()

    def test_restarted_process_begins_anew(self) -> None:
        play = self.failed_once()
        play.incarnations[D1] = "b" * 32
        assert play.look()[D1] is Verdict.IDLE

    def test_failures_of_a_process_that_was_not_ready_do_not_count_later(self) -> None:
        play = Play()
        play.change(D1, ready=False)
        play.look()
        play.requests(D1, P0, failed=3)
        play.requests(D0, P0, done=9)
        play.look()
        play.change(D1, ready=True)
        assert failing(play) == set()

    @pytest.mark.parametrize("restarted", [False, True])
    def test_failures_that_a_sample_shows_late_do_not_count(self, restarted) -> None:
        play = Play()
        play.change(D1, ready=False)
        play.look()
        play.change(D1, ready=True)
        if restarted:
            play.incarnations[D1] = "b" * 32
            play.look()
        play.requests(D1, P0, failed=3)
        play.requests(D0, P0, done=9)
        assert failing(play) == set()

    def test_failures_after_it_is_ready_again_count(self) -> None:
        play = Play()
        play.change(D1, ready=False)
        play.look()
        play.change(D1, ready=True)
        play.look(passes_s=6)
        play.requests(D1, P0, failed=3)
        play.requests(D0, P0, done=9)
        assert failing(play) == {D1}

    def test_new_pod_begins_anew(self) -> None:
        play = self.failed_once()
        play.change(D1, uid="another", created_at=play.now)
        assert play.look()[D1] is Verdict.IDLE


def _rule(own: Tally, sibling: Tally, partner: Tally) -> bool:
    """The rule of the module's docstring, written out once more for one sibling and one innocent partner."""
    nothing = own.done == 0 and own.failed >= 3 and sibling.done >= 5 and sibling.failed <= sibling.ended * 0.25
    few = own.done == 0 and own.failed >= 2 and sibling.done >= 1 and sibling.failed == 0
    few = few and own.failed + sibling.done >= 5
    most = own.failed >= 10 and own.failed >= own.ended * 0.5 and sibling.done >= 5 and sibling.share <= 0.2 * own.share
    return nothing or few or most


COUNTS = (0, 1, 2, 3, 4, 5, 9, 10, 30)
FEWER = (0, 1, 2, 3, 4, 5, 10, 30)


def test_every_pair_of_tallies_is_judged_by_the_rule() -> None:
    for done, failed, sibling_done, sibling_failed in itertools.product(COUNTS, COUNTS, FEWER, FEWER):
        own, sibling = Tally(done, failed), Tally(sibling_done, sibling_failed)
        play = Play()
        play.requests(D1, done=done, failed=failed)
        play.requests(D0, done=sibling_done, failed=sibling_failed)
        play.requests(P0, done=done + sibling_done, failed=failed + sibling_failed)
        expected = {D1} if _rule(own, sibling, Tally()) else set()
        expected |= {D0} if _rule(sibling, own, Tally()) else set()
        play.look()
        assert play.out() == expected, (own, sibling)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([P0, P1]), st.sampled_from([D0, D1, D2]), st.booleans(), st.sampled_from([0, 3, 30])),
        max_size=60,
    )
)
def test_some_instance_of_each_side_always_stays(history: list[tuple[str, str, bool, int]]) -> None:
    play = Play(prefills=2, decodes=3)
    for prefill, decode, good, passes_s in history:
        play.requests(prefill, decode, done=5 * good, failed=5 * (not good))
        if passes_s:
            play.look(passes_s)
        assert not {P0, P1} <= play.out()
        assert not {D0, D1, D2} <= play.out()


def test_memory_of_outcomes_is_bounded() -> None:
    track = None
    for look in range(500):
        track = count(track, Tally(look, look), T0 + seconds(look * LOOK_S))
    assert track is not None
    assert len(track.recent) <= WINDOW.total_seconds() / LOOK_S + 1
    assert track.since(T0 + seconds(499 * LOOK_S) - WINDOW) == Tally(20, 20)
