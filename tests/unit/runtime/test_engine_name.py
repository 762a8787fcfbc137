"""The engine's name and version, which the status of a pool shows."""

import pytest
from pdpool_connector import ConnectorConfig


@pytest.mark.parametrize("engine", ["", "sglang 0.5.23", "vllm 0.33.0+cu13", "x" * 64])
def test_usable_engine_name_is_taken(engine):
    assert ConnectorConfig("127.0.0.1", engine=engine).engine == engine


@pytest.mark.parametrize("engine", ["x" * 65, "line\nbreak", "ü", None, 1])
def test_unusable_engine_name_is_refused(engine):
    with pytest.raises(ValueError, match=r"engine="):
        ConnectorConfig("127.0.0.1", engine=engine)
