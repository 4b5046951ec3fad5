"""Keys as they were before the rotary embedding."""

import dataclasses
from typing import Any

from kvlab.attention import rotary, rotate
from kvlab.codec.wrapped import Wrapped
from kvlab.core import Codec, part
from kvlab.errors import ConfigError


@part
class PreRope(Wrapped):
    """`inner` stores keys turned back by their positions; reading turns them again, a block at a time.

    KVQuant, https://arxiv.org/abs/2401.18079, section 3.2: the rotation mixes pairs of channels, so that no channel keeps
    a range of its own. Rotations keep lengths, so the error of a key is as long as inner's. No bytes of its own; values are
    left to `inner` alone.

    Attributes:
      frequency: radians per token of the D/2 pairs, from the model (`at`).
    """

    frequency: Any = dataclasses.field(default=None, repr=False)

    @property
    def values(self) -> Codec:
        return self.inner.values

    def at(self, layer: int, model) -> Codec:
        inner = self.inner.at(layer, model)
        if inner is self.inner and self.frequency is not None:
            return self
        return dataclasses.replace(self, inner=inner, frequency=model.rope(layer).frequencies(model.head_dim))

    def _angles(self, pos_BHNP):
        if self.frequency is None or pos_BHNP is None:
            what = "frequencies" if self.frequency is None else "positions"
            raise ConfigError(
                f"pre_rope codec: no {what}; use it for keys inside a model, or bind it first: codec.at(layer, config)"
            )
        return rotary(pos_BHNP, self.frequency)

    def encode(self, x_BHNPD, pos_BHNP=None):
        cos, sin = self._angles(pos_BHNP)
        return self.inner.encode(rotate(x_BHNPD, cos, -sin), pos_BHNP)

    def decode(self, code, pos_BHNP=None):
        return rotate(self.plain(code, pos_BHNP), *self._angles(pos_BHNP))
