"""pdpool's connector: moves the KV cache of a request from a prefill engine to a decode engine."""

from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.stats import ConnectorStats

__all__ = ["Cause", "ConnectorConfig", "ConnectorStats", "Phase", "TransferStatus"]
