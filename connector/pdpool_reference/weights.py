"""Weights of a model: the layout of the one file that holds them, loading it by memory map, and a tiny random model.

A model directory holds `weights.bin` (float32, each tensor aligned to 64 bytes), `model.json` (config, and where each
tensor is), `tokenizer.json` and `chat_template.jinja`. Matrices are stored as `products.pack` lays them out. So an
engine uses the mapped bytes as they are, and the processes of one host share their pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pdpool_reference.config import ModelConfig
from pdpool_reference.products import Floats, pack

FORMAT: Final = 1
"""Version of the directory's layout; others are refused."""
WEIGHTS_FILE: Final = "weights.bin"
MODEL_FILE: Final = "model.json"
ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Norms are (hidden,); matrices are packed.

    `qkv` holds queries, keys and values side by side, with each head's rotary pairs half a head apart. `gate_up` holds
    gate, then up.
    """

    attention_norm: Floats
    qkv: Floats
    attention_out: Floats
    ffn_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. embedding: the packed matrix (hidden, vocab), used for input and output."""

    embedding: Floats
    final_norm: Floats
    layers: tuple[Layer, ...]

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Yield each tensor with its name in the file."""
        yield "embedding", self.embedding
        yield "final_norm", self.final_norm
        for index, layer in enumerate(self.layers):
            for field in Layer.__dataclass_fields__:
                yield layer_tensor(index, field), getattr(layer, field)


class Placement(msgspec.Struct, frozen=True):
    """Position of a tensor in the file: offset in bytes, and shape."""

    offset: int
    shape: tuple[int, ...]


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `model.json`. `source_sha256`: digest of the GGUF file of the model."""

    format: int
    source_sha256: str
    config: ModelConfig
    tensors: dict[str, Placement]


class WeightsError(Exception):
    """A model directory that is missing, incomplete or of another version."""


def layer_tensor(index: int, field: str) -> str:
    """Return the name of a block's tensor in the file."""
    return f"layers.{index}.{field}"


def read_model_file(directory: Path) -> ModelFile:
    """Read the `model.json` of a directory. Raises WeightsError."""
    path = directory / MODEL_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"no model at {directory}: {error.strerror}; make one with `python -m pdpool_reference.convert`"
        ) from error
    try:
        found = msgspec.json.decode(content, type=ModelFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise WeightsError(f"{path} is not a model description of format {FORMAT}: {error}") from error
    if found.format != FORMAT:
        raise WeightsError(f"{path} has format {found.format}, must have {FORMAT}: convert the model again")
    return found


def load(directory: str | Path) -> tuple[ModelConfig, Weights]:
    """Map a model directory. Takes milliseconds; pages are read when first used. Raises WeightsError."""
    directory = Path(directory)
    described = read_model_file(directory)
    path = directory / WEIGHTS_FILE
    try:
        mapped = np.memmap(path, np.float32, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot map {path}: {error}") from error

    def tensor(name: str) -> Floats:
        try:
            placed = described.tensors[name]
        except KeyError:
            raise WeightsError(f"{directory / MODEL_FILE} does not place tensor {name}") from None
        start = placed.offset // 4
        part = mapped[start : start + int(np.prod(placed.shape))]
        if part.size != np.prod(placed.shape):
            raise WeightsError(f"{path} has {mapped.nbytes} bytes, too few for {name}: convert again")
        return part.reshape(placed.shape)

    layers = tuple(
        Layer(**{field: tensor(layer_tensor(index, field)) for field in Layer.__dataclass_fields__})
        for index in range(described.config.layers)
    )
    return described.config, Weights(tensor("embedding"), tensor("final_norm"), layers)


def open_model(model_path: str | Path) -> tuple[ModelConfig, Weights]:
    """Open the model of a command line: a directory, or `tiny`. Raises WeightsError."""
    return tiny() if model_path == "tiny" else load(model_path)


TINY_VOCAB: Final = 259
"""256 bytes, then end of text, start and end of a chat message."""


def tiny(seed: int = 0) -> tuple[ModelConfig, Weights]:
    """Return a random model with a byte vocabulary: real arithmetic, more than a thousand tokens a second."""
    config = ModelConfig(
        name=f"tiny-{seed}",
        layers=2,
        hidden=64,
        ffn=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=TINY_VOCAB,
        rope_base=10_000.0,
        rms_eps=1e-5,
        max_context=8192,
        eos_ids=(256, 258),
    )
    generator = np.random.default_rng(seed)

    def matrix(inputs: int, outputs: int, gain: float) -> Floats:
        values = generator.standard_normal((inputs, outputs), np.float32)
        return pack(values * np.float32(gain / np.sqrt(inputs)))

    ones = np.ones(config.hidden, np.float32)
    # Gains above 1 make attention pick single tokens, so that what is in the cache decides what comes out.
    layers = tuple(
        Layer(
            attention_norm=ones,
            qkv=matrix(config.hidden, config.qkv, 2.0),
            attention_out=matrix(config.heads * config.head_dim, config.hidden, 2.0),
            ffn_norm=ones,
            gate_up=matrix(config.hidden, 2 * config.ffn, 2.0),
            down=matrix(config.ffn, config.hidden, 2.0),
        )
        for _ in range(config.layers)
    )
    return config, Weights(matrix(config.hidden, config.vocab, 2.0), ones, layers)
