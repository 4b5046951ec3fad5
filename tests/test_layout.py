"""Layouts against canonical codes in numpy, and against each other; what reading few pages costs in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import attention, memory, reading
from kvlab.attention import AttentionSpec
from kvlab.bench import select
from kvlab.codec import KV, NF4, Int2, Int4, Outliers
from kvlab.core import PAGE, Around, Record
from tests import tools

pytestmark = pytest.mark.compiled_quickly

B, H, N, D = 2, 3, 5, 8
SINGLE = [name for name, codec in tools.CODECS.items() if max(codec.keys.group, codec.values.group) == 1]
NARROW = {  # parameters of 4 and 2 rows a page, and of several numbers a token
    "int4": KV(Int4("channel", 16), Int4("token", 4)),
    "int2": KV(Int2("token", 8), Int2("channel", 32)),
    "outliers": Outliers(KV(Int4("channel", 32), NF4(8)), 0.2),
}
HELD = tools.CODECS | NARROW
HELD_BHN = np.ones((B, H, N), bool)
everywhere = pytest.mark.parametrize("layout", [tools.bound(x, D) for x in tools.LAYOUTS.values()], ids=tools.LAYOUTS)


@functools.cache
def codes(codec, seed=0, pages=N, slots=PAGE):
    key, value = np.random.default_rng(seed).standard_normal((2, B, H, pages, slots, D), np.float32)
    return jax.jit(lambda k, v: {"k": codec.keys.encode(k), "v": codec.values.encode(v)})(key, value)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def numpy(code):
    return jax.tree.map(np.array, code)


@everywhere
@pytest.mark.parametrize("codec", HELD.values(), ids=HELD)
def test_what_was_packed_comes_back(layout, codec, rng):
    """All of it, a slice, named pages and named tokens, for leaves of a number per token and of one per page."""
    code = codes(codec)
    page, slot = rng.integers(0, N, (B, H, 4)), rng.integers(0, N * PAGE, (B, H, 9))

    @jax.jit
    def read(code, start, page, slot):
        held = layout.pack(code, HELD_BHN)
        tokens = layout.tokens(held, slot)
        decode = lambda code: (codec.keys.decode(code["k"]), codec.values.decode(code["v"]))
        both = tuple(zip(decode(code), decode(tokens)))
        return layout.slice(held, 0, N), layout.slice(held, start, 2), layout.pages(held, page), tokens, both

    everything, part, pages, tokens, decoded = read(code, 2, page, slot)
    want = numpy(code)
    same(everything, want)
    same(part, jax.tree.map(lambda x: x[:, :, 2:4], want))
    same(pages, jax.tree.map(lambda x: np.take_along_axis(x, page[..., None, None], 2), want))
    each = lambda x: np.repeat(x, PAGE // x.shape[3], 3).reshape(B, H, N * PAGE, 1, -1)
    same(tokens, jax.tree.map(lambda x: np.take_along_axis(each(x), slot[..., None, None], 2), want))
    for whole, single in decoded:  # a token is what it is within its page
        flat = np.asarray(whole).reshape(B, H, N * PAGE, 1, D)
        np.testing.assert_allclose(single, np.take_along_axis(flat, slot[..., None, None], 2), atol=1e-6)


def written(layout, code, page, offset, new):
    """All canonical codes after a write."""
    write = lambda code, *at: layout.slice(layout.write(layout.pack(code, HELD_BHN), *at), 0, N)
    return jax.jit(write)(code, page, offset, new)


@everywhere
@pytest.mark.parametrize("codec", HELD.values(), ids=HELD)
def test_pages_are_written_where_they_are_named(layout, codec, rng):
    """Every row and head at a page of its own; a page past the end changes nothing."""
    page = rng.integers(0, N, (B, H))
    page[0, 1], page[1, 2] = N, N + 3
    code, new = codes(codec), codes(codec, 1, pages=1)
    got = written(layout, code, page, None, new)
    want = numpy(code)
    for b, h in np.ndindex(B, H):
        if page[b, h] < N:
            for old, fresh in zip(jax.tree.leaves(want), jax.tree.leaves(numpy(new))):
                old[b, h, page[b, h]] = fresh[b, h, 0]
    same(got, want)


@everywhere
@pytest.mark.parametrize("name", SINGLE)
def test_tokens_are_written_where_they_are_named(layout, name, rng):
    codec = tools.CODECS[name]
    page, offset = rng.integers(0, N, (B, H)), rng.integers(0, PAGE, (B, H))
    page[0, 0], page[1, 1] = N, N + 3
    code, new = codes(codec), codes(codec, 1, pages=1, slots=1)
    got = written(layout, code, page, offset, new)
    want = numpy(code)
    for b, h in np.ndindex(B, H):
        if page[b, h] < N:
            for old, fresh in zip(jax.tree.leaves(want), jax.tree.leaves(numpy(new))):
                old[b, h, page[b, h], offset[b, h]] = fresh[b, h, 0, 0]
    same(got, want)


@pytest.mark.parametrize("codec,selection,capacity", [
    ("raw", "read_all", 1152), ("raw", "read_all", 3072), ("kivi", "read_all", 1152),
    ("raw", "hysparse", 1152), ("kivi", "pages", 1152),
])  # fmt: skip
def test_layouts_read_alike(codec, selection, capacity):
    """Answers do not depend on where codes lie: in one pass, in blocks (less than half is live, or coded), and picked."""
    s = tools.sequence(lengths=(1100, 900), bucket=1152, steps=1)
    answers = []
    for layout in tools.LAYOUTS:
        policy = tools.make("keep_all", codec, layout, selection)
        cache = jax.jit(policy.fill, static_argnums=1)(s.record, capacity)
        answers.append(jax.jit(policy.attend, static_argnums=3)(cache, s.query[0], jnp.asarray(s.lengths - 1), s.spec))
    for got in answers[1:]:
        np.testing.assert_array_equal(got.info.reads_BH, answers[0].info.reads_BH)
        np.testing.assert_allclose(got.out_BHQD, answers[0].out_BHQD, atol=1e-5)
        np.testing.assert_allclose(got.lse_BHQ, answers[0].lse_BHQ, atol=1e-5)


@pytest.mark.parametrize("layout", tools.LAYOUTS)
def test_exact_logits_do_not_depend_on_the_layout(layout):
    """What an oracle sees of a long cache equals products with the keys."""
    policy, s = tools.make("keep_all", "raw", layout, "read_all"), tools.sequence(lengths=(1100, 900), bucket=1152, steps=1)
    cache = jax.jit(policy.fill, static_argnums=1)(s.record, 1152)
    query = jnp.asarray(s.query[0])
    got = jax.jit(functools.partial(reading._logits, policy, spec=AttentionSpec(1.0)))(cache, query, query)
    for b, length in enumerate((1100, 900)):
        want = np.einsum("hgd,hsd->hgs", s.query[0, b], s.key[b, :, :length])
        np.testing.assert_allclose(got[b].reshape(2, 3, -1)[..., :length], want, atol=1e-4)


@pytest.mark.parametrize("kind,layout", select.LAYOUT.items())
def test_what_the_benchmark_times_is_dense_attention_over_what_is_picked(kind, layout):
    """At its own widths, 32 pages long: half of the tokens, against a masked softmax over the keys themselves."""
    selection = select.gated(kind, 0.5, "float16")
    caches, query, now = select.filled(2048, selection)
    cache = caches[layout]
    policy = select.policy(selection, layout)
    out, reads = jax.jit(select.attend)(policy, cache, query, now)
    choose = lambda cache, query: (
        selection.select(cache.index, query * select.DIM**-0.5, cache.pos >= 0, cache, Around(None, None)).index
    )
    picked = np.asarray(jax.jit(choose)(cache, query))
    ok = np.zeros((1, select.HEADS, 2048 // (PAGE if kind == "page" else 1)), bool)
    for h in range(select.HEADS):
        ok[0, h, picked[0, h][picked[0, h] >= 0]] = True
    ok = np.repeat(ok, 2048 // ok.shape[-1], -1)
    assert 0.45 < ok.mean() < 0.55 and (np.asarray(reads) == ok.sum(-1)).all()
    key, value = (caches["contiguous"].memory[x]["x"] for x in "kv")
    dense = jax.jit(attention.dense, static_argnums=4)
    want = dense(query, np.swapaxes(key, 2, 3), value, ok[:, :, None], AttentionSpec(select.DIM**-0.5))
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_the_benchmark_reports_every_piece(capsys):
    figures = select.main(2048, 0.5, "int8", 1)
    assert all(figures[name] > 0 for name in ("speedup_page", "speedup_token", "scoring_ms", "topk_ms", "dense_ms"))
    assert figures["dense_ms"] == min(figures[f"{name}_ms"] for name in select.DENSE)
    assert figures["bytes_read"]["dense"] == memory.kv_bytes(1, 2048, 1, select.HEADS, select.DIM, 4)
    assert figures["bytes_read"]["page"] < 0.6 * figures["bytes_read"]["dense"]


@pytest.mark.parametrize("codec", [*tools.CODECS, "kivi_2", "outliers"])
def test_reading_pages_unpacks_no_more_than_those(codec):
    """Of 512 pages one page of each head lies unpacked at a time, and nothing of the cache's own size."""
    policy = dataclasses.replace(tools.make("keep_all", codec, "page_major", "pages"), selection=tools.LatePages(52))
    shape = jax.ShapeDtypeStruct
    vector = shape((2, 2, 32_768, 64), "float32")
    cache = jax.eval_shape(lambda r: policy.fill(r, 32_768), Record(vector, vector, shape((2, 32_768), "int32")))
    query, now = shape((2, 2, 3, 64), "float32"), shape((2,), "int32")
    program = jax.jit(lambda c, q, t: policy.attend(c, q, t, AttentionSpec(0.125)).out_BHQD).lower(cache, query, now).compile()
    masks, page = 4 * cache.pos.size, 2 * 2 * 2 * PAGE * 64 * 4  # positions that may be seen; a page of each row and head
    assert memory.compiled(program).temporaries < masks + 4 * page
