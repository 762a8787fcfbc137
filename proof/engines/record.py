"""Results of a run on disk, so that an interrupted run can be continued, and the last line."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dev.paths import CHECKOUT
from dev.shell import write_text

Step = dict[str, Any]

SOURCES: Final = ("connector", "proof/engines", "requirements/engines.txt")
NOT_RUN: Final = "not_run"


def sources_digest() -> str:
    """Return a digest of all code that decides the results."""
    total = hashlib.sha256()
    for source in SOURCES:
        path = CHECKOUT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            total.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


class Record:
    """Steps that are done. Continues the file's run if that is unfinished and of the same code.

    Args:
        path: JSON file.
        digest: code and settings of this run.
        fresh: start a new run in any case.
    """

    def __init__(self, path: Path, digest: str, *, fresh: bool = False) -> None:
        self.path = path
        self._data: dict[str, Any] = {"digest": digest, "finished": False, "steps": {}, "answers": {}}
        if path.exists() and not fresh:
            found = json.loads(path.read_text())
            if found["digest"] == digest and not found["finished"]:
                self._data = found

    @property
    def steps(self) -> Mapping[str, Step]:
        found: Mapping[str, Step] = self._data["steps"]
        return found

    @property
    def answers(self) -> dict[str, Any]:
        """The unified server's answers, by request."""
        found: dict[str, Any] = self._data["answers"]
        return found

    async def step(self, name: str, run: Callable[[], Awaitable[Step]]) -> Step:
        """Run a step, unless it is done."""
        if name not in self._data["steps"]:
            self._data["steps"][name] = await run()
            self.save()
        found: Step = self._data["steps"][name]
        return found

    def save(self) -> None:
        write_text(self.path, json.dumps(self._data))

    def finish(self) -> None:
        """Mark the run as finished: the next one starts from the beginning."""
        self._data["finished"] = True
        self.save()


def summary(steps: Mapping[str, Step]) -> tuple[bool, str]:
    """Return whether all that ran was right, and the last line. What did not run is named as such."""

    def total(part: str, key: str) -> int:
        return sum(step.get(key, 0) for name, step in steps.items() if name.startswith(part))

    def ran(part: str) -> bool:
        return any(name.startswith(part) for name in steps)

    identical, asked = total("tokens", "identical"), total("tokens", "asked")
    aborts, wrong = total("aborts", "aborts"), total("", "wrong")
    hung, leftovers = total("", "hung"), total("", "leftovers")
    recovered, faults = total("faults", "recovered"), total("faults", "faults")
    figures = steps.get("bench ratios", {})
    fields = {
        "sglang_tokens": f"{identical}/{asked}" if ran("tokens") else NOT_RUN,
        "aborts": aborts if ran("aborts") else NOT_RUN,
        "hung": hung if ran("aborts") or ran("faults") else NOT_RUN,
        "leftovers": leftovers if ran("aborts") or ran("faults") else NOT_RUN,
        "recovered": f"{recovered}/{faults}" if ran("faults") else NOT_RUN,
        "ttft_ratio": f"{figures['ttft_ratio']:.3f}" if figures else NOT_RUN,
        "rps_ratio": f"{figures['rps_ratio']:.3f}" if figures else NOT_RUN,
        "idle_cpu": f"{figures['idle_cpu']:.1f}%" if figures else NOT_RUN,
    }
    if wrong:
        fields["wrong"] = wrong
    fine = bool(steps) and identical == asked and recovered == faults and not (hung or leftovers or wrong)
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    return fine, f"engines {'ok' if fine else 'failed'}: {words}"
