"""What every learned module has: a configuration, parameters of a type of their own, a view per layer."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from kvlab.errors import ConfigError

INPUTS, POOLS = ("post", "pre"), ("mean", "softmax")


class GateParam(nnx.Param):
    """A parameter of a gate: a type of its own, so that the model's are never trained with it by accident."""


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """Shape of a gate that scores keys for a query.

    Attributes:
      layers, kv_heads, head_dim: the model's.
      rank: width r of the projections.
      lift: width of a fixed orthonormal lift of both projections (128 in the article), 0 for none; cosines stay the same,
        index keys grow.
      inputs: queries and keys "post" or "pre" their rotary embedding.
      pool: how the query heads of a KV head are joined, "mean" or "softmax".
      tied: whether queries and keys have one projection.
      channels: how many weights each layer has, at most, for the channels of queries and keys before they are projected (one
        for each pair that a rotary embedding turns, or for each few neighbouring pairs); 0 for none.
      threshold: whether each layer and KV head has a threshold, for selection by score instead of by number.
      index_heads: of the lightning indexer.
    """

    layers: int
    kv_heads: int
    head_dim: int
    rank: int = 16
    lift: int = 0
    inputs: str = "post"
    pool: str = "mean"
    tied: bool = True
    channels: int = 64
    threshold: bool = False
    index_heads: int = 4

    def __post_init__(self):
        for name, value, allowed in (("inputs", self.inputs, INPUTS), ("pool", self.pool, POOLS)):
            if value not in allowed:
                raise ConfigError(f"gate: {name}={value!r}; allowed: {', '.join(allowed)}")
        pairs = self.head_dim // 2
        if self.channels and (self.channels < 0 or pairs % min(self.channels, pairs)):
            raise ConfigError(f"gate: channels={self.channels}; allowed: 0, a divisor of {pairs} (half of head_dim), or more")
        if not 1 <= self.rank <= self.head_dim or (self.lift and self.lift < self.rank):
            raise ConfigError(
                f"gate: rank={self.rank}, lift={self.lift}; rank: 1 … {self.head_dim} (head_dim), lift: 0 or at least rank"
            )


class Gate(nnx.Module):
    """Base of the gates. A subclass makes `GateParam`s and says what one layer's part is.

    Attributes:
      kind: the name in config files and in saved gates.
      Config: the class of its configuration, which names at least the model's layers, kv_heads and head_dim.
    """

    kind = ""
    Config: Any = GateConfig

    def __init__(self, config: Any, seed: int = 0):
        self.config = config

    @property
    def width(self) -> int:
        """Numbers of an index key."""
        raise NotImplementedError

    def layer(self, number, frequency=None) -> Any:
        """The layer's `index` and `scores`; `frequency` is that of its rotary embedding where inputs are "pre".

        The number may be traced: gates of all layers have one structure.
        """
        raise NotImplementedError

    def at(self, number: int, model) -> Any:
        """The same for a layer of a model (`ModelConfig`). Errors: ConfigError for a model of another shape."""
        self.check(model)
        c = self.config
        return self.layer(number, model.rope(number).frequencies(c.head_dim) if c.inputs == "pre" else None)

    def check(self, model) -> None:
        """Raises ConfigError for a model of another shape."""
        c = self.config
        if (c.layers, c.kv_heads, c.head_dim) != (model.layers, model.kv_heads, model.head_dim):
            raise ConfigError(
                f"gate for {c.layers} layers, {c.kv_heads} KV heads of {c.head_dim}; the model has {model.layers}, "
                f"{model.kv_heads} of {model.head_dim}; use a gate trained for it"
            )

    def values(self) -> dict[str, Any]:
        """The parameters' arrays by name; `kvlab.gates.store.with_values` puts others in their place."""
        return nnx.to_pure_dict(nnx.state(self, GateParam))

    def counts(self) -> dict[str, int]:
        """Parameters by name."""
        return {name: jax.numpy.size(x) for name, x in self.values().items()}
