"""Says of a change that the API server and the operator accept what it may cost clients."""

from collections.abc import Iterator

from pdpool_operator.api.pools import Pool
from pdpool_operator.api.services import DisaggregatedService

WAY = "docs/change-a-model.md has a way without that"


def pool_warnings(old: Pool | None, new: Pool) -> Iterator[str]:
    """Yield a warning if instances of two models would serve side by side."""
    if old is None or not (old.spec.replicas and new.spec.replicas):
        return
    before, after = old.spec.model, new.spec.model
    if before.path != after.path:
        yield (
            f"model.path changes from {before.path} to {after.path}: until both pools have changed, requests pass "
            f"between the two models, and answers may be wrong; {WAY}"
        )
    if before.effective_name != after.effective_name:
        yield (
            f"model.servedName changes from {before.effective_name} to {after.effective_name}: until both pools have "
            f"changed, hand-offs are refused; {WAY}"
        )


def service_warnings(old: DisaggregatedService | None, new: DisaggregatedService) -> Iterator[str]:
    """Yield a warning for each side that gets another pool."""
    if old is None or old.spec.watches or new.spec.watches:
        return
    sides = (("prefill", old.spec.prefill, new.spec.prefill), ("decode", old.spec.decode, new.spec.decode))
    for side, before, after in sides:
        if before.pool_name != after.pool_name:
            yield (
                f"{side}.poolRef changes from {before.pool_name} to {after.pool_name}: for a moment, routers pair "
                f"engines of both; if these serve different models, {WAY}"
            )
