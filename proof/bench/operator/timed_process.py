"""The operator's process with one addition: each reconcile's kind and seconds go to the file PDPOOL_BENCH_TIMES."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO

from pdpool_operator import process
from pdpool_operator.observe.keys import Key
from pdpool_operator.runtime.manager import Result, work


class TimedOperator(process.Operator):
    """Writes a line for each reconcile. The histogram of the operator's metrics is too coarse for a p99."""

    times: TextIO

    def _work(self) -> Coroutine[Any, Any, None]:
        return work(self.queue, self._timed, self.metrics)

    async def _timed(self, key: Key) -> Result:
        started = time.monotonic()
        try:
            return await self.controller.reconcile(key)
        finally:
            self.times.write(f"{key.kind} {time.monotonic() - started:.6f}\n")


def main() -> None:
    """Run the operator until SIGTERM."""
    with Path(os.environ["PDPOOL_BENCH_TIMES"]).open("w", buffering=1) as times:
        TimedOperator.times = times
        # `serve` makes an Operator of this name.
        process.Operator = TimedOperator  # type: ignore[misc]
        process.main()


if __name__ == "__main__":
    main()
