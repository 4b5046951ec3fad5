"""The shape of a decoder-only transformer, as data."""

import dataclasses

import numpy as np

from kvlab.attention import AttentionSpec


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary frequencies were stretched for longer contexts.

    Attributes:
      kind: "linear" divides every frequency by `factor` (https://arxiv.org/abs/2306.15595, eq. 4); "llama3" only those
        that turn fewer than `low` times within `original` tokens, leaves those that turn more than `high` times, and
        goes from one to the other in between (https://arxiv.org/abs/2407.21783, section 3.4.2).
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary embedding (https://arxiv.org/abs/2104.09864)."""

    base: float
    scaling: RopeScaling | None = None

    def frequencies(self, dim: int):
        """Radians per token of the `dim // 2` pairs, float32 `[D/2]`."""
        plain = (1.0 / self.base ** (np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(np.float32)
        if self.scaling is None:
            return plain
        s = self.scaling
        if s.kind == "linear":
            return plain / np.float32(s.factor)
        turns = s.original * plain / (2 * np.pi)
        kept = np.clip((turns - s.low) / (s.high - s.low), 0, 1)  # the share of a frequency that stays as it is
        return (plain * (kept + (1 - kept) / s.factor)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model except its weights; hashable, so it keys jit's cache.

    Attributes:
      heads, kv_heads: query heads and KV heads (grouped-query attention, https://arxiv.org/abs/2305.13245).
      context: the longest sequence that the model was trained for.
      rope_base, rope_scaling: of the rotary embedding.
      local_rope_base: base of layers with a local window; None: the same as the others, scaling included.
      windows: the local window of each layer, None for global ones; `()` when every layer is global.
      softcap, logit_softcap: of attention's logits and of the next token's, None for none.
      scale: multiplies attention's logits; None for `head_dim ** -0.5`.
      tied: the head is the embedding's transpose; otherwise it has weights of its own.
      qkv_bias: queries, keys and values have biases.
      qk_norm: each head's query and key are normalised before they are rotated (https://arxiv.org/abs/2010.04245).
      post_norms: the outputs of attention and of the feed-forward network are normalised before they are added.
      unit_norms: checkpoints store norm weights less 1; loading adds it.
      activation: of the gate, a key of `kvlab.models.transformer.ACTIVATIONS`.
      embedding_scale: multiplies a token's embedding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float = 1e4
    norm_eps: float = 1e-5
    windows: tuple[int | None, ...] = ()
    softcap: float | None = None
    rope_scaling: RopeScaling | None = None
    local_rope_base: float | None = None
    logit_softcap: float | None = None
    scale: float | None = None
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    unit_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0

    @property
    def groups(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def attention(self, layer: int) -> AttentionSpec:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return AttentionSpec(scale, self.window(layer), self.softcap)

    def rope(self, layer: int) -> Rope:
        if self.window(layer) is not None and self.local_rope_base is not None:
            return Rope(self.local_rope_base)
        return Rope(self.rope_base, self.rope_scaling)
