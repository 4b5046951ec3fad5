"""Bytes: formula = sum of arrays, ratios as promised, nothing cache-sized copied, nothing overwritten."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import compilation, memory
from kvlab.attention import AttentionSpec
from kvlab.codec import KV, NF4, Fp8, Int2, Int4, Int8, Kivi, Outliers, Raw
from kvlab.core import Record
from kvlab.layout import Contiguous
from kvlab.loop import fill
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Protect, Window
from kvlab.selection import ReadAll
from tests import tools

FULL = Policy(KeepAll(), Raw(), Contiguous(), ReadAll())


def test_the_formula():
    assert memory.kv_bytes(8, 131_072, 48, 8, 128, 2) == 206_158_430_208
    assert memory.kv_bytes(1, 1, 32, 8, 128, 2) == 131_072  # Llama-3-8B, one token


def shape(batch, heads, length, dim):
    f = jax.ShapeDtypeStruct
    return Record(f((batch, heads, length, dim), "f4"), f((batch, heads, length, dim), "f4"), f((batch, length), "i4"))


def filled(policy, batch, length, new, heads=3, dim=64):
    budget = policy.budget(length, length + new)
    return budget, jax.eval_shape(lambda r: policy.fill(r, budget), shape(batch, heads, length, dim))


@pytest.mark.parametrize("names", [n for n in tools.PRODUCT if n[3] == "read_all" and "norm" not in n[0]], ids="-".join)
@pytest.mark.parametrize("batch", [1, 3])
def test_resident_is_the_formula_exactly(names, batch):
    """CASES 17."""
    policy = tools.make(*names, dim=64)
    budget, cache = filled(policy, batch, 512, 70)
    bytes_ = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert bytes_ == memory.expected(policy, batch, 3, 64, budget)


@pytest.mark.parametrize("scale,length,most", [("token", 2048, 0.28), ("channel", 2048, 0.31), ("channel", 8192, 0.28)])
def test_int8_saves_what_it_promises(scale, length, most):
    policy = Policy(KeepAll(), Int8(scale), Contiguous(), ReadAll())
    size = lambda p: memory.expected(p, 1, 3, 64, filled(p, 1, length, 0)[0])
    assert size(policy) / size(FULL) <= most


@pytest.mark.parametrize("codec,most", [
    (Int4("token", 64), 0.17), (KV(Int4("channel", 64), Int4("token", 64)), 0.17), (Int4("token", 32), 0.18),
    (Int2("token", 32), 0.12), (Kivi(2), 0.14), (Fp8(), 0.29), (NF4(), 0.16), (Outliers(Int4("token", 64)), 0.18),
], ids=str)  # fmt: skip
def test_few_bits_save_what_they_promise(codec, most):
    """Of 8192 tokens, with scales, zero points, positions and the exact tail."""
    policy = Policy(KeepAll(), codec, Contiguous(), ReadAll())
    budget, cache = filled(policy, 1, 8192, 0)
    expected = memory.expected(policy, 1, 3, 64, budget)
    assert memory.resident(cache) == expected
    assert most - 0.03 < expected / memory.expected(FULL, 1, 3, 64, 8192) <= most


def test_caches_have_the_models_kv_heads():
    """CASES 12: 32 query heads on 8 KV heads make a cache of 8 heads."""
    _, cache = filled(Policy(Window(2044, 4), Raw(), Contiguous(), ReadAll()), 2, 4096, 0, heads=8, dim=128)
    assert cache.memory["v"]["x"].shape == (2, 8, 2048, 128)


def test_layers_have_budgets_of_their_own():
    """CASES 8 and 20: a short layer is short in memory, and each layer masks itself."""
    from kvlab.decode import Engine

    model = tools.tiny_model()
    engine, ids = Engine(model), np.random.default_rng(0).integers(0, 256, 300).tolist()
    policies = [Policy(Window(8, 0), Raw(), Contiguous(), ReadAll()), Policy(Window(250, 4), Raw(), Contiguous(), ReadAll())]
    session = engine.start(engine.prefill([ids]), policies, 8)
    reads = session.run(8, watch=["reads"]).reads
    assert [c.pos.shape[2] for c in session.state.caches] == [1, 4]
    assert (reads[:, 0] == 8).all() and (reads[:, 1] == 254).all()


def test_three_figures():
    """CASES 30: what was asked for, what is live, what is there."""
    s = tools.sequence(lengths=(128, 128), steps=1, bucket=128)
    policy = Policy(Window(28, 4), Int8(), Contiguous(), ReadAll())
    cache = fill(policy, s.record, policy.budget(128, 128))
    got = memory.footprint([policy], [cache], FULL, 128)
    bits = (32 + 4) / (4 * 32)
    assert got.nominal_ratio == pytest.approx(32 / 128 * bits) and got.logical_ratio == pytest.approx(32 / 128 * bits)
    assert got.resident_bytes == memory.resident(cache) // 2 and got.resident_ratio > got.logical_ratio


def compiled_step(policy, batch, length):
    """A decode loop of one layer with a donated cache at this capacity, compiled but not run."""
    spec, cache = AttentionSpec(0.125), filled(policy, batch, length - 64, 64)[1]
    f = jax.ShapeDtypeStruct

    def loop(policy, caches, x, pos):
        def body(carry):
            i, caches, x, pos = carry
            new = []
            for cache in caches:
                k = jnp.sin(x).mean(2)
                done = policy.attend(policy.append(cache, k, jnp.cos(k), pos), x, pos, spec)
                new.append(done.cache)
                x = jnp.tanh(x + done.out_BHQD)
            return i + 1, tuple(new), x, pos + 1

        return jax.lax.while_loop(lambda c: c[0] < 64, body, (0, caches, x, pos))

    jitted = jax.jit(loop, donate_argnums=1)
    return jitted.lower(policy, (cache,), f((batch, 3, 3, 64), "f4"), f((batch,), "i4")).compile(), cache


def test_programs_are_dropped_when_the_process_has_too_many_maps():
    """And what is needed again is compiled again."""
    traces = []
    double = jax.jit(lambda x: traces.append(0) or 2 * x)
    assert double(jnp.ones(3)).sum() == 6 and not compilation.relieve(10**9)
    double(jnp.ones(3))
    assert len(traces) == 1
    if Path("/proc/self/maps").exists():
        assert compilation.relieve(0) and double(jnp.ones(3)).sum() == 6 and len(traces) == 2


READ_ALL = [n for n in tools.PRODUCT if n[3] == "read_all"]
FEW = {"contiguous": tools.CODECS, "page_major": tools.CODECS, "bicl": ("raw", "int8_channel")}  # what meets a layout here
QUICK = [n for n in READ_ALL if n[1] in FEW[n[2]] and n[1] != "kivi" and n[0] not in ("key_norm_pages", "protect")]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("names", QUICK, ids="-".join)
def test_no_cache_sized_copy(names, batch):
    check_no_copy(names, batch)


@pytest.mark.parametrize("layout", tools.LAYOUTS)
def test_no_cache_sized_copy_of_packed_codes(layout):
    check_no_copy(("keep_all", "kivi_2", layout, "read_all"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("names", [n for n in READ_ALL if n not in QUICK], ids="-".join)
def test_no_cache_sized_copy_in_the_rest(names, batch):
    check_no_copy(names, batch)


def _keeping(size, rule):
    if isinstance(rule, Protect):
        return dataclasses.replace(rule, inner=_keeping(size, rule.inner))
    return rule if isinstance(rule, KeepAll) else dataclasses.replace(rule, size=size)


def check_no_copy(names, batch):
    """Donated caches are updated in place: no copy of a large leaf, temporaries below a quarter of the cache, at 32k."""
    policy = tools.make(*names, dim=64)
    policy = dataclasses.replace(policy, retention=_keeping(32_000, policy.retention))
    program, cache = compiled_step(policy, batch, 32_768)
    kinds = {"float32": "f32", "int8": "s8", "uint16": "u16", "uint8": "u8"}
    for leaf in (x for x in jax.tree.leaves(cache.memory) if x.size > 100_000):
        shape_ = f"{kinds[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]"
        assert not re.search(re.escape(shape_) + r"\S* copy\(", program.as_text()), f"{shape_} is copied"
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    account = memory.compiled(program)
    assert account.temporaries < total / 4
    assert account.aliased >= total - 4096, "a donated cache came back as a new buffer"
