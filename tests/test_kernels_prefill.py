"""The ragged prefill kernel against attention written out in numpy, and in the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import loop
from kvlab.decode import Engine
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.kernels import prefill, ragged
from tests.tools import tiny_model

pytestmark = pytest.mark.compiled_quickly

FORMS = {
    "xla": None,
    "programs": functools.partial(ragged.programs, interpret=True),
    "grid": functools.partial(ragged.grid, interpret=True),
}
PLATFORMS = {"cuda": ("triton", "__gpu$xla.gpu.triton"), "tpu": ("tpu", "tpu_custom_call")}
CASES = {
    "ragged, empty rows": ([5, 0, 70, 1], [5, 3, 90, 0], (3, 1), 64, "float32", {}),
    "more queries than keys": ([40, 7, 3], [10, 150, 3], (4, 4), 80, "float32", {"window": 17, "softcap": 4.0}),
    "several blocks": ([33, 200], [140, 200], (3, 1), 256, "float32", {"window": 70}),
    "not causal": ([64, 9], [64, 80], (8, 2), 128, "bfloat16", {"causal": False, "scale": 0.2}),
    "window, not causal": ([20], [50], (2, 2), 64, "bfloat16", {"causal": False, "window": 8}),
}


@functools.cache
def _case(name):
    """A case's arrays, options and what numpy says of them."""
    queries, keys, heads, dim, dtype, options = CASES[name]
    given = _given(queries, keys, heads, dim, dtype)
    return given, options, _naive(*given, **options)


def _given(queries, keys, heads, dim, dtype, seed=0):
    rng = np.random.default_rng(seed)
    begins = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (queries, keys)]
    shapes = [(begins[0][-1], heads[0], dim), *[(begins[1][-1], heads[1], dim)] * 2]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q, k, v, *map(jnp.asarray, begins), max(queries), max(keys)


def _naive(q, k, v, begins_q, begins_k, _q, _k, causal=True, window=None, softcap=None, scale=None):
    """Row by row in float64: output `[total_q, Hq, D]`, log-sum-exp `[Hq, total_q]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = np.zeros_like(q), np.full((q.shape[1], len(q)), -np.inf)
    for row in range(len(begins_q) - 1):
        some, all_ = slice(begins_q[row], begins_q[row + 1]), slice(begins_k[row], begins_k[row + 1])
        length = all_.stop - all_.start
        for i in range(some.start, some.stop):
            here = i - some.stop + length
            seen = [j for j in range(length) if (not causal or j <= here) and (window is None or j > here - window)]
            if not seen:
                continue
            keys, values = k[all_][seen], v[all_][seen]
            logits = np.einsum("hd,khd->hk", q[i], keys) * (q.shape[2] ** -0.5 if scale is None else scale)
            logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
            top = logits.max(1, keepdims=True)
            mass = np.exp(logits - top)
            lse[:, i] = top[:, 0] + np.log(mass.sum(1))
            out[i] = np.einsum("hk,khd->hd", mass / mass.sum(1, keepdims=True), values)
    return out, lse


def _by(monkeypatch, form):
    """`varlen_attention` by one of FORMS."""
    if form != "xla":
        monkeypatch.setattr(prefill, "attend", lambda *args: ragged.run(FORMS[form], *args[:-1]))
    plain = prefill._varlen.__wrapped__
    anew = jax.jit(lambda *args: plain(*args), static_argnums=(5, 6, 7))
    monkeypatch.setattr(prefill, "_varlen", anew)
    return prefill.varlen_attention


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_packed_rows(monkeypatch, case, form):
    given, options, (want, want_lse) = _case(case)
    out, lse = _by(monkeypatch, form)(*given, **options)
    most = 1e-5 if given[0].dtype == jnp.float32 else 2e-2
    assert out.dtype == given[0].dtype and out.shape == given[0].shape
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=most)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["programs", "grid"])
def test_blocks_that_nobody_sees_are_not_read(monkeypatch, form):
    """Keys 0 … 255 lie outside of every window, in blocks of their own: NaN there reaches no output."""
    q, k, v, *rest = _given([128], [512], (2, 1), 64, "float32")
    begins_q, begins_k = jnp.asarray([0, 64, 128]), jnp.asarray([0, 448, 512])
    spoiled = [x.at[:256].set(jnp.nan) for x in (k, v)]
    call = _by(monkeypatch, form)
    want, _ = call(q, k, v, begins_q, begins_k, 64, 448, window=20)
    out, _ = call(q, *spoiled, begins_q, begins_k, 64, 448, window=20)
    np.testing.assert_array_equal(out, want)
    out, _ = call(q, *spoiled, begins_q, begins_k, 64, 448)
    assert np.isnan(out).any()


def test_packed_heads():
    q, k, v, begins, _, longest, _ = _given([30, 11], [30, 11], (4, 2), 64, "float32")
    want = prefill.varlen_attention(q, k, v, begins, begins, longest, longest, window=9)
    got = prefill.varlen_attention_packed(jnp.concatenate([q, k, v], 1), 2, begins, longest, window=9)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="leaves no query heads"):
        prefill.varlen_attention_packed(jnp.concatenate([q, k, v], 1), 4, begins, longest)


def test_what_does_not_fit_is_refused():
    q, k, v, *rest = _given([8], [8], (4, 2), 64, "float32")
    for args, options, words in (
        ((q, k[:, :1], v), {}, "Hkv a divisor"),
        ((q, k.astype(jnp.bfloat16), v), {}, "the same"),
        ((q, k, v), {"window": 0}, "window=0"),
        ((q, k, v), {"implementation": "cuda"}, "allowed: "),
    ):
        with pytest.raises(ConfigError, match=words):
            prefill.varlen_attention(*args, *rest, **options)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_it_lowers(platform, dim):
    implementation, mark = PLATFORMS[platform]
    shape, dtype = jax.ShapeDtypeStruct, jnp.float32 if dim in (64, 256) else jnp.bfloat16
    call = lambda *args: prefill.varlen_attention(*args, 300, 400, window=50, softcap=3.0, implementation=implementation)
    begins, keys = shape((5,), jnp.int32), shape((400, 2, dim), dtype)
    text = jax.jit(call).trace(shape((300, 6, dim), dtype), keys, keys, begins, begins).lower(lowering_platforms=(platform,))
    assert mark in text.as_text()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_whole_prefill_lowers(platform):
    implementation, mark = PLATFORMS[platform]
    model = tiny_model(head_dim=64, windows=(None, 32))
    args = model.config, model.params, jax.ShapeDtypeStruct((2, 128), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    text = loop.prefill.trace(*args, implementation=implementation).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(mark) >= 2  # a kernel for each layer


def test_the_engine_prefills_by_it():
    model = tiny_model(windows=(None, 24), softcap=6.0)
    prompts = [list(range(3, 140)), list(range(40)), [7]]
    want, got = (Engine(model, how).prefill(prompts) for how in ("xla", "interpret"))
    np.testing.assert_allclose(got.logits_BV, want.logits_BV, atol=2e-5)
    for a, b in zip(got.records, want.records):
        np.testing.assert_array_equal(a.pos_BT, b.pos_BT)
        real = (np.asarray(a.pos_BT) >= 0)[:, None, :, None]
        for x, y in ((a.key_BHTD, b.key_BHTD), (a.value_BHTD, b.value_BHTD)):
            np.testing.assert_allclose(np.where(real, x, 0), np.where(real, y, 0), atol=2e-5)
    assert not np.array_equal(got.logits_BV, want.logits_BV)  # it did run another program


def test_an_engine_says_what_it_lacks():
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        Engine(tiny_model(), "tritn")
    with pytest.raises(RefusedPolicy, match="an NVIDIA GPU"):
        Engine(tiny_model(), "triton").prefill([[1, 2]])
