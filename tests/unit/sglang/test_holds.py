"""Pages and aux rows of failed requests wait for proof; all ranks release in the same turn."""

from types import SimpleNamespace

from pdpool_sglang.holds import Hold, Holds


def hold(releasable, freed, name, request=None):
    return Hold(SimpleNamespace(releasable=releasable), lambda: freed.append(name), request)


def alone(flags):
    return flags


class TestRelease:
    def test_unsafe_memory_stays(self):
        freed, holds = [], Holds()
        holds.add(hold(False, freed, "a", "request a"))
        holds.add(hold(True, freed, "b", "request b"))
        holds.release(alone)
        assert freed == ["b"]
        assert holds.requests == ["request a"]

    def test_other_rank_delays_ours(self):
        freed, holds = [], Holds()
        holds.add(hold(True, freed, "a"))
        holds.release(lambda _flags: [0])
        assert not freed
        holds.release(lambda _flags: [1])
        assert freed == ["a"]
        assert not holds

    def test_nothing_held_asks_nobody(self):
        asked = []
        Holds().release(lambda flags: asked.append(flags) or flags)
        assert not asked

    def test_aux_rows_have_no_owner(self):
        holds = Holds()
        holds.add(hold(False, [], "row"))
        assert (len(holds), holds.requests) == (1, [])
