"""`python -m pdpool_reference.convert GGUF OUTDIR`: from a GGUF file to a model directory."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import gguf
import msgspec
import numpy as np

from pdpool_reference.config import ModelConfig
from pdpool_reference.products import Floats, pack
from pdpool_reference.tokenizer import TEMPLATE_FILE, TOKENIZER_FILE, build_bpe
from pdpool_reference.weights import (
    ALIGNMENT,
    FORMAT,
    MODEL_FILE,
    WEIGHTS_FILE,
    ModelFile,
    Placement,
    WeightsError,
    layer_tensor,
    read_model_file,
)

_CONTROL: Final = 3
"""`tokenizer.ggml.token_type` of control tokens."""
_END_NAMES: Final = ("<|endoftext|>", "<|im_end|>")
"""Control tokens that end an answer, beside the one in the file: a chat model may use either."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Source:
    fields: dict[str, Any]
    tensors: dict[str, Any]

    def field(self, name: str) -> Any:  # noqa: ANN401 - a GGUF field is of any type
        if name not in self.fields:
            raise WeightsError(f"the GGUF file has no field {name}")
        return self.fields[name].contents()

    def tensor(self, name: str) -> Floats:
        """Return a tensor as float32, a matrix as (outputs, inputs)."""
        if name not in self.tensors:
            raise WeightsError(f"the GGUF file has no tensor {name}")
        found = self.tensors[name]
        return np.asarray(gguf.quants.dequantize(found.data, found.tensor_type), np.float32)


def convert(gguf_path: Path, out_dir: Path, say: Say) -> None:
    """Write a GGUF file of a Llama model with tied embeddings as a model directory.

    Does nothing when the directory holds this file's model already. Replaces files one by one, `model.json` last. An
    interrupted conversion leaves a directory that does not load, and the next conversion completes it.

    Args:
        gguf_path: the file.
        out_dir: the directory.
        say: called with a line for each step.

    Raises:
        WeightsError: the file is not such a model.
    """
    digest = _sha256(gguf_path)
    if _is_made_from(out_dir, digest):
        say(f"{out_dir} holds this model already")
        return
    say(f"reading {gguf_path} ({gguf_path.stat().st_size >> 20} MiB); its vocabulary takes some seconds")
    reader = gguf.GGUFReader(gguf_path)
    say(f"converting {len(reader.tensors)} tensors to 32 bits, the largest first")
    source = _Source(reader.fields, {tensor.name: tensor for tensor in reader.tensors})
    config = _config(source, digest)
    _refuse_unknown(source, config)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / MODEL_FILE).unlink(missing_ok=True)
    with _replacing(out_dir / WEIGHTS_FILE) as file:
        placements = _write_tensors(file, _tensors(source, config), config, say)
    with _replacing(out_dir / TOKENIZER_FILE) as file:
        file.write(_tokenizer(source).to_str().encode())
    with _replacing(out_dir / TEMPLATE_FILE) as file:
        file.write(source.field("tokenizer.chat_template").encode())
    described = ModelFile(format=FORMAT, source_sha256=digest, config=config, tensors=placements)
    with _replacing(out_dir / MODEL_FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(described), indent=1))
    say(f"{out_dir} holds {config.name}")


def _config(source: _Source, digest: str) -> ModelConfig:
    architecture = source.field("general.architecture")
    if architecture != "llama":
        raise WeightsError(f"the GGUF file is of architecture {architecture!r}, must be 'llama'")
    heads = int(source.field("llama.attention.head_count"))
    hidden = int(source.field("llama.embedding_length"))
    label = f"{source.field('general.basename')}-{source.field('general.size_label')}".lower()
    names = source.field("tokenizer.ggml.tokens")
    ends = {int(source.field("tokenizer.ggml.eos_token_id"))} | {names.index(n) for n in _END_NAMES if n in names}
    return ModelConfig(
        name=f"{label}-{digest[:8]}",
        layers=int(source.field("llama.block_count")),
        hidden=hidden,
        ffn=int(source.field("llama.feed_forward_length")),
        heads=heads,
        kv_heads=int(source.field("llama.attention.head_count_kv")),
        head_dim=hidden // heads,
        vocab=int(source.field("llama.vocab_size")),
        rope_base=float(source.field("llama.rope.freq_base")),
        rms_eps=float(source.field("llama.attention.layer_norm_rms_epsilon")),
        max_context=int(source.field("llama.context_length")),
        eos_ids=tuple(sorted(ends)),
    )


def _refuse_unknown(source: _Source, config: ModelConfig) -> None:
    """Refuse further tensors: untied output, rotary scaling, biases, experts."""
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    known = {f"blk.{index}.{part}.weight" for index in range(config.layers) for part in parts}
    unknown = sorted(set(source.tensors) - known - {"token_embd.weight", "output_norm.weight"})
    if unknown:
        raise WeightsError(f"the GGUF file has {unknown[:3]}, which this engine does not compute")


def _tensors(source: _Source, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    yield "embedding", pack(source.tensor("token_embd.weight").T)
    yield "final_norm", source.tensor("output_norm.weight")
    for index in range(config.layers):

        def part(name: str, index: int = index) -> Floats:
            return source.tensor(f"blk.{index}.{name}.weight")

        queries = _pairs_half_a_head_apart(part("attn_q"), config.heads)
        keys = _pairs_half_a_head_apart(part("attn_k"), config.kv_heads)
        yield layer_tensor(index, "attention_norm"), part("attn_norm")
        yield layer_tensor(index, "qkv"), pack(np.concatenate((queries, keys, part("attn_v"))).T)
        yield layer_tensor(index, "attention_out"), pack(part("attn_output").T)
        yield layer_tensor(index, "ffn_norm"), part("ffn_norm")
        yield layer_tensor(index, "gate_up"), pack(np.concatenate((part("ffn_gate"), part("ffn_up"))).T)
        yield layer_tensor(index, "down"), pack(part("ffn_down").T)


def _pairs_half_a_head_apart(matrix: Floats, heads: int) -> Floats:
    """Undo llama.cpp's order of Q and K rows, in which the two elements of a rotary pair are neighbours."""
    outputs, inputs = matrix.shape
    return matrix.reshape(heads, outputs // heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def _write_tensors(
    file: BinaryIO, tensors: Iterator[tuple[str, Floats]], config: ModelConfig, say: Say
) -> dict[str, Placement]:
    placements: dict[str, Placement] = {}
    for name, tensor in tensors:
        file.write(bytes(-file.tell() % ALIGNMENT))
        placements[name] = Placement(file.tell(), tensor.shape)
        file.write(np.ascontiguousarray(tensor).data)
        if name.endswith(".down"):
            done = sum(name.endswith(".down") for name in placements)
            if done % 10 == 0 or done == config.layers:
                say(f"wrote block {done} of {config.layers} ({file.tell() >> 20} MiB)")
    return placements


def _tokenizer(source: _Source) -> Any:  # noqa: ANN401 - the library has no types
    kind = source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise WeightsError(f"the GGUF file's tokenizer is {kind}, must be ('gpt2', 'smollm')")
    names, kinds = source.field("tokenizer.ggml.tokens"), source.field("tokenizer.ggml.token_type")
    specials = [name for name, kind in zip(names, kinds, strict=True) if kind == _CONTROL]
    return build_bpe(names, source.field("tokenizer.ggml.merges"), specials)


def _is_made_from(directory: Path, digest: str) -> bool:
    try:
        return read_model_file(directory).source_sha256 == digest
    except WeightsError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@click.command()
@click.argument("gguf_path", metavar="GGUF", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out_dir", metavar="OUTDIR", type=click.Path(file_okay=False, path_type=Path))
def main(gguf_path: Path, out_dir: Path) -> None:
    """Convert a GGUF file of a small Llama model into a directory that the reference engine maps."""
    try:
        convert(gguf_path, out_dir, click.echo)
    except WeightsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
