"""Results of runs on disk, one JSON line for each, so that an interrupted session can be continued."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import TypeAdapter

from dev.paths import CHECKOUT

SOURCES: Final = ("operator", "connector", "charts", "crds", "images", "proof/cluster", "tests/cluster")
ENDINGS: Final = frozenset({".py", ".yaml", ".tpl", ".json", ".lock"})
FINISHED: Final = {"finished": True}

Run = TypeVar("Run")
"""A dataclass that JSON can hold."""


def sources_digest(package: str) -> str:
    """Return a digest of all files that decide the results.

    Args:
        package: Folder of the scenarios, such as `proof/drills`.
    """
    total = hashlib.sha256()
    for source in (*SOURCES, package):
        for file in sorted((CHECKOUT / source).rglob("*")):
            if file.suffix in ENDINGS and "test_" not in file.name:
                total.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


class Results(Generic[Run]):
    """Runs that are done. Continues those of the same code in the file, unless that session had finished.

    Args:
        kind: Type of a run.
        path: JSON lines.
        digest: code of this session.
        fresh: ignore earlier runs.
    """

    def __init__(self, kind: type[Run], path: Path, digest: str, *, fresh: bool = False) -> None:
        self._kind: TypeAdapter[Run] = TypeAdapter(kind)
        self._path = path
        self._digest = digest
        self.runs: list[Run] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            self._take(line)
        if fresh and self.runs:
            self.finish()
            self.runs.clear()

    def _take(self, line: str) -> None:
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            return  # A killed session left half a line.
        if found == FINISHED:
            self.runs.clear()
        elif found.pop("digest", None) == self._digest:
            self.runs.append(self._kind.validate_python(found))

    def add(self, run: Run) -> None:
        """Append a run."""
        self.runs.append(run)
        self._append(self._kind.dump_python(run, mode="json") | {"digest": self._digest})

    def finish(self) -> None:
        """Mark the session as finished: the next one starts from the beginning."""
        self._append(FINISHED)

    def _append(self, body: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A line that a killed session left half written must not swallow this one.
        cut = self._path.exists() and not self._path.read_bytes().endswith(b"\n") and self._path.stat().st_size
        with self._path.open("a") as file:
            file.write(("\n" if cut else "") + json.dumps(body) + "\n")
