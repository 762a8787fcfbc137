"""Mutants: one change of one function, found in the syntax tree, so that neither layout nor comments matter."""

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pdpool_connector
from pdpool_connector import protocol

from tests.simulation.common import Machines

PACKAGE = Path(pdpool_connector.__path__[0])
SHARED = ("frames", "status", "events", "states", "timeouts")
"""Vocabulary of the protocol. World and machines must use the same classes, so these modules are never loaded twice."""


class NotTriedError(Exception):
    """The mutant could not be made or tried: its code is not in the function, or its tests do not run."""


class Mutant(NamedTuple):
    """A fault put back on purpose: in `function` of `file`, `old` becomes `new`.

    `hazard`: the entry of the catalogue of hazards that it brings back. `why`: what is wrong then. `function`: its
    qualified name, "" for the module. `old`: one expression, or statements in a row, there exactly once; a body `...`
    stands for any body. `new`: "" deletes statements. `tests`: pytest's arguments that must fail, where the simulation
    cannot see the fault; `sign`: the name of the test that must fail.
    """

    name: str
    hazard: str
    why: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    sign: str = ""


def mutated(mutant: Mutant) -> ast.Module:
    """The file's syntax tree with the fault in it. Raises NotTriedError where `old` is not there exactly once."""
    tree = ast.parse((PACKAGE / mutant.file).read_text())
    old, new = ast.parse(mutant.old).body, ast.parse(mutant.new).body
    scope = _find(tree, mutant)
    matches = 0
    for parent in ast.walk(scope):
        for name, value in ast.iter_fields(parent):
            if _is_expression(old) and _is_expression(new):
                matches += _replace_expression(parent, name, value, old[0].value, new[0].value)  # type: ignore[attr-defined]
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                matches += _replace_statements(value, old, new or [ast.Pass()])
    if matches != 1:
        raise NotTriedError(f"{mutant.name}: {matches} places in {mutant.file} {mutant.function} read {mutant.old!r}")
    return ast.fix_missing_locations(tree)


def _find(tree: ast.Module, mutant: Mutant) -> ast.AST:
    scope: Any = tree
    for name in filter(None, mutant.function.split(".")):
        scope = next((node for node in scope.body if getattr(node, "name", None) == name), None)
        if scope is None:
            raise NotTriedError(f"{mutant.name}: {mutant.file} has no {mutant.function}")
    return scope  # type: ignore[no-any-return]


def _is_expression(code: list[ast.stmt]) -> bool:
    return len(code) == 1 and isinstance(code[0], ast.Expr)


def _replace_expression(parent: ast.AST, name: str, value: Any, old: ast.expr, new: ast.expr) -> int:
    if isinstance(value, list):
        found = [at for at, item in enumerate(value) if _same(old, item)]
        for at in found:
            value[at] = new
        return len(found)
    if _same(old, value):
        setattr(parent, name, new)
        return 1
    return 0


def _replace_statements(body: list[ast.stmt], old: list[ast.stmt], new: list[ast.stmt]) -> int:
    found = [at for at in range(len(body)) if len(body) - at >= len(old) and _same(old, body[at : at + len(old)])]
    for at in reversed(found):
        body[at : at + len(old)] = new
    return len(found)


def _same(pattern: Any, node: Any) -> bool:
    """Whether the two mean the same code; a pattern's body of `...` means any."""
    if isinstance(pattern, ast.AST):
        fields = (name for name in pattern._fields if name not in ("ctx", "type_comment"))
        return type(pattern) is type(node) and all(
            _same(getattr(pattern, n, None), getattr(node, n, None)) for n in fields
        )
    if isinstance(pattern, list):
        if len(pattern) == 1 and ast.unparse(pattern[0]) == "...":
            return isinstance(node, list)
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_same, pattern, node))
    return type(pattern) is type(node) and pattern == node


@cache
def faulty_machines(mutant: Mutant) -> Machines:
    """The machines' classes with the fault in them. Raises NotTriedError where it cannot be put in."""
    name = Path(mutant.file).stem
    assert name not in SHARED, "a second copy of shared classes would be a fault of the test"
    code = compile(mutated(mutant), f"<{mutant.file} with {mutant.name}>", "exec")
    with _fresh_protocol():
        module = ModuleType(f"{protocol.__name__}.{name}")
        sys.modules[module.__name__] = module
        exec(code, module.__dict__)
        prefill = importlib.import_module(f"{protocol.__name__}.prefill")
        decode = importlib.import_module(f"{protocol.__name__}.decode")
        return Machines(prefill.PrefillMachine, decode.DecodeMachine)


@contextmanager
def _fresh_protocol() -> Iterator[None]:
    """Inside, the protocol's modules are imported again, except the shared ones; afterwards nothing has changed."""
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
