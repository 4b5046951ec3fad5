"""Page scores by a kernel against those through XLA."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import reading
from kvlab.codec import Int8
from kvlab.core import Around
from kvlab.errors import ConfigError
from kvlab.kernels import gate
from kvlab.layout import PageMajor
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from tests.tools import gate_layer, selection, sequence

pytestmark = pytest.mark.compiled_quickly

page_scores = gate.page_scores
B, H, G, N, D = 2, 2, 3, 11, 32
PLATFORMS = {"cuda": ("triton", "__gpu$xla.gpu.triton"), "tpu": ("tpu", "tpu_custom_call")}
CASES = [
    ("mean", "float16", "none"),
    ("mean", "float32", "tempered"),
    ("softmax", "int8", "none"),
    ("softmax", "bfloat16", "softmax"),
]


def _given(pool, dtype, norm, rank=8):
    """A selection and what it is asked; page 3 of every head is hidden, and all of the second row's first head."""
    rng = np.random.default_rng(0)
    layer = gate_layer(kv_heads=H, head_dim=D, pool=pool, rank=rank)
    asked = selection("hysparse", layer, sparsity=0.6, recent=8, granularity="page", dtype=dtype, window_norm=norm)
    key = jnp.asarray(rng.standard_normal((B, H, N, 64, D)), jnp.float32)
    pos = jnp.broadcast_to(jnp.arange(N * 64).reshape(N, 64), (B, H, N, 64))
    visible = jnp.asarray(rng.random((B, H, N, 64)) < 0.3).at[:, :, 3].set(False).at[1, 0].set(False)
    query = jnp.asarray(rng.standard_normal((B, H, G, D)), jnp.float32)
    return asked, (asked.start(key, pos), query, visible, pos)


def _scores(asked, implementation):
    def scores(state, query, visible, pos):
        around = Around(None, None, implementation)
        return asked.page_scores(state, query, visible, types.SimpleNamespace(pos=pos), around)

    return jax.jit(scores)


@pytest.mark.parametrize(("pool", "dtype", "norm"), CASES)
def test_parity(pool, dtype, norm):
    asked, given = _given(pool, dtype, norm)
    want, got = (np.asarray(_scores(asked, how)(*given)) for how in ("xla", "interpret"))
    assert np.isneginf(want).sum() == N + 3 == np.isneginf(got).sum()
    some = np.isfinite(want)
    np.testing.assert_allclose(got[some], want[some], rtol=1e-5, atol=1e-5)


def test_a_policy_picks_by_it(monkeypatch):
    s, calls = sequence((700, 410), bucket=704, steps=1, D=D), []
    monkeypatch.setattr(gate, "page_scores", lambda *args: calls.append(args[-1]) or page_scores(*args))
    picked = []
    for implementation in ("xla", "interpret"):
        asked = selection("hysparse", gate_layer(head_dim=D), sparsity=0.6, recent=8, granularity="page")
        policy = Policy(KeepAll(), Int8("channel"), PageMajor(), asked, implementation)
        cache = jax.jit(policy.fill, static_argnums=1)(s.record, 768)
        pick = jax.jit(lambda cache, query, pos, policy=policy: reading.pick(policy, cache, query, pos, s.spec)[0].index)
        picked.append(np.asarray(pick(cache, jnp.asarray(s.query[0]), jnp.asarray(s.lengths) - 1)))
    assert calls == ["interpret"]
    np.testing.assert_array_equal(*picked)
    assert 0 < (picked[0] >= 0).sum(-1).max() < 8


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("pool", "dtype", "norm"), CASES)
def test_it_lowers(pool, dtype, norm, platform):
    implementation, mark = PLATFORMS[platform]
    asked, given = _given(pool, dtype, norm)
    text = _scores(asked, implementation).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(mark) >= (2 if pool == "softmax" else 1)


def test_refusals():
    asked, given = _given("mean", "float16", "none", rank=6)
    with pytest.raises(ConfigError, match="powers of two"):
        _scores(asked, "triton")(*given)
    index, queries, visible, _ = given
    with pytest.raises(ConfigError, match="give their mean"):
        gate.page_scores(index, jnp.zeros((B, H, 2, 6)), visible, "float16", False, 0.0, "interpret")
    with pytest.raises(ConfigError, match="no kernel for page scores"):
        gate.page_scores(index, jnp.zeros((B, H, 1, 6)), visible, "float16", False, 0.0, "xla")
