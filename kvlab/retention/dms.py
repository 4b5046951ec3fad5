"""A token learns, when it comes, whether it will go once it is no longer new."""

import jax.numpy as jnp

from kvlab.core import part
from kvlab.errors import ConfigError
from kvlab.retention.gated import Gated
from kvlab.retention.window import span


@part
class DMS(Gated):
    """Evicts tokens older than `delay` by a logit that was learned through the model, the highest first: dynamic memory
    sparsification.

        priority(pos) = ∞ where pos > now − delay, else −e(pos)        e: the token's eviction logit

    https://arxiv.org/abs/2506.05345, section 3. There a token goes when it leaves the delay if e > 0, so memory differs from
    text to text and meets its target on average. Here shapes are static: the budget is fixed, and those go whose e is highest
    among the tokens stored. `AdaKV` around it gives heads unequal shares, as the threshold does.

    The logit is that of an importance gate with its sign turned, e = −score, so whatever trained the gate, `gated` and `dms`
    can both evict by it. `kvlab train experiments/train_dms_smollm2.toml` trains one for the delay.

    Fields, besides those of `Gated`:
      delay: newest tokens, the current one included, that stay whatever their logit.
    Errors: ConfigError where the budget cannot hold them, and as `Gated`.
    """

    delay: int = 64

    def budget(self, prompt, total, unit):
        if self.delay < 1:
            raise ConfigError(f"dms: delay={self.delay}; allowed: 1 or more")
        given, need = super().budget(prompt, total, unit), span(0, self.delay, unit)
        if min(given, total) < min(need, total):
            raise ConfigError(
                f"dms: delay={self.delay} needs {need} tokens, the budget is {given}; give more tokens or a shorter delay"
            )
        return given

    def priority(self, state, pos, now):
        return jnp.where(pos > now - self.delay, jnp.inf, state)
