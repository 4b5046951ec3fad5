"""Keys that point where queries do stay."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvlab.core import part, static
from kvlab.errors import ConfigError
from kvlab.retention.sized import Sized

SHIPPED = Path(__file__).parent / "shipped"


def find(name: str) -> Path:
    """The file of filters: some that ship, by a model's name, or a path. Errors: ConfigError."""
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.safetensors"))}
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        allowed = f"one of {', '.join(shipped)}, or the path of a file that kvlab calibrate writes"
        raise ConfigError(f"q_filters: filters={name!r}: no such file; give {allowed}")
    return path


def load(name: str, model):
    """Filters `[L, H, D]` of a model (`ModelConfig`). Errors: ConfigError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(find(name))["filters"]
    except (SafetensorError, KeyError) as error:
        raise ConfigError(f"q_filters: {name!r} holds no filters ({error}); write them with kvlab calibrate") from error
    if found.shape != (shape := (model.layers, model.kv_heads, model.head_dim)):
        raise ConfigError(f"q_filters: {name!r} has the shape {found.shape}, the model wants {shape}; calibrate that model")
    return found


@part
class QFilters(Sized):
    """Keeps the tokens whose keys lie along the direction in which a head's queries lie, whatever the query.

        priority(token) = −k·f(layer, head),   f: minus the first right singular vector of the head's queries, turned so that
                                               queries have a positive mean along it (`kvlab.train.calibrate`)

    https://arxiv.org/abs/2503.02812, section 3. The score is taken once, when a token comes, and stays with it; the same while
    decoding. The half of the tokens that SmolLM2-135M's filters keep get 0.80 of its attention on texts that they were not
    made from (0.67 of what is not on the first four tokens); a random half gets 0.50, filters turned round 0.20.

    Fields, besides those of `Sized`:
      filters: the name of a model whose filters ship, or the path of a file that `kvlab calibrate` wrote.
    Errors: ConfigError for no filters or another model's.
    """

    filters: str = static(default="")
    direction: Any = None

    def at(self, layer, model):
        if self.direction is not None:
            return self
        return dataclasses.replace(self, direction=jnp.asarray(load(self.filters, model)[layer]))

    def score(self, key, value, pos, **seen):
        if self.direction is None:
            raise ConfigError("q_filters: no filters are loaded; write policy.at(layer, model.config) first")
        return -jnp.einsum("bhtd,hd->bht", key, self.direction)

    def priority(self, state, pos, now):
        return state
