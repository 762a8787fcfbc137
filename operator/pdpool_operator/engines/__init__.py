"""Engine types: all that the operator knows about one engine stands in one module here.

Builders and the sampler ask `engine_of` and know no engine by name. To add a type, add a module and a line in
`ENGINES`.
"""

from collections.abc import Mapping

from ..api.engine import EngineType
from .base import Engine
from .reference import Reference
from .sglang import SGLang
from .vllm import VLLM

ENGINES: Mapping[EngineType, Engine] = {engine.type: engine for engine in (Reference(), SGLang(), VLLM())}


def engine_of(kind: EngineType) -> Engine:
    """Return what the operator knows about an engine type."""
    return ENGINES[kind]
