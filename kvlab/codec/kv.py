"""One codec for keys, another for values."""

from typing import Any

from kvlab.core import Codec, part


@part
class KV(Codec):
    """Keys through `k`, values through `v`, chosen independently."""

    k: Any
    v: Any

    @property
    def keys(self) -> Codec:
        return self.k

    @property
    def values(self) -> Codec:
        return self.v
