"""What ends before the Lease is released."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from pdpool_operator import process
from pdpool_operator.observe.keys import Key
from pdpool_operator.process import Operator
from pdpool_operator.runtime.manager import Result, work
from pdpool_operator.runtime.queue import WorkQueue

from .metrics import idle_metrics

KEYS = [Key("PrefillPool", "llm", name) for name in ("in-hand", "waiting")]


class Leader:
    """One worker that writes until it is released, another key that waits, and a Lease."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue: WorkQueue[Key] = WorkQueue(time.monotonic)
        self.elector = SimpleNamespace(release=self.release)
        self.writing, self.let_go = asyncio.Event(), asyncio.Event()
        for key in KEYS:
            self.queue.add(key)
        metrics = idle_metrics()
        self.worker = asyncio.create_task(work(self.queue, self.reconcile, metrics))

    async def reconcile(self, key: Key) -> Result:
        self.writing.set()
        await self.let_go.wait()
        self.log.append(f"wrote {key.name}")
        return Result()

    async def release(self) -> None:
        self.log.append("released")

    async def give_up(self) -> None:
        await Operator._give_up(self, [self.worker], [self.worker])


async def test_what_a_worker_has_in_hand_is_finished_before_the_lease_is_given_back_and_nothing_else_is_begun():
    leader = Leader()
    await leader.writing.wait()
    giving_up = asyncio.create_task(leader.give_up())
    for _ in range(20):
        await asyncio.sleep(0)
    assert leader.log == []
    leader.let_go.set()
    await giving_up
    assert leader.log == ["wrote in-hand", "released"]


async def test_the_lease_is_left_to_run_out_when_a_write_had_to_be_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "STOP_WITHIN_S", 0.01)
    leader = Leader()
    await leader.writing.wait()
    await leader.give_up()
    assert leader.worker.cancelled()
    assert leader.log == []


async def test_workers_that_wait_for_a_key_hold_up_nothing():
    leader = Leader()
    leader.let_go.set()
    for _ in range(20):
        await asyncio.sleep(0)
    await leader.give_up()
    assert leader.log == ["wrote in-hand", "wrote waiting", "released"]
