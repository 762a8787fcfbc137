"""The messages between rank 0 and the other ranks of an engine, apart from the rows that they compute."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import ConnectorConfig, ConnectorStats, TransferStatus
from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.runtime.validation import AbortCause

from pdpool_reference.kv import AuxRow
from pdpool_reference.model import Step


@dataclass(frozen=True, slots=True)
class RankSpec:
    """How a rank is set up. `mode`, `model_path` and `kv_pages` are the engine's options."""

    rank: int
    stage: int
    shard: ModelShard
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
class Open:
    """Open a hand-off. `handle` is its number in this engine; the other fields are those of the connector's `open`.

    `prefill`: the bootstrap address that decode opens at; None at prefill.
    """

    handle: int
    prefill: str | None
    room: int
    request_id: str
    prompt: bytes
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """Decode: offer memory; the fields are those of `DecodeTransfer.offer`."""

    handle: int
    pages: NDArray[np.int32]
    aux_slot: int


@dataclass(frozen=True, slots=True)
class Send:
    """Prefill: send pages; the fields are those of `PrefillTransfer.send`. `aux`: content for the aux row."""

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
    cause: AbortCause


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new hand-offs."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Hang, or stop hanging: a frozen rank computes and sends nothing, while its connector lives on."""

    frozen: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


# --- Reports of a rank ---


@dataclass(frozen=True, slots=True)
class Up:
    """It is ready to compute, or its connector listens at these addresses."""

    addresses: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Changed:
    """Its transfer of a hand-off has a new status."""

    handle: int
    status: TransferStatus


@dataclass(frozen=True, slots=True)
class Alive:
    """Its loop turns; the statistics of its connector."""

    stats: ConnectorStats
