"""Retentions around another one."""

import dataclasses
from typing import Any

from kvlab.core import Retention


class Combinator(Retention):
    """Base of parts with a field `inner`, any retention: all but the priority is the inner one's unless they define it."""

    inner: Any

    @property
    def unit(self):
        return self.inner.unit

    @property
    def evicts(self):
        return self.inner.evicts

    @property
    def aligned(self):
        return self.inner.aligned

    @property
    def pool(self):
        return self.inner.pool

    @property
    def needs(self):
        return self.inner.needs

    @property
    def observes(self):
        return self.inner.observes

    @property
    def renews(self):
        return self.inner.renews

    @property
    def uneven(self):
        return self.inner.uneven

    def shares(self, priority, pos, budget):
        return self.inner.shares(priority, pos, budget)

    def budget(self, prompt, total, unit):
        return self.inner.budget(prompt, total, unit)

    def at(self, layer, model):
        inner = self.inner.at(layer, model)
        return self if inner is self.inner else dataclasses.replace(self, inner=inner)  # type: ignore[type-var]

    def score(self, key, value, pos, **seen):
        return self.inner.score(key, value, pos, **seen)

    def fresh(self, key, value, pos, **seen):
        return self.inner.fresh(key, value, pos, **seen)

    def observe(self, state, weight, pos, now):
        return self.inner.observe(state, weight, pos, now)

    def visibility(self):
        return self.inner.visibility()
