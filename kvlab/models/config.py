"""The shape of a decoder-only transformer, as data."""

import dataclasses

from kvlab.attention import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model except its weights; hashable, so it keys jit's cache.

    Attributes:
      heads, kv_heads: query heads and KV heads (grouped-query attention, https://arxiv.org/abs/2305.13245).
      context: the longest sequence that the model was trained for.
      rope_base: base of the rotary embedding.
      windows: the local window of each layer, None for global ones; `()` when every layer is global.
      softcap: of attention logits, None for none.
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

    @property
    def groups(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def attention(self, layer: int) -> AttentionSpec:
        window = self.windows[layer] if self.windows else None
        return AttentionSpec(self.head_dim**-0.5, window, self.softcap)
