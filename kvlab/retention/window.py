"""Attention sinks and a sliding window."""

import jax.numpy as jnp

from kvlab.core import PAGE, Retention, Visibility, part, static
from kvlab.errors import ConfigError


def span(sinks: int, recent: int, unit: int) -> int:
    """Slots that the first `sinks` tokens and any `recent` consecutive ones can take, in units of 1 or a page."""
    if unit == 1:
        return sinks + recent
    return (-(-sinks // PAGE) + -(-max(recent - 1, 0) // PAGE) + 1) * PAGE


@part
class Window(Retention):
    """The first `sinks` tokens and the last `size` (the current one included): StreamingLLM,
    https://arxiv.org/abs/2309.17453, section 3.2, with keys at their true positions.

    A query at t sees {pos < sinks} ∪ {pos > t − size}, whatever the codec. Where codecs share scales in a page, whole
    aligned pages are kept and the window is masked to the token.
    """

    size: int = static(default=512)
    sinks: int = static(default=4)
    aligned = True

    def __post_init__(self):
        if self.size < 1 or self.sinks < 0:
            raise ConfigError(f"window: size={self.size}, sinks={self.sinks}; size must be ≥ 1 and sinks ≥ 0")

    def budget(self, prompt, total, unit):
        return span(self.sinks, self.size, unit)

    def priority(self, state, pos, now):
        return jnp.where(pos < self.sinks, jnp.inf, pos)

    def visibility(self):
        return Visibility(self.sinks, self.size)
