"""What the last queries of a prompt attend to, many tokens in early layers and few in late ones."""

import dataclasses

from kvlab.core import part, static
from kvlab.errors import ConfigError
from kvlab.retention.snapkv import SnapKV


@part
class PyramidKV(SnapKV):
    """`SnapKV` with budgets that fall from layer to layer: https://arxiv.org/abs/2406.02069.

        budget(layer) = high − (high − low) · layer / (layers − 1)        low = mean / beta,   high = 2 · mean − low

    `mean` is what `ratio` or `size` ask for, so layers keep as much together as with `SnapKV`; each is rounded to the nearest.
    A layer keeps at most what the prompt has before the window; then low makes up for it. Where that leaves the last layer
    less than the window, or more than the first, there is no pyramid: every layer keeps `mean`. So the authors' code has it,
    but for the window, which they keep besides. While decoding budgets stay as they are.

    Fields, besides those of `SnapKV`:
      beta: the larger, the steeper; 1 is even.
      layer, layers: which layer of how many, set by `at`. Only layers of the same kind (global, local) are counted.
    Errors: ConfigError for beta below 1, or a budget that is asked for before `at`.
    """

    beta: float = static(default=20.0)
    layer: int | None = static(default=None)
    layers: int = static(default=1)

    def __post_init__(self):
        super().__post_init__()
        if self.beta < 1:
            raise ConfigError(f"pyramidkv: beta={self.beta}; allowed: 1 (every layer alike) or more (steeper)")

    def at(self, layer, model):
        alike = [n for n in range(model.layers) if (model.window(n) is None) == (model.window(layer) is None)]
        return dataclasses.replace(super().at(layer, model), layer=alike.index(layer), layers=len(alike))

    def budget(self, prompt, total, unit):
        if self.layer is None:
            raise ConfigError(
                "pyramidkv: a budget depends on the layer; write policy.at(layer, model.config), as kvlab.decode.per_layer does"
            )
        mean = float(self.size or 0) if self.ratio is None else prompt * (1 - self.ratio)
        low, high = mean / self.beta, 2 * mean - mean / self.beta
        if high >= prompt - self.window:
            high = prompt - self.window
            low = 2 * mean - high
        if self.layers == 1 or not prompt >= high >= low >= self.window:
            return max(1, round(mean))
        return round(high - self.layer * (high - low) / (self.layers - 1))
