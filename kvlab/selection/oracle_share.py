"""A few layers look at everything and tell the others where to look."""

import dataclasses

from kvlab.core import Pages, part, static
from kvlab.errors import ConfigError
from kvlab.selection.controls import attention
from kvlab.selection.top import Top


@part
class OracleShare(Top):
    """Every `every`-th layer reads all and passes on the pages of most attention, which the layers up to the next such read.

    Each layer reads its own keys and values there. After the other published HySparse (https://arxiv.org/abs/2602.03560),
    whose sparse layers also share the full layer's keys and values: that needs a model trained for it, and is not offered.
    """

    granularity: str = static(default="page")
    every: int = static(default=4)
    leads: bool = static(default=True)
    by_position = True

    def __post_init__(self):
        super().__post_init__()
        if self.granularity != "page" or self.every < 1:
            raise ConfigError(
                f"oracle_share: granularity={self.granularity!r}, every={self.every}; it shares pages, and every is 1 or more"
            )

    def at(self, layer, model, token_bytes):
        return dataclasses.replace(super().at(layer, model, token_bytes), leads=layer % self.every == 0)

    def select(self, state, query, visible, cache, around):
        if self.leads:
            mass = attention(around.logits(), visible).sum(-1)
            number, _ = self.count(visible)
            return Pages(None, shared=self.pages(mass, number, visible, cache))
        if around.shared is None:
            raise ConfigError("oracle_share: no layer before this one reads all; give it to layer 0 too, or another policy here")
        return Pages(around.shared, self.count(visible)[1])
