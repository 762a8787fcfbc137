"""Choosing a data plane."""

import pytest
from pdpool_connector.engines import open_engine


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(
        ValueError, match="backend is 'carrier pigeon', must be one of nixl, mooncake, mori, ascend, local"
    ):
        open_engine("carrier pigeon", "me", target=True)
