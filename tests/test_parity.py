"""The plain policy is dense causal attention, however the tokens came into the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import attention
from kvlab.attention import AttentionSpec
from kvlab.codec import Raw
from kvlab.core import Record
from kvlab.decode import Engine
from kvlab.layout import Contiguous
from kvlab.loop import fill
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll
from tests import tools

FULL = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())
SPECS = [AttentionSpec(0.2), AttentionSpec(0.2, window=50), AttentionSpec(0.2, softcap=2.0)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_full_policy_is_dense_causal_attention(spec):
    s = tools.sequence(spec=spec)
    _, _, seen = tools.run(FULL, s)
    for step in (0, 7, 63, s.steps - 1):
        for b in range(2):
            now = s.lengths[b] + step
            ok = spec.sees(jnp.arange(s.key.shape[2]), now)
            key, value = jnp.asarray(s.key[b : b + 1]), jnp.asarray(s.value[b : b + 1])
            want = attention.dense(jnp.asarray(s.query[step, b : b + 1]), key, value, ok, spec)
            np.testing.assert_allclose(seen["out"][step, b : b + 1], want, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 256), (512, 512)])
def test_prefill_in_blocks_is_dense_causal_attention(spec, blocks, rng):
    B, H, G, T, D = 2, 2, 3, 256, 16
    query, key, value = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((B, T, H, G, D), (B, H, T, D), (B, H, T, D)))
    got = attention.prefill(query, key, value, spec, *blocks)
    ok = jnp.tile(spec.sees(jnp.arange(T), jnp.arange(T)[:, None]), (G, 1))
    want = attention.dense(jnp.moveaxis(query, 1, 3).reshape(B, H, G * T, D), key, value, ok, spec)
    np.testing.assert_allclose(got, jnp.moveaxis(want.reshape(B, H, G, T, D), 3, 1), atol=1e-5)


WINDOWS = [n for n in tools.PRODUCT if n[0] == "window" and n[3] == "read_all"]
OFTEN = [n for n in WINDOWS if n[2] == "contiguous" or n[1] in ("raw", "int8_channel")]  # a layout writes tokens, or pages


@pytest.mark.parametrize("names", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in WINDOWS], ids="-".join)
def test_prefill_of_a_prompt_equals_appending_it(names):
    """A cache filled with T tokens reads like one filled with 64 and appended to (pages aligned, so codes agree)."""
    policy, s = tools.make(*names), tools.sequence(lengths=(150, 150), steps=20)
    _, _, whole = tools.run(policy, s)
    short = Record(s.record.key_BHTD[:, :, :64], s.record.value_BHTD[:, :, :64], s.record.pos_BT[:, :64])
    cache = fill(policy, short, policy.budget(150, 170))
    by_step = lambda x: jnp.asarray(np.moveaxis(x[:, :, 64:150], 2, 0))
    now = jnp.broadcast_to(jnp.arange(64, 150)[:, None], (86, 2))
    cache = tools.append(policy, cache, by_step(s.key), by_step(s.value), now)
    key, value = tools.appended(s)
    _, seen = tools.decode(policy, cache, key, value, jnp.asarray(s.query), jnp.asarray(s.lengths), s.spec)
    np.testing.assert_allclose(seen["out"], whole["out"], atol=2e-5)


def test_nothing_to_read_gives_zero_and_no_gradient():
    empty = Record(jnp.zeros((1, 2, 64, 16)), jnp.zeros((1, 2, 64, 16)), jnp.full((1, 64), -1))
    cache = fill(FULL, empty, 64)
    spec, now = AttentionSpec(0.25), jnp.array([5])

    def output(query):
        done = FULL.attend(cache, query, now, spec)
        return done.out_BHQD.sum(), done

    (_, done), gradient = jax.value_and_grad(output, has_aux=True)(jnp.ones((1, 2, 3, 16)))
    assert not done.out_BHQD.any() and not gradient.any() and np.isneginf(done.lse_BHQ).all()
    assert not done.info.entropy_BHQ.any() and not done.info.reads_BH.any()


def test_entropy_and_reads_are_those_of_the_softmax():
    s = tools.sequence(steps=3)
    _, _, seen = tools.run(FULL, s)
    logits = np.einsum("hgd,hsd->hgs", s.query[2, 0], s.key[0, :, : s.lengths[0] + 3]) * s.spec.scale
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(seen["entropy"][2, 0], -(p * np.log(p)).sum(-1), atol=1e-4)
    assert (seen["reads"][2, 0] == s.lengths[0] + 3).all()


def test_decode_equals_prefill_of_the_same_tokens(tiny, rng):
    """Feeding tokens one by one gives the logits that prefilling them gives."""
    engine, ids = Engine(tiny), rng.integers(0, 256, 90).tolist()
    session = engine.start(engine.prefill([ids[:70]]), FULL, 20, forced=[ids[70:]])
    fed = session.run(20, watch=["logits"]).logits
    for i in (0, 9, 19):
        np.testing.assert_allclose(fed[i], engine.prefill([ids[: 71 + i]]).logits_BV, atol=1e-4)
