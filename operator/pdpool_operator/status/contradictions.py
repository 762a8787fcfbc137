"""Finds where the specs of a service's two pools contradict each other, so that no request can pass between them."""

from collections.abc import Iterator

from ..api.engine import ModelSpec
from ..api.pools import Pool
from ..api.rules import TINY_MODEL
from ..engines import engine_of


def contradictions(prefill: Pool, decode: Pool) -> tuple[str, ...]:
    """Return each contradiction as text: the field, and both pools with their values.

    The same model may have different paths in the two pools. But the random model `tiny` never equals a model with
    weights.
    """
    return tuple(
        f"{field} is {ours} in {_named(prefill)}, but {theirs} in {_named(decode)}"
        for field, ours, theirs in _differences(prefill, decode)
    )


def _differences(prefill: Pool, decode: Pool) -> Iterator[tuple[str, str, str]]:
    ours, theirs = prefill.spec, decode.spec
    if ours.model.effective_name != theirs.model.effective_name:
        yield "model.servedName", _name_and_source(ours.model), _name_and_source(theirs.model)
    if (ours.model.path == TINY_MODEL) is not (theirs.model.path == TINY_MODEL):
        yield "model.path", ours.model.path, theirs.model.path
    if ours.engine.type is not theirs.engine.type:
        yield "engine.type", str(ours.engine.type), str(theirs.engine.type)
    if ours.transfer.connector is not theirs.transfer.connector:
        yield "transfer.connector", str(ours.transfer.connector), str(theirs.transfer.connector)
    if ours.transfer.backend is not theirs.transfer.backend:
        yield "transfer.backend", str(ours.transfer.backend), str(theirs.transfer.backend)
    yield from _flags(prefill, decode)


def _flags(prefill: Pool, decode: Pool) -> Iterator[tuple[str, str, str]]:
    """Yield the flags of the templates that both sides set, and must share. Other engines have other flags."""
    if prefill.spec.engine.type is decode.spec.engine.type:
        engine = engine_of(prefill.spec.engine.type)
        ours, theirs = engine.shared_flags(prefill), engine.shared_flags(decode)
        for flag in sorted(ours.keys() & theirs.keys()):
            if ours[flag] != theirs[flag]:
                yield f"template args {flag}", ours[flag], theirs[flag]


def _name_and_source(model: ModelSpec) -> str:
    return model.effective_name if model.served_name else f"{model.effective_name} (from model.path {model.path})"


def _named(pool: Pool) -> str:
    return f"{pool.kind} {pool.metadata.name}"
