"""Keys that point where queries do stay."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvlab.core import part, static
from kvlab.errors import ConfigError
from kvlab.retention import calibrated
from kvlab.retention.sized import Sized


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
        found = calibrated.load(self.filters, "filters", (model.layers, model.kv_heads, model.head_dim))
        return dataclasses.replace(self, direction=jnp.asarray(found[layer]))

    def score(self, key, value, pos, **seen):
        if self.direction is None:
            raise ConfigError("q_filters: no filters are loaded; write policy.at(layer, model.config) first")
        return -jnp.einsum("bhtd,hd->bht", key, self.direction)

    def priority(self, state, pos, now):
        return state
