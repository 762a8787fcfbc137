"""Rules that join several fields of a spec.

Each rule is written twice, side by side: in CEL for the API server, and in Python for objects that an older CRD let in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

TINY_MODEL = "tiny"
"""Path that selects a small random model of the reference engine."""
MAX_RANKS = 64
"""Ranks of one instance. Each has ports of its own, and the operator samples each."""


class Rule(NamedTuple):
    """One rule. `holds` receives the model whose schema has the rule."""

    cel: str
    message: str
    holds: Callable[[Any], bool]


POOL_RULES = (
    Rule(
        f"self.engine.type != 'Reference' || self.model.path == '{TINY_MODEL}' || self.model.path.startsWith('/')",
        "model.path must be an absolute path or the word tiny for engine.type Reference, which downloads no models",
        lambda s: s.engine.type != "Reference" or s.model.path == TINY_MODEL or s.model.path.startswith("/"),
    ),
    Rule(
        f"self.engine.type == 'Reference' || self.model.path != '{TINY_MODEL}'",
        "model.path: the random model tiny exists only in engine.type Reference; name a directory or a hub id",
        lambda s: s.engine.type == "Reference" or s.model.path != TINY_MODEL,
    ),
    Rule(
        "self.engine.type == 'SGLang' || self.transfer.connector == 'Pdpool'",
        "transfer.connector must be Pdpool unless engine.type is SGLang, which has a connector of its own",
        lambda s: s.engine.type == "SGLang" or s.transfer.connector == "Pdpool",
    ),
    Rule(
        "self.transfer.connector == 'Pdpool' || self.transfer.backend != 'Local'",
        "transfer.backend Local exists only with transfer.connector Pdpool; use NIXL or Mooncake",
        lambda s: s.transfer.connector == "Pdpool" or s.transfer.backend != "Local",
    ),
    Rule(
        "self.engine.type == 'SGLang' || self.parallelism.data == 1",
        "parallelism.data must be 1 unless engine.type is SGLang; use more replicas",
        lambda s: s.engine.type == "SGLang" or s.parallelism.data == 1,
    ),
    Rule(
        "self.engine.type == 'Reference' || self.transfer.connector != 'Pdpool' || self.parallelism.pipeline == 1",
        "parallelism.pipeline must be 1 for engine.type SGLang and VLLM with transfer.connector Pdpool; use "
        "parallelism.tensor",
        lambda s: s.engine.type == "Reference" or s.transfer.connector != "Pdpool" or s.parallelism.pipeline == 1,
    ),
    Rule(
        "!has(self.rdma) || self.rdma.mode == 'Off' || self.transfer.backend != 'Local'",
        "rdma.mode must be Off or absent for transfer.backend Local, which copies within one host",
        lambda s: s.rdma is None or s.rdma.mode == "Off" or s.transfer.backend != "Local",
    ),
    Rule(
        "!has(self.rdma) || self.rdma.mode != 'Required' || self.transfer.connector == 'Pdpool'",
        "rdma.mode Required needs transfer.connector Pdpool, because no other connector reports its transport",
        lambda s: s.rdma is None or s.rdma.mode != "Required" or s.transfer.connector == "Pdpool",
    ),
    Rule(
        f"self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data <= {MAX_RANKS}",
        f"parallelism: tensor x pipeline x data must be at most {MAX_RANKS}, because an instance is one pod",
        lambda s: s.parallelism.tensor * s.parallelism.pipeline * s.parallelism.data <= MAX_RANKS,
    ),
)

BINDING_RULES = (
    Rule(
        "has(self.poolRef) != has(self.selector)",
        "prefill and decode must each have exactly one of poolRef and selector",
        lambda s: (s.pool_ref is None) != (s.selector is None),
    ),
    Rule(
        "!has(self.selector) || size(self.selector) > 0",
        "prefill.selector and decode.selector must have at least one label, because an empty one selects every pod",
        lambda s: s.selector is None or len(s.selector) > 0,
    ),
    Rule(
        "has(self.selector) || (!has(self.engine) && !has(self.port) && !has(self.connector))",
        "engine, port and connector of prefill and decode describe selected pods; with poolRef, the pool has them",
        lambda s: s.selector is not None or (s.engine is None and s.port is None and s.connector is None),
    ),
    Rule(
        "!has(self.engine) || self.engine != 'VLLM' || (has(self.connector) && self.connector == 'Pdpool')",
        "engine VLLM of prefill and decode needs connector Pdpool, because vLLM's own connectors show no queues",
        lambda s: s.engine != "VLLM" or s.connector == "Pdpool",
    ),
)
"""Rules of one side of a service."""

FLEET_RULES = (
    Rule(
        "has(self.prefill.selector) == has(self.decode.selector)",
        "prefill and decode must both have poolRef, or both selector",
        lambda s: (s.prefill.selector is None) == (s.decode.selector is None),
    ),
)
"""Rules of a service whose pods something else runs."""

OPERATION_RULES = (
    Rule(
        "self.type == 'Purge' || !has(self.olderThanSeconds)",
        "olderThanSeconds is only for type Purge",
        lambda s: s.type == "Purge" or s.older_than_seconds is None,
    ),
    Rule(
        "(self.type == 'Fence') == has(self.node)",
        "node is required for type Fence, and only allowed there",
        lambda s: (s.type == "Fence") == (s.node is not None),
    ),
    Rule(
        "(self.type != 'Fence') == has(self.instance)",
        "instance is required for Drain, Restart and Purge, and only allowed there",
        lambda s: (s.type != "Fence") == (s.instance is not None),
    ),
)

KEEPS_ITS_KIND = {
    "rule": "has(self.prefill.selector) == has(oldSelf.prefill.selector)",
    "message": "prefill.selector and decode.selector cannot be added or removed; delete the service and create another",
}
"""Rule of an update. Such a change would leave the objects of a router behind, because a service with selectors deletes
nothing."""


def rules_schema(rules: tuple[Rule, ...], *further: dict[str, str]) -> dict[str, Any]:
    """Return the JSON-schema extra that carries the rules on an object. `further` are rules of the API server alone."""
    own = [{"rule": rule.cel, "message": rule.message} for rule in rules]
    return {"x-kubernetes-validations": [*own, *further]}


def broken(rules: tuple[Rule, ...], spec: object) -> str:
    """Return the messages of the rules that a spec breaks. Empty if it breaks none."""
    return "; ".join(rule.message for rule in rules if not rule.holds(spec))
