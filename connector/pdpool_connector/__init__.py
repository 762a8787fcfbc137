"""pdpool's connector: moves the KV cache of a request from a prefill engine to a decode engine."""

from pdpool_connector.backends.base import BackendError
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, LayerHeads, LayoutError, Region
from pdpool_connector.layout.pairing import ModelShard, shard_model
from pdpool_connector.layout.state_pool import StateCut, StatePool
from pdpool_connector.layout.tensors import kv_split
from pdpool_connector.protocol.fence import (
    ConnectionsEnded,
    ContainerTerminated,
    InsufficientProofError,
    NodeOutOfService,
    NodeRebooted,
    ProcessExited,
)
from pdpool_connector.protocol.http_errors import Answer, answer_for, client_answer
from pdpool_connector.protocol.rank_consensus import Key, RankStatus, agree
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.decode import DecodeConnector
from pdpool_connector.runtime.environment import engine_variables
from pdpool_connector.runtime.prefill import PrefillConnector
from pdpool_connector.runtime.prompt_digest import prompt_digest
from pdpool_connector.runtime.stats import ConnectorStats
from pdpool_connector.runtime.transfer import DecodeTransfer, HandoffError, PrefillTransfer
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.curve import CurveKey, read_keys
from pdpool_connector.transport.tokens import TokenVerifier

__all__ = [
    "Address",
    "Answer",
    "BackendError",
    "Cause",
    "ConnectionsEnded",
    "ConnectorConfig",
    "ConnectorStats",
    "ContainerTerminated",
    "CurveKey",
    "DecodeConnector",
    "DecodeTransfer",
    "HandoffError",
    "HostArena",
    "InsufficientProofError",
    "KVMemory",
    "Key",
    "LayerHeads",
    "LayoutError",
    "ModelShard",
    "NodeOutOfService",
    "NodeRebooted",
    "Phase",
    "PrefillConnector",
    "PrefillTransfer",
    "ProcessExited",
    "RankStatus",
    "Region",
    "StateCut",
    "StatePool",
    "Timeouts",
    "TokenVerifier",
    "TransferStatus",
    "agree",
    "answer_for",
    "client_answer",
    "engine_variables",
    "kv_split",
    "prompt_digest",
    "read_keys",
    "shard_model",
]
