"""What the model itself needed to repeat the prompt."""

import jax.numpy as jnp

from kvlab.core import part
from kvlab.retention.sized import Sized


@part
class KVzip(Sized):
    """Keeps the tokens that got the largest attention weights while the model repeated its prompt: `kvlab.replay`.

        priority(token) = max over the replay's queries and the query heads of a KV head of the attention weight

    https://arxiv.org/abs/2505.23416, section 3, but with an equal budget for every layer and head, where the article lets one
    threshold run through all of them: expect less from the same number of tokens. Prefill takes an extra pass over as many
    tokens as the prompt has, so a prompt cannot be streamed. Tokens that come afterwards, which nothing has repeated, stay
    longest.
    """

    needs = ("importance",)

    def score(self, key, value, pos, **seen):
        return jnp.broadcast_to(seen["importance"], key.shape[:3])

    def priority(self, state, pos, now):
        return state
