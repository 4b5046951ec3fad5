"""What a prompt's last queries attend to: the base of TOVA and SnapKV."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvlab.attention import MASKED, AttentionSpec
from kvlab.core import part, static
from kvlab.retention.sized import Sized


@part
class LastQueries(Sized):
    """Base of retentions that rank a prompt by its last queries' attention, and later tokens by that of queries to come.

    Fields, besides those of `Sized`:
      spec: what the model demands of the layer's attention, set by `at`; without, no soft cap and no local window.
    """

    spec: AttentionSpec | None = static(default=None)
    needs = ("queries",)
    observes = True

    def at(self, layer, model):
        spec = model.attention(layer)
        return self if self.spec == spec else dataclasses.replace(self, spec=spec)

    def received(self, queries_BHWGD, key_BHTD, pos, last: int):
        """The attention that each token got from the `last` queries, their sum, the mean over a KV head's query heads.

        `[B, H, T]`, from whole rows of the causal softmax, one KV head at a time; `pos [B, 1, T]`. Queries before a row's
        first token give nothing.
        """
        B, H, T, _ = key_BHTD.shape
        spec = self.spec or AttentionSpec(1.0)
        now_BW = pos.max(-1) + jnp.arange(1 - last, 1)

        def head(n):
            row, head = n // H, n % H
            logits = spec.cap(jnp.einsum("wgd,td->wgt", queries_BHWGD[row, head, -last:], key_BHTD[row, head]))
            ok = spec.sees(pos[row, 0], now_BW[row][:, None])[:, None]
            weight = jax.nn.softmax(jnp.where(ok, logits, MASKED), -1)
            return jnp.where(ok, weight, 0.0).mean(1).sum(0)

        return lax.map(head, jnp.arange(B * H)).reshape(B, H, T)
