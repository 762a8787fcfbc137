import hypothesis.strategies as st
from hypothesis import given, settings
from pdpool_operator.api import names
from pdpool_operator.api.names import Role

POOL_NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,12}[a-z0-9])?", fullmatch=True) | st.sampled_from(
    ["a", "a-prefill", "a-prefill-0", "a-decode-0", "a-router", "prefill", "a-0"]
)
POOLS = st.tuples(POOL_NAMES, st.sampled_from([Role.PREFILL, Role.DECODE]), st.integers(0, 255))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(POOLS, POOLS)
def test_names_of_different_instances_never_collide(one: tuple[str, Role, int], other: tuple[str, Role, int]) -> None:
    assert (names.instance(*one) == names.instance(*other)) == (one == other)
    assert (names.pool_workload(*one[:2]) == names.pool_workload(*other[:2])) == (one[:2] == other[:2])


@settings(max_examples=300, derandomize=True, deadline=None)
@given(POOLS, POOL_NAMES)
def test_names_of_pools_and_services_never_collide(pool: tuple[str, Role, int], service: str) -> None:
    shared = {names.pool_workload(*pool[:2])}
    assert not shared & {names.router(service), names.KEYS_SECRET}


def test_addresses_of_both_families_become_urls() -> None:
    assert names.engine_url("10.0.0.1") == "http://10.0.0.1:30000"
    assert names.engine_url("fd00::1") == "http://[fd00::1]:30000"
    assert names.admin_url("10.0.0.1", rank=2) == "http://10.0.0.1:9402"


def test_selectors_are_written_in_one_order() -> None:
    assert names.selector_string({"b": "2", "a": "1"}) == "a=1,b=2"
