"""The block-interleaved layout: where numbers lie, tile by tile; padding; what is refused; equal to the contiguous layout."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import memory, parts
from kvlab.codec import KV, Int2, Int4, Int8, Raw
from kvlab.core import PAGE
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.layout import Bicl
from kvlab.layout.bicl import order
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll
from tests import tools

pytestmark = pytest.mark.compiled_quickly

B, H, N = 2, 2, 3


def bound(tile, dim, **options):
    return tools.bound(Bicl(tile, **options), dim)


def packed(codec, tile, dim):
    key, value = np.random.default_rng(0).standard_normal((2, B, H, N, PAGE, dim), np.float32)
    code = jax.tree.map(np.asarray, {"k": codec.keys.encode(key), "v": codec.values.encode(value)})
    return code, jax.tree.map(np.asarray, bound(tile, dim).pack(code, np.ones((B, H, N), bool)))


def test_z_order():
    """Ranks of Morton codes with the column's bit lowest, counted by hand; a single row or two columns are row-major."""
    np.testing.assert_array_equal(order(1, 3), [[0, 1, 2]])
    np.testing.assert_array_equal(order(2, 2), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(order(2, 4), [[0, 1, 4, 5], [2, 3, 6, 7]])
    np.testing.assert_array_equal(order(2, 3), [[0, 1, 4], [2, 3, 5]])  # the codes 4 and 6 come last
    np.testing.assert_array_equal(order(4, 4), [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])


@pytest.mark.parametrize("tile,dim", [(32, 96), (64, 96), (32, 128), (64, 128), (32, 20)])
@pytest.mark.parametrize("codec", [Raw(), Raw("bfloat16"), KV(Int8("channel"), Int8())], ids=["raw", "bfloat16", "int8"])
def test_tiles_lie_where_they_should(codec, tile, dim):
    """Number for number: page, rank of the tile, keys channel by channel before values token by token, zeros at the end."""
    code, held = packed(codec, tile, dim)
    R, C = PAGE // tile, -(-dim // tile)
    assert held["tiles"].shape == (B, H, N, R * C, 2, tile, tile)
    for r, c, a, b in itertools.product(range(R), range(C), (0, 7, tile - 1), (0, 5, tile - 1)):
        tiles, token, channel = held["tiles"][:, :, :, order(R, C)[r, c]], r * tile + b, c * tile + a
        key, value = (code[side]["x"][:, :, :, token, channel] if channel < dim else 0 for side in "kv")
        np.testing.assert_array_equal(tiles[:, :, :, 0, a, b], key)
        np.testing.assert_array_equal(tiles[:, :, :, 1, b, a], value)
    assert all(held[side][name] is code[side][name] or (held[side][name] == code[side][name]).all()
               for side in "kv" for name in code[side] if name != "x")  # fmt: skip


@pytest.mark.parametrize("tile,dim,codec,widths", [
    (32, 96, Int4("channel", 32), (16, 16)), (64, 128, Int2("token", 32), (16, 16)), (64, 80, Int4("token", 16), (32, 32)),
    (32, 64, KV(Raw("float16"), Int8()), (32, 32)), (32, 64, KV(Int8("channel"), Int4("token", 32)), (32, 16)),
], ids=str)  # fmt: skip
def test_codes_of_other_widths_lie_apart(tile, dim, codec, widths):
    code, held = packed(codec, tile, dim)
    R, C = PAGE // tile, -(-dim // tile)
    assert "tiles" not in held
    assert held["k"]["x"].shape == (B, H, N, R * C, widths[0], tile)
    assert held["v"]["x"].shape == (B, H, N, R * C, tile, widths[1])
    for r, c in np.ndindex(R, C):
        rows = slice(r * tile, (r + 1) * tile)
        for side, w in zip("kv", widths):
            got = held[side]["x"][:, :, :, order(R, C)[r, c]]
            want = code[side]["x"][:, :, :, rows, c * w : (c + 1) * w]
            got = np.swapaxes(got, -1, -2) if side == "k" else got
            np.testing.assert_array_equal(got[..., : want.shape[-1]], want)
            assert not got[..., want.shape[-1] :].any()


CODECS = {"raw": Raw(), "int8": KV(Int8("channel"), Int8()), "int4": Int4("token", 16), "apart": KV(Int4("channel", 32), Raw())}


@pytest.mark.parametrize("tile,dim", [(32, 96), (64, 80)])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_every_address_is_one(codec, tile, dim, rng):
    """Slices, named pages, named tokens, and pages and tokens that are written, through tiles of several columns and rows."""
    layout, (code, _) = bound(tile, dim), packed(codec, tile, dim)
    page, slot = rng.integers(0, N, (B, H, 4)), rng.integers(0, N * PAGE, (B, H, 9))
    at, offset = rng.integers(0, N, (B, H)), rng.integers(0, PAGE, (B, H))
    at[0, 1] = N
    new = jax.tree.map(lambda x: x[:, :, :1] + 1, code)
    single = jax.tree.map(lambda x: x[:, :, :, :1], new)
    whole = max(codec.keys.group, codec.values.group) > 1

    @jax.jit
    def read(code):
        held = layout.pack(code, np.ones((B, H, N), bool))
        got = [layout.slice(held, 1, 2), layout.pages(held, page), layout.tokens(held, slot)]
        for where, what in ((None, new), *(() if whole else ((offset, single),))):
            got.append(layout.slice(layout.write(held, at, where, what), 0, N))
        return got

    def put(x, fresh, where):
        x = x.copy()
        for b, h in np.ndindex(B, H):
            if at[b, h] < N:
                x[b, h, at[b, h], slice(None) if where is None else where[b, h]] = fresh[
                    b, h, 0, slice(None) if where is None else 0
                ]
        return x

    each = lambda x: np.repeat(x, PAGE // x.shape[3], 3).reshape(B, H, N * PAGE, 1, -1)
    want = [
        jax.tree.map(lambda x: x[:, :, 1:3], code),
        jax.tree.map(lambda x: np.take_along_axis(x, page[..., None, None], 2), code),
        jax.tree.map(lambda x: np.take_along_axis(each(x), slot[..., None, None], 2), code),
        jax.tree.map(lambda x, y: put(x, y, None), code, new),
    ]
    if not whole:
        want.append(jax.tree.map(lambda x, y: put(x, y, offset), code, single))
    for a, b in zip(read(code), want, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("tile,dim,share", [(64, 80, 128 / 80), (32, 80, 96 / 80), (32, 96, 1), (64, 64, 1)])
def test_padding_is_counted(codec, tile, dim, share):
    """Resident bytes are the formula's; only the codes themselves grow, by the columns of zeros."""
    policy = Policy(KeepAll(), codec, bound(tile, dim), ReadAll())
    s = tools.sequence(lengths=(150, 97), steps=1, D=dim)
    cache = jax.eval_shape(lambda r: policy.fill(r, 192), s.record)
    assert memory.resident(cache) == memory.expected(policy, 2, 2, dim, 192)
    bytes_ = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))
    tiles = cache.memory.get("tiles", [cache.memory[side].get("x") for side in "kv"])
    code = jax.eval_shape(lambda m: policy.layout.slice(m, 0, 3), cache.memory)
    assert bytes_(tiles) == pytest.approx(share * bytes_([code[side]["x"] for side in "kv"]))


def test_tile_by_length():
    """Chosen when a cache is filled, by its room; what was chosen is seen in the memory alone."""
    layout = bound("by_length", 32, long=256)
    sides = {}
    for pages in (3, 4):
        code, _ = packed(Raw(), 32, 32)
        code = jax.tree.map(lambda x, n=pages: np.concatenate([x, x], 2)[:, :, :n], code)
        held = layout.pack(code, np.ones((B, H, pages), bool))
        sides[pages] = held["tiles"].shape[-1]
        jax.tree.map(np.testing.assert_array_equal, layout.slice(held, 0, pages), code)
        assert layout.overhead(Raw(), 32, pages) == 2 * PAGE * (sides[pages] - 32) * 4
    assert sides == {3: 32, 4: 64}


def test_tiles_by_layer_from_a_config_table():
    policy = parts.policy({"layout": {"name": "bicl", "tile": 32}})
    model = tools.tiny_model().config
    there = policy.at(1, model)
    assert there.layout == Bicl(32, head_dim=16) and there.at(1, model) is there
    with pytest.raises(ConfigError, match="tile=48; allowed: 32, 64"):
        parts.policy({"layout": {"name": "bicl", "tile": 48}})


def test_what_it_refuses():
    class Odd(Raw):
        def encode(self, x_BHNPD, pos_BHNP=None):
            return {"x": x_BHNPD[..., :7]}

    s = tools.sequence(steps=1)
    with pytest.raises(ConfigError, match="bind it first"):
        Policy(KeepAll(), Raw(), Bicl(), ReadAll()).fill(s.record, 192)
    with pytest.raises(RefusedPolicy, match="codes that are 7 wide for 30 channels"):
        Policy(KeepAll(), Odd(), bound(32, 30), ReadAll()).fill(tools.sequence(steps=1, D=30).record, 192)


@pytest.mark.parametrize("tile,dim", [(64, 80), (32, 64), (32, 96)])
def test_products_read_tiles_where_they_lie(tile, dim, rng):
    """Of one tile column, of pairs and of an odd number, from any page on; zeros at the end count for nothing."""
    layout = bound(tile, dim)
    key, value = rng.standard_normal((2, B, H, N, PAGE, dim), np.float32)
    query, weight = rng.standard_normal((B, H, 4, dim), np.float32), rng.standard_normal((B, H, 4, 2, PAGE), np.float32)
    held = layout.pack({"k": {"x": key}, "v": {"x": value}}, np.ones((B, H, N), bool))
    logits, out = jax.jit(lambda m, q, w, at: (layout.scores(m, q, at, 2), layout.mix(m, w, at)))(held, query, weight, 1)
    np.testing.assert_allclose(logits, np.einsum("bhqd,bhnpd->bhqnp", query, key[:, :, 1:]), atol=1e-4)
    np.testing.assert_allclose(out, np.einsum("bhqnp,bhnpd->bhqd", weight, value[:, :, 1:]), atol=1e-4)


class Short(Bicl):
    native = 4


@pytest.mark.parametrize("capacity,retention", [(704, "keep_all"), (2048, "keep_all"), (704, "window")])
def test_blocks_of_tiles_read_what_the_contiguous_layout_reads(capacity, retention):
    """Blocks that overlap at the end, a cache that is mostly empty, a window; ragged rows; masks, entropy and mass alike."""
    s, answers = tools.sequence(lengths=(650, 420), bucket=704, steps=1), []
    plain = tools.make(retention, "raw", "contiguous", "read_all")
    for policy in (plain, dataclasses.replace(plain, layout=Short(32, head_dim=32))):
        cache = jax.jit(policy.fill, static_argnums=1)(s.record, capacity)
        answers.append(jax.jit(policy.attend, static_argnums=3)(cache, s.query[0], jnp.asarray(s.lengths - 1), s.spec))
    want, got = answers
    np.testing.assert_array_equal(got.info.reads_BH, want.info.reads_BH)
    for a, b in ((got.out_BHQD, want.out_BHQD), (got.lse_BHQ, want.lse_BHQ), (got.info.entropy_BHQ, want.info.entropy_BHQ)):
        np.testing.assert_allclose(a, b, atol=1e-5)


EQUAL = list(itertools.product(tools.RETENTIONS, tools.CODECS, tools.SELECTIONS))
FEW = [("keep_all", "raw", "read_all"), ("key_norm", "int8_token", "quest"), ("key_norm_pages", "int8_channel", "short_keys")]


def check_equal(retention, codec, selection):
    """A whole life in tiles of 32, or of 64 with columns of zeros, gives what the contiguous layout gives."""
    s, answers = tools.sequence(steps=70), []
    plain, tiled = (tools.make(retention, codec, layout, selection) for layout in ("contiguous", "bicl"))
    for policy in (plain, dataclasses.replace(tiled, layout=bound(64, 32)) if codec == "float16" else tiled):
        answers.append(tools.run(policy, s)[2])
    want, got = answers
    for name in ("out", "lse", "entropy"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-5)
    for name in ("pos", "reads"):
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("names", FEW, ids="-".join)
def test_equals_the_contiguous_layout(names):
    check_equal(*names)


@pytest.mark.slow
@pytest.mark.parametrize("names", [n for n in EQUAL if n not in FEW], ids="-".join)
def test_the_whole_product_equals_the_contiguous_layout(names):
    check_equal(*names)
