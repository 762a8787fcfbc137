"""The numbers that describe a Llama model."""

import msgspec


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants of a Llama model with tied embeddings.

    Args:
        name: Identifies the weights; the same on both sides of a hand-off.
        layers: Number of blocks.
        hidden: Width of the residual stream.
        ffn: Width between gate/up and down.
        heads: Query heads, a multiple of `kv_heads`.
        kv_heads: Key and value heads.
        head_dim: Elements of a head, even.
        vocab: Number of tokens.
        rope_base: Base of the rotary frequencies.
        rms_eps: Added under the root of RMSNorm.
        max_context: Most tokens of one sequence.
        eos_ids: Tokens that end an answer.

    Raises:
        ValueError: the numbers do not fit together.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_base: float
    rms_eps: float
    max_context: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_context"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, must be a multiple of kv_heads, {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, must be even: rotary embedding turns pairs")
        if not all(0 <= token < self.vocab for token in self.eos_ids):
            raise ValueError(f"eos_ids are {self.eos_ids}, must be within the vocabulary of {self.vocab}")

    @property
    def qkv(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim
