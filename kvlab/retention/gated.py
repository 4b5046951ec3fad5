"""A learned gate says what stays."""

import dataclasses
from typing import Any

from kvlab import gates
from kvlab.core import part, static
from kvlab.errors import ConfigError
from kvlab.retention.sized import Sized

KIND = "importance"


@part
class Gated(Sized):
    """Keeps what an importance gate (`kvlab.gates.ImportanceGate`) expects later tokens to need; no question has to be known.

        priority(token) = the gate's log-importance of the layer's input at that token

    The score is taken once, when a token comes, and stays with it, so memory shrinks at fill and stays at the budget while
    decoding. As KVzap, https://arxiv.org/abs/2601.07891, but with a budget instead of a threshold. Wrap it in `Protect` to
    keep sinks and recents whatever the gate says.

    Fields, besides those of `Sized`:
      gate: the name of a gate that ships, or the path of one that was saved.
    Errors: ConfigError for no gate, one of another kind or one for another model.
    """

    gate: str = static(default="")
    layer: Any = None
    needs = ("hidden",)

    def at(self, layer, model):
        if self.layer is not None:
            return self
        if not self.gate:
            name = type(self).__name__.lower()
            raise ConfigError(f'{name}: no gate; write gate = "path/to/gate.safetensors", as kvlab.gates.save writes it')
        gate = gates.load(self.gate)
        if gate.kind != KIND:
            raise ConfigError(f"gate={self.gate!r} is of kind {gate.kind!r}, the retention wants {KIND!r}; use another")
        return dataclasses.replace(self, layer=gate.at(layer, model))

    def score(self, key, value, pos, **seen):
        return self.layer(key, value, pos, seen["hidden"])

    def priority(self, state, pos, now):
        return state
