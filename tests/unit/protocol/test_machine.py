"""What both machines share, and what holds for them under random events."""

import copy

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Fenced, PeerReady, Report, Tick, Write, WriteEnded
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.release import decode_may_release
from pdpool_connector.protocol.states import DecodeState

from tests.unit.protocol.scenarios import RandomDecode, RandomPrefill
from tests.unit.protocol.sides import (
    DECODE,
    PREFILL,
    TIMEOUTS,
    Decode,
    Prefill,
    names,
    writes,
)

SEEDS = range(60)


class TestRandomEvents:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_prefill_releases_nothing_in_flight_and_ends_empty(self, seed: int) -> None:
        side = Prefill()
        player = RandomPrefill(side, seed)
        flights: dict[int, set[int]] = {}
        for _ in range(120):
            before = len(side.effects)
            player.step()
            for effect in side.effects[before:]:
                if isinstance(effect, Write):
                    handle = side.machine.find(effect.attempt).handoff.request.handle
                    flights.setdefault(handle, set()).add(effect.write)
                if isinstance(effect, Report) and effect.status.releasable:
                    open_writes = {write.write for write in player.open_writes}
                    assert not flights.get(effect.handle, set()) & open_writes
        side.do(Fenced(DECODE, "kubelet"))
        side.wait(4 * TIMEOUTS.result_s)
        assert all(status.ended and status.releasable for status in side.status.values())
        assert (side.machine.rows, side.machine.next_deadline) == (0, None)
        assert not any(side.machine.queues.count(label) for label in side.machine.queues.labels)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_decode_releases_by_proof_only_and_ends_empty(self, seed: int) -> None:
        side = Decode(linked=bool(seed % 2))
        player = RandomDecode(side, seed)
        for _ in range(120):
            player.step()
            for row in [*side.machine.under_way(PREFILL), *side.machine.held()]:
                assert side.status[row.params.handle].releasable == decode_may_release(row)
                if row.offered and row.state is not DecodeState.FAILED and row.unsettled_peers:
                    assert not side.status[row.params.handle].releasable
        side.do(Fenced(PREFILL, "kubelet"))
        side.wait(100)
        assert all(status.ended and status.releasable for status in side.status.values())
        assert (side.machine.rows, side.machine.next_deadline) == (0, None)
        assert not any(side.machine.queues.count(label) for label in side.machine.queues.labels)


class TestHandle:
    def test_copy_shares_nothing_with_original(self) -> None:
        side = Prefill()
        side.request()
        side.attempt()
        other = copy.deepcopy(side)
        (write,) = writes(other.send())
        other.landed(write)
        assert names(other.wait(1)) != []
        assert side.status[1].phase == "ready"
        assert len(writes(side.send())) == 1

    def test_fault_keeps_effects_and_deadline(self, monkeypatch) -> None:
        side = Prefill()
        side.request(1, room=1, deadline_s=5.0)
        side.request(2, room=2, deadline_s=5.0)

        def fail(self, handoff) -> None:
            if handoff.room == 2:
                raise RuntimeError
            original(self, handoff)

        original = PrefillMachine._on_life_over
        monkeypatch.setattr(PrefillMachine, "_on_life_over", fail)
        side.now = 5.0
        with pytest.raises(RuntimeError):
            side.do(Tick())
        monkeypatch.setattr(PrefillMachine, "_on_life_over", original)
        side.now += TIMEOUTS.retry_max_s
        side.do(Tick())
        assert {handle: status.ended for handle, status in side.status.items()} == {1: True, 2: True}

    def test_time_never_goes_back(self) -> None:
        side = Prefill()
        side.now = 100.0
        side.request(deadline_s=5.0)
        side.now = 1.0
        side.do(Tick())
        assert side.machine.next_deadline == 105.0

    def test_fired_names_timers_of_last_tick(self) -> None:
        side = Prefill()
        side.request(deadline_s=5.0)
        side.wait(6.0)
        assert [kind for kind, _ in side.machine.fired] == ["life"]

    def test_frames_carry_version_of_pairing(self) -> None:
        side = Prefill()
        side.do(PeerReady(DECODE, 7))
        side.opened()
        (effect,) = side.opened()
        assert effect.frame.version == 7

    def test_late_write_result_of_ended_attempt_is_ignored(self) -> None:
        side = Prefill()
        assert side.do(WriteEnded(f.AttemptId(DECODE, 1), 0, "landed", 0)) == []
