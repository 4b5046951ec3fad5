"""Caches of few bits against the dense oracle, in every layout; what is stored is never coded again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import memory, parts
from kvlab.codec import KV, Int4, Kivi, PreRope
from kvlab.decode import Engine
from kvlab.errors import RefusedPolicy
from kvlab.layout import Contiguous
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll
from tests import tools

pytestmark = pytest.mark.compiled_quickly

layouts = pytest.mark.parametrize("layout", [name for name in tools.LAYOUTS if name != "bicl"])  # tests/test_bicl.py has codecs
TOLERANCE = {"hadamard": 2e-4, "pre_rope": 2e-4}  # sums and angles differ in the last bit, and so float16 may


@functools.cache
def sequence():
    """Two rows whose second pages fill after 8 and 31 steps."""
    return tools.sequence(lengths=(120, 97), bucket=128, steps=40)


@layouts
@pytest.mark.parametrize("codec", tools.MORE_CODECS)
def test_equals_the_dense_oracle(codec, layout):
    """CASES 13, 14 and 17 in a cache: outputs, bytes by formula and by array."""
    policy, s = tools.make("keep_all", codec, layout, "read_all"), sequence()
    first, last, seen = tools.run(policy, s)
    for step in (0, 20, 39):
        want = tools.oracle(policy, s, seen, step)
        np.testing.assert_allclose(seen["out"][step], want, atol=TOLERANCE.get(codec, 2e-5))
    assert memory.resident(first) == memory.resident(last) == memory.expected(policy, 2, 2, 32, first.budget)


@layouts
@pytest.mark.parametrize("codec,selection", [("kivi_2", "tokens"), ("outliers_kivi", "pages"), ("int4", "tokens")])
def test_what_is_picked_equals_the_dense_oracle(codec, selection, layout):
    """Single tokens of a page find their group's parameters."""
    policy, s = tools.make("keep_all", codec, layout, selection), sequence()
    _, _, seen = tools.run(policy, s)
    for step in (0, 39):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)


def held(policy, cache, pages):
    """Codes of the first pages of a cache."""
    return jax.tree.map(np.asarray, tools.codes(policy, cache, pages))


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@layouts
@pytest.mark.parametrize("codec", ["int4", "outliers_kivi", "nf4"])
def test_stored_codes_never_change(codec, layout):
    """Appending, cutting back, forking and reordering leave the codes of full pages bit for bit as they were."""
    policy, s = tools.make("keep_all", codec, layout, "read_all"), sequence()
    first, last, _ = tools.run(policy, s, 256)
    one, two = held(policy, first, 1), held(policy, last, 2)
    same(held(policy, last, 1), one)
    cut = tools.truncate(policy, last, jnp.asarray([130, 129]))
    same(held(policy, cut, 2), two)
    forked = tools.rows(policy, cut, jnp.asarray([1, 0, 1]))
    same(held(policy, forked, 2), jax.tree.map(lambda x: x[[1, 0, 1]], two))
    key, value = (x[:, jnp.asarray([1, 0, 1])] for x in tools.appended(s))
    later = tools.append(policy, forked, key, value, jnp.asarray([129, 130, 129]) + jnp.arange(40)[:, None])
    same(held(policy, later, 2), jax.tree.map(lambda x: x[[1, 0, 1]], two))
    assert int((later.pos >= 0).sum()) == 2 * (169 + 170 + 169)


def dense_chunk(policy, s, cache, query_BTHGD, start_B):
    """What a chunk's queries must give: softmax over what is stored and over the chunk so far, exact."""
    out, pos, waiting = np.zeros(query_BTHGD.shape), np.asarray(cache.pos), np.asarray(cache.waiting)
    for b, h in np.ndindex(out.shape[0], out.shape[2]):
        key, value = tools.stored(policy, s, pos, waiting, b, h)
        live, now = pos[b, h].reshape(-1) >= 0, start_B[b] + np.arange(out.shape[1])
        key, value = (np.concatenate([x[live], y[b, h, now]]) for x, y in ((key, s.key), (value, s.value)))
        logits = np.einsum("tgd,sd->tgs", query_BTHGD[b, :, h], key) * s.spec.scale
        own = np.arange(len(key)) - live.sum() <= np.arange(out.shape[1])[:, None]
        weight = np.where(own[:, None], np.exp(logits), 0)
        out[b, :, h] = np.einsum("tgs,sd->tgd", weight / weight.sum(-1, keepdims=True), value)
    return out


def test_kivi_through_a_caches_life():
    """Fill, 210 steps, a rollback, a fork, a chunk, 10 steps: the dense oracle throughout; 128 tokens stay exact as it grows."""
    policy, s = Policy(KeepAll(), Kivi(2), Contiguous(), ReadAll()), tools.sequence(steps=210)
    _, last, seen = tools.run(policy, s, 640)
    for step in (0, 42, 100, 209):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)
    for step, (b, h) in ((t, bh) for t in range(210) for bh in np.ndindex(2, 2)):
        pages = seen["waiting"][step, b, h]
        exact, now = seen["pos"][step, b, h][pages[pages >= 0]], s.lengths[b] + step
        assert np.isin(np.arange(max(now - 127, 0), now + 1), exact).all()
    rows, cut = [1, 0, 1], np.array([280, 310, 280], np.int32)
    cache = tools.rows(policy, tools.truncate(policy, last, jnp.asarray([310, 280])), jnp.asarray(rows))
    rng = np.random.default_rng(1)
    fresh = lambda x: np.concatenate([x[rows][:, :, :280], rng.standard_normal((3, *x[:, :, 280:].shape[1:]), np.float32)], 2)
    old_key, old_value, key, value = s.key[rows], s.value[rows], fresh(s.key), fresh(s.value)
    key[1, :, 280:310], value[1, :, 280:310] = old_key[1, :, 280:310], old_value[1, :, 280:310]
    query = rng.standard_normal((3, 70, 2, 3, 32), np.float32)
    then = dataclasses.replace(
        s, lengths=cut + 70, key=key, value=value, query=rng.standard_normal((10, 3, 2, 3, 32), np.float32)
    )
    where = cut[:, None] + np.arange(70)
    pick = lambda x, at: jnp.asarray(np.stack([x[b][:, at[b]] for b in range(3)]))
    want = dense_chunk(policy, then, cache, query, cut)
    extend = jax.jit(policy.extend, static_argnums=5)
    out, cache = extend(cache, jnp.asarray(query), pick(key, where), pick(value, where), jnp.asarray(where), s.spec)
    np.testing.assert_allclose(out, want, atol=2e-5)
    more = cut[:, None] + 70 + np.arange(10)
    key, value = (jnp.moveaxis(pick(x, more), 2, 0) for x in (key, value))
    _, seen = tools.decode(policy, cache, key, value, jnp.asarray(then.query), jnp.asarray(then.lengths), s.spec)
    seen = {name: np.asarray(x) for name, x in seen.items()}
    for step in (0, 9):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, then, seen, step), atol=2e-5)


def test_a_model_with_codecs_from_a_config_file():
    """Keys before the rotary embedding and turned values: a tiny model's logits stay within rounding of the full cache's."""
    model = tools.tiny_model(head_dim=32, local_rope_base=100.0, windows=(64, None))
    engine, ids = Engine(model), np.random.default_rng(0).integers(0, 256, 100).tolist()
    half = {"name": "raw", "dtype": "float16"}
    k, v = {"name": "pre_rope", "inner": half}, {"name": "hadamard", "inner": half}
    logits = []
    for table in ({}, {"codec": {"k": k, "v": v}}):
        session = engine.start(engine.prefill([ids]), parts.policy(table), 40, forced=[ids[:40]])
        logits.append(np.asarray(session.run(40, watch=["logits"]).logits))
    codec = session.policies[0].codec
    assert isinstance(codec, KV) and isinstance(codec.k, PreRope)
    np.testing.assert_array_equal(codec.k.frequency, model.config.rope(0).frequencies(32))
    error = np.abs(logits[1] - logits[0])
    assert 0 < error.max() < 0.02 * logits[0].std()


def test_tokens_cannot_be_evicted_from_shared_groups():
    for codec in (Int4("channel"), Int4(residual=64), PreRope(Kivi(4))):
        with pytest.raises(RefusedPolicy, match="replaces single tokens"):
            Policy(tools.RETENTIONS["key_norm"], codec, Contiguous(), ReadAll())
