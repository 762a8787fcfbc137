"""Text that may be shown: never a part of a stop string."""

import pytest
from pdpool_reference.scheduler_text import TextStream


class Letters:
    """Each token is one character."""

    def add(self, token):
        return chr(token)

    def flush(self):
        return ""


def run(text, stops):
    stream, shown = TextStream(Letters(), stops), []
    for letter in text:
        piece, stop = stream.add(ord(letter))
        shown.append(piece)
        if stop is not None:
            return shown, stop
    return [*shown, stream.flush()], None


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stop"),
    [
        ("hello", (), "hello", None),
        ("hello", ("ll",), "he", "ll"),
        ("aaab", ("aab",), "a", "aab"),
        ("heaven", ("heavy",), "heaven", None),
        ("one two", ("two", "wo"), "one ", "two"),
        ("abcd", ("cd", "bcd"), "a", "bcd"),
        ("stop", ("stop",), "", "stop"),
    ],
)
def test_text_ends_before_the_earliest_stop_string(text, stops, shown, stop):
    pieces, found = run(text, stops)
    assert "".join(pieces) == shown
    assert found == stop


def test_possible_stop_string_is_kept_back():
    pieces, _ = run("heaven", ("heavy",))
    assert pieces == ["", "", "", "", "heave", "n", ""]
