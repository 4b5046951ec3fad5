"""Every part with every part: shapes of all products, a covering subset for real, the whole product behind a marker."""

import jax
import numpy as np
import pytest

from kvlab import memory
from kvlab.codec import KV, Int2, Int4, Int8, Raw
from kvlab.core import PAGE
from kvlab.layout import Contiguous, PageMajor
from kvlab.loop import fill
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll
from tests import tools

pytestmark = pytest.mark.compiled_quickly


@pytest.mark.parametrize("names", tools.QUICK, ids="-".join)
def test_shapes(names):
    """A product fills, appends and attends with the shapes it promises, and appending changes none."""
    check_shapes(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", [n for n in tools.PRODUCT if n not in tools.QUICK], ids="-".join)
def test_shapes_of_the_rest(names):
    check_shapes(names)


def check_shapes(names):
    policy, s = tools.make(*names), tools.sequence(steps=4)
    budget = policy.budget(150, 192)
    cache = jax.eval_shape(lambda r: policy.fill(r, budget), s.record)
    step = lambda c, k, q, t: policy.attend(policy.append(c, k, k, t), q, t, s.spec)
    key, query, now = (jax.ShapeDtypeStruct(x, d) for x, d in (((2, 2, 32), "f4"), ((2, 2, 3, 32), "f4"), ((2,), "i4")))
    done = jax.eval_shape(step, cache, key, query, now)
    assert done.out_BHQD.shape == (2, 2, 3, 32) and done.lse_BHQ.shape == (2, 2, 3)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), cache, done.cache)
    assert all(jax.tree.leaves(same))
    assert budget % policy.unit == 0 and cache.pos.shape == (2, 2, -(-budget // PAGE), PAGE)


def check(names):
    policy, s = tools.make(*names), tools.sequence()
    first, last, seen = tools.run(policy, s)
    for step in (0, 1, 40, 100, s.steps - 1):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)
    assert memory.resident(first) == memory.resident(last)
    budget, pos = first.budget, seen["pos"]
    live = (pos >= 0).sum((-1, -2))
    assert live.max() <= budget
    for b, h in np.ndindex(2, 2):
        kept = pos[-1, b, h][pos[-1, b, h] >= 0]
        assert len(set(kept)) == len(kept), "a position is stored twice"
        assert s.lengths[b] + s.steps - 1 in kept, "the newest token is not stored"
        assert kept.max() < s.lengths[b] + s.steps


@pytest.mark.parametrize("names", tools.COVERING, ids="-".join)
def test_equals_the_dense_oracle(names):
    """Outputs equal numpy's dense attention over what is stored; positions are unique; the budget holds; bytes are constant."""
    check(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", [n for n in tools.PRODUCT if n not in tools.COVERING], ids="-".join)
def test_the_whole_product_equals_the_dense_oracle(names):
    check(names)


def test_one_trace_for_sixty_four_steps():
    """CASES 18: decoding compiles once; a policy that is equal does not compile again."""
    traces = 0

    def step(policy, cache, k, q, t):
        nonlocal traces
        traces += 1
        return policy.attend(policy.append(cache, k, k, t), q, t, s.spec).cache

    s = tools.sequence(steps=64)
    jitted, key = jax.jit(step), tools.appended(s)[0]
    for _ in range(2):
        policy = tools.make("window", "int8_channel", "contiguous", "read_all")
        cache = fill(policy, s.record, policy.budget(150, 214))
        for i in range(64):
            cache = jitted(policy, cache, key[i], s.query[i], s.lengths + i)
    assert traces == 1


def test_parts_of_different_classes_never_share_a_program():
    """Structures of parts with equal static fields differ all the same, so jit cannot run one's program for another."""
    alike = Int4(), Int2(), Contiguous(), PageMajor(), ReadAll(), KeepAll()
    found = [jax.tree.structure(x) for x in alike]
    assert all((a == b) == (i == j) for i, a in enumerate(found) for j, b in enumerate(found))
    assert [jax.tree.structure(type(x)()) for x in alike] == found


@pytest.mark.parametrize("k,v", [(Int8("channel"), Raw("bfloat16")), (Raw("float16"), Int8())], ids=str)
def test_keys_and_values_have_widths_of_their_own(k, v):
    """CASES 14: seven query heads on one KV head, keys of one width and values of another, each coded by its own codec alone."""
    s = tools.sequence(lengths=(150, 97), steps=70, H=1, G=7)
    policy = Policy(KeepAll(), KV(k, v), Contiguous(), ReadAll())
    first, _, seen = tools.run(policy, s)
    for step in (0, 30, 69):
        np.testing.assert_allclose(seen["out"][step], tools.oracle(policy, s, seen, step), atol=2e-5)
    per_page = sum(x.nbytes for x in jax.tree.leaves(first.memory)) / (first.pos.shape[2] * 2)
    assert per_page == k.page_bytes(32) + v.page_bytes(32)
