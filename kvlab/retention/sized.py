"""How much a retention keeps: a share of the prompt or a number of tokens."""

from kvlab.core import PAGE, Retention, kept, part, static
from kvlab.errors import ConfigError


@part
class Sized(Retention):
    """Base of retentions that keep a budget while decoding: a new token takes the place of the least important one.

    Fields:
      ratio: share of the longest prompt of a batch that is removed (`kvlab.core.kept`), or instead
      size: tokens that stay.
      unit: tokens evicted together while decoding: 1, 64 (a page), or whatever the other parts need.
      pool: "max" or "mean", how the importance of a page's tokens makes the page's.
    Errors: ConfigError unless exactly one of ratio and size is given.
    """

    ratio: float | None = static(default=None)
    size: int | None = static(default=None)
    unit: int | None = static(default=None)
    pool: str = static(default="max")

    def __post_init__(self):
        name = type(self).__name__.lower()
        if (self.ratio is None) == (self.size is None):
            given = f"ratio={self.ratio}, size={self.size}"
            raise ConfigError(f"{name}: {given}; give one: ratio = 0.5 (share removed) or size = 1024 (tokens kept)")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"{name}: size={self.size}; allowed: 1 or more")
        if self.ratio is not None:
            kept(1, self.ratio)
        if self.unit not in (None, 1, PAGE) or self.pool not in ("max", "mean"):
            raise ConfigError(f'{name}: unit={self.unit}, pool={self.pool!r}; unit: 1, {PAGE} or left out; pool: "max" or "mean"')

    def budget(self, prompt, total, unit):
        return self.size if self.ratio is None else kept(prompt, self.ratio)
