"""KIVI: keys along channels, values along tokens, the newest tokens exact."""

from kvlab.codec.grouped import ALONG, Grouped, Int2, Int4
from kvlab.core import Codec, part, static
from kvlab.errors import ConfigError

WIDTHS: dict[int, type[Grouped]] = {2: Int2, 4: Int4}


@part
class Kivi(Codec):
    """https://arxiv.org/abs/2402.02750, section 3.3: `Grouped` keys and values of 2 or 4 bits beside a tail in full.

    The paper quantises tokens as soon as a group of keys is full and keeps at most `residual` exact ones; here whole pages
    of 64 are committed and at least `residual` tokens stay exact. Error and bytes are those of `Grouped`.
    """

    bits: int = static(default=2)
    group_size: int = static(default=32)
    residual: int = static(default=128)

    def __post_init__(self):
        if self.bits not in WIDTHS:
            raise ConfigError(f"kivi codec: bits={self.bits}; allowed: {', '.join(map(str, WIDTHS))}")
        for along in ALONG:
            self._along(along)  # checks the rest

    def _along(self, along: str) -> Grouped:
        return WIDTHS[self.bits](along, self.group_size, self.residual)

    @property
    def keys(self) -> Codec:
        return self._along("channel")

    @property
    def values(self) -> Codec:
        return self._along("token")

    def at(self, layer: int, model) -> "Kivi":
        self.keys.at(layer, model)
        self.values.at(layer, model)
        return self
