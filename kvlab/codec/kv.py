"""One codec for keys, another for values."""

import dataclasses
from typing import Any

from kvlab.core import Codec, part


@part
class KV(Codec):
    """Keys through `k`, values through `v`, chosen independently."""

    k: Any
    v: Any

    @property
    def keys(self) -> Codec:
        return self.k.keys

    @property
    def values(self) -> Codec:
        return self.v.values

    def at(self, layer: int, model) -> "KV":
        k, v = self.k.at(layer, model), self.v.at(layer, model)
        return self if k is self.k and v is self.v else dataclasses.replace(self, k=k, v=v)
