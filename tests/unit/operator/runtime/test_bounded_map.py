"""A mapping that forgets what was not set for longest."""

from pdpool_operator.runtime.bounded_map import BoundedMap


def test_entry_not_set_for_longest_goes_first() -> None:
    table = BoundedMap[str, int](2)
    table["a"] = 1
    table["b"] = 2
    table["a"] = 3
    table["c"] = 4
    assert dict(table) == {"a": 3, "c": 4}


def test_default_is_bounded_too() -> None:
    table = BoundedMap[str, list[int]](2)
    for name in "abc":
        table.setdefault(name, []).append(1)
    assert list(table) == ["b", "c"]
