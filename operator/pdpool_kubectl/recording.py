"""The file of `record`: what an operator would have observed, look by look, without secrets.

Kept of an object are its names, labels, pdpool's annotations, owners, the numbers that diagnosis reads, and a pod's
status. Pod templates, environment and other annotations are left out. Reports of connectors and schedulers are kept
whole: they hold counters and ids, and no prompts. Of `/metrics`, only the lines that diagnosis reads are kept.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pdpool_operator.api import names
from pdpool_operator.runtime.resources import Object

from .recording_shape import first_fault

FORMAT = "pdpool-recording/2"
READABLE = (FORMAT, "pdpool-recording/1")
"""Version 1 has no pods of services with selectors, and no `/metrics`."""
MAX_BYTES = 512 << 20


class RecordingError(Exception):
    """A file is no recording that this version can read."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What one pod answered in one look.

    Each answer is `{"body": JSON}`, `{"text": "..."}` of `/metrics`, or `{"error": "..."}`.
    """

    asked_at: str
    at: str
    connectors: list[Object]
    """By rank. Empty if the engine has no connector of pdpool."""
    engine: Object
    metrics: Object | None = None
    """None if they were not asked for."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Why questions were not answered."""
        every = (*self.connectors, self.engine, self.metrics or {})
        return tuple(str(one["error"]) for one in every if "error" in one)


@dataclass(frozen=True, slots=True)
class Look:
    """All that was read at one time."""

    at: str
    services: list[Object]
    pools: list[Object]
    stateful_sets: list[Object]
    pods: list[Object]
    answers: Mapping[str, Answers]
    """By UID of the pod."""


def dump(namespace: str, looks: list[Look]) -> str:
    """Return the text of a recording."""
    return json.dumps({"format": FORMAT, "namespace": namespace, "looks": [asdict(look) for look in looks]})


def load(path: Path) -> tuple[Look, ...]:
    """Read a recording.

    Raises:
        RecordingError: the file is no recording that this version can read.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordingError(f"{path}: larger than {MAX_BYTES >> 20} MiB")
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: not complete JSON: {error}") from error
    found = body.get("format") if isinstance(body, dict) else None
    if found not in READABLE:
        raise RecordingError(f"{path}: the field format must be {' or '.join(map(repr, READABLE))}, not {found!r}")
    if fault := first_fault(body):
        raise RecordingError(f"{path}: {fault}")
    return tuple(
        Look(**look | {"answers": {uid: Answers(**one) for uid, one in look["answers"].items()}})
        for look in body["looks"]
    )


def kept(body: Object, spec: Object, *, status: bool = False) -> Object:
    """Return an object without what may be secret. `spec` is what is kept of its spec."""
    meta = body["metadata"]
    ours = {key: value for key, value in (meta.get("annotations") or {}).items() if key.startswith(f"{names.GROUP}/")}
    fields = ("name", "namespace", "uid", "generation", "labels", "ownerReferences", "creationTimestamp")
    metadata = {key: meta[key] for key in (*fields, "deletionTimestamp") if key in meta} | {"annotations": ours}
    whole = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata, "spec": spec}
    return whole | ({"status": body.get("status") or {}} if status else {})
