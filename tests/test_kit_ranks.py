"""The kit sees rules whose ranking depends on pads or is not a number."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import attention
from kvlab.codec import Raw
from kvlab.core import part
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import RETENTIONS
from kvlab.retention.sized import Sized
from kvlab.selection import ReadAll
from kvlab.testing import Breach, sequence
from kvlab.testing.contract import ranks

pytestmark = pytest.mark.compiled_quickly

RULES = "random key_norm keydiff lagkv h2o tova snapkv observed_attention"


@part
class Crowd(Sized):
    """Unlike the sum of all keys, pads and all."""

    renews = True

    def score(self, key, value, pos):
        return -(key * key.sum(2, keepdims=True)).sum(-1)

    def priority(self, state, pos, now):
        return state


@part
class Logarithm(Sized):
    def priority(self, state, pos, now):
        return jnp.log(pos - 5.0)


@part
class Dice(Sized):
    def priority(self, state, pos, now):
        return jnp.asarray(np.random.default_rng().random(pos.shape))


def policy(rule):
    return Policy(rule, Raw(), Contiguous(), ReadAll())


@pytest.mark.parametrize("rule, words", [(Crowd, "has no position"), (Logarithm, "not a number"), (Dice, "randomness")])
def test_wrong_rankings_are_seen(rule, words):
    """Even where the budget is so near a prompt's length that hardly anything goes."""
    with pytest.raises(Breach, match=words):
        ranks(policy(rule(size=96)), sequence.sequence((150, 97), 192, 4))


@pytest.mark.parametrize("name", RULES.split())
def test_rules_of_the_field_pass(name):
    ranks(policy(RETENTIONS[name](size=96)), sequence.sequence((150, 97), 192, 4))


@pytest.mark.parametrize("length", [64, 100, 192, 256])
def test_attention_counts_every_query_once(length):
    """What all tokens got adds up to one per query, whether or not blocks of queries divide the prompt."""
    s = sequence.sequence((length,), length, 1)
    got = attention.columns(s.prompt_query, s.record.key_BHTD, s.record.pos_BT, s.spec)
    np.testing.assert_allclose(got.sum(-1), length, rtol=1e-4)
