"""The version that two processes use with each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate, readable


@given(st.integers(0, 9), st.integers(0, 9))
def test_highest_common_version_is_used(oldest: int, newest: int) -> None:
    common = set(range(oldest, newest + 1)) & set(range(f.VERSION_MIN, f.VERSION_MAX + 1))
    if common:
        assert negotiate(oldest, newest, we_are="prefill") == max(common) == readable(oldest, newest)
    else:
        theirs = rf"{oldest}\.\.{newest}"
        with pytest.raises(VersionMismatchError, match=rf"is 1\.\.1 at prefill and {theirs} at decode"):
            negotiate(oldest, newest, we_are="prefill")
        with pytest.raises(VersionMismatchError, match=rf"is {theirs} at prefill and 1\.\.1 at decode"):
            negotiate(oldest, newest, we_are="decode")


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted))
def test_readable_version_is_one_of_the_peer(versions) -> None:
    assert versions[0] <= readable(*versions) <= versions[1]
