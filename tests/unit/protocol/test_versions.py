"""The version that two processes use with each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate


@given(st.integers(0, 9), st.integers(0, 9))
def test_highest_common_version_is_used(oldest: int, newest: int) -> None:
    common = set(range(oldest, newest + 1)) & set(range(f.VERSION_MIN, f.VERSION_MAX + 1))
    if common:
        assert negotiate(oldest, newest) == max(common)
    else:
        with pytest.raises(VersionMismatchError, match=rf"is {oldest}\.\.{newest} at the peer and 1\.\.1 here"):
            negotiate(oldest, newest)
