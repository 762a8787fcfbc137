"""What rank 0 and the other ranks of an engine say to each other, apart from the rows that they compute."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import ConnectorConfig, ConnectorStats, TransferStatus
from pdpool_connector.layout.pairing import ModelShard

from pdpool_reference.kv import AuxRow
from pdpool_reference.model import Step


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is to be. `mode`, `model_path` and `kv_pages` as the engine's options have them."""

    rank: int
    stage: int
    part: ModelShard
    mode: str
    model_path: str
    kv_pages: int


# --- Orders ---


@dataclass(frozen=True, slots=True)
class Connect:
    """Start a connector."""

    config: ConnectorConfig


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the rank's layers over these steps, exchanging rows with rank 0."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Prefill: open a hand-off; the fields are those of `PrefillConnector.open`."""

    handle: int
    room: int
    request_id: str
    sibling: int
    prompt: bytes
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Offer:
    """Decode: open a hand-off; the fields are those of `DecodeConnector.open`."""

    handle: int
    prefill: str
    room: int
    request_id: str
    pages: NDArray[np.int32]
    aux_slot: int
    sibling: int
    prompt: bytes
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Send:
    """Prefill: send pages; the fields are those of `PrefillTransfer.send`, and `aux` what the aux row shall hold."""

    handle: int
    pages: NDArray[np.int32]
    start: int
    last: bool
    aux_slot: int | None
    aux: AuxRow | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Give a hand-off up."""

    handle: int
    message: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new hand-offs."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Follow no other order until this is taken back, as a rank that hangs; the connector lives on."""

    frozen: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


# --- What a rank tells ---


@dataclass(frozen=True, slots=True)
class Up:
    """It is ready to compute, or its connector listens at these addresses."""

    addresses: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Said:
    """How its part of a hand-off stands."""

    handle: int
    status: TransferStatus


@dataclass(frozen=True, slots=True)
class Alive:
    """Its loop turns; what its connector is at."""

    stats: ConnectorStats
