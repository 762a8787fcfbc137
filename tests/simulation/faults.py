"""Loads the protocol with a fault put back: one line of one module replaced, everything else as it is."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pdpool_connector import protocol

from tests.simulation.kinds import Direction, Machines

SHARED = ("frames", "status", "events", "states", "timeouts")
"""Vocabulary: the world and the machines must mean the same classes by it, so it is never loaded twice."""


class Fault(NamedTuple):
    """`line` of `module` becomes `fault`, which brings the catalogue's `hazard` back; `why` says what then is wrong."""

    name: str
    hazard: str
    why: str
    module: str
    line: str
    fault: str

    @property
    def direction(self) -> Direction:
        """The one that is played with it: what both share is played in WRITE."""
        return "read" if self.module.endswith("_read") else "write"


@cache
def faulty_machines(fault: Fault) -> Machines:
    """All machines' classes with the fault in them. Raises LookupError when the line is not there exactly once."""
    assert fault.module not in SHARED, "a second copy of shared classes would be a fault of the test"
    source = Path(protocol.__path__[0], f"{fault.module}.py").read_text()
    if source.count(fault.line) != 1:
        raise LookupError(f"{fault.name}: {source.count(fault.line)} places in {fault.module}.py read {fault.line!r}")
    with _fresh_protocol():
        module = ModuleType(f"{protocol.__name__}.{fault.module}")
        sys.modules[module.__name__] = module
        text = source.replace(fault.line, fault.fault)
        exec(compile(text, f"<{fault.module}.py with {fault.name}>", "exec"), module.__dict__)
        here = {
            name: importlib.import_module(f"{protocol.__name__}.{name}")
            for name in ("prefill", "decode", "prefill_read", "decode_read")
        }
        return {
            "write": (here["prefill"].PrefillMachine, here["decode"].DecodeMachine),
            "read": (here["prefill_read"].PrefillReadMachine, here["decode_read"].DecodeReadMachine),
        }


@contextmanager
def _fresh_protocol() -> Iterator[None]:
    """Inside, the protocol's modules are imported anew, but for what is shared; outside, nothing has changed."""
    stem = f"{protocol.__name__}."
    before = {name: module for name, module in sys.modules.items() if name.startswith(stem)}
    attributes = dict(vars(protocol))
    for name in before:
        if name.removeprefix(stem) not in SHARED:
            del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(stem)]:
            del sys.modules[name]
        sys.modules.update(before)
        vars(protocol).update(attributes)
