"""Locality: the simulator against a naive one, address maps against arrays, what reads touch, and the kinds of claims on it."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.errors import ConfigError
from kvlab.layout import Bicl, Contiguous
from kvlab.locality import copies, lru, places, products
from kvlab.locality.reads import Reads


def naive(blocks, cache):
    """Access by access: a list for each set, the newest block last."""
    sets, made = [[] for _ in range(cache.sets)], []
    for block in blocks:
        own = sets[block % cache.sets]
        made.append(block not in own)
        if block in own:
            own.remove(block)
        own.append(block)
        del own[: -cache.ways]
    return made


def test_small_caches_by_hand():
    direct, two = lru.Cache(4 * 64, 1, 64), lru.Cache(4 * 64, 2, 64)
    assert lru.missed([0, 4, 0, 4, 1, 1], direct).tolist() == [True, True, True, True, True, False], "0 and 4 share a set"
    assert lru.missed([0, 4, 0, 4, 1, 1], two).tolist() == [True, True, False, False, True, False], "two ways hold both"
    assert lru.missed([0, 2, 0, 4, 0, 2], two).tolist() == [True, True, False, True, False, True], (
        "the oldest goes, not the first"
    )
    assert lru.missed([], two).tolist() == []
    with pytest.raises(ConfigError, match="cannot have 3 ways"):
        _ = lru.Cache(256, 3, 64).sets


@pytest.mark.parametrize("sets, ways, blocks", [(1, 1, 5), (1, 4, 9), (4, 1, 30), (4, 3, 40), (8, 8, 200), (16, 2, 17)])
def test_the_simulator_is_a_naive_one(sets, ways, blocks):
    rng = np.random.default_rng([sets, ways])
    trace = np.concatenate([rng.integers(0, blocks, 1500), np.arange(300) * 8 % 96, np.sort(rng.zipf(1.5, 700) % blocks)])
    cache = lru.Cache(sets * ways * 64, ways, 64)
    assert lru.missed(trace, cache).tolist() == naive(trace, cache)


def test_larger_ones_before():
    rank = np.random.default_rng(0).permutation(77)
    assert lru.larger_before(rank).tolist() == [sum(rank[:i] > rank[i]) for i in range(77)]


def test_a_hierarchy_by_hand():
    """Sixteen lines, one after another, twice: too many for 8 lines in the first cache, few enough for 32 in the second."""
    machine = lru.Machine(lru.Cache(8 * 64, 8, 64), lru.Cache(32 * 64, 8, 64), lru.Cache(2 * 256, 2, 256))
    found = lru.simulate(np.tile(np.arange(0, 1024, 4), 2), 2048, (4, 16, 64), machine)
    assert (found.first, found.second, found.lines) == (32, 16, 16) and found.pages == 8, "four pages, of which two fit"
    assert found.loads == {4: 512, 16: 128, 64: 32} and found.moved == 1.0
    assert [found.rate(load) for load in (4, 16, 64)] == [4 / 64, 16 / 64, 1.0], "the same stream at three rates"


@pytest.mark.parametrize("name", [*places.PLAIN, "bicl_64", "bicl_32", "bicl_32_rows"])
@pytest.mark.parametrize("dim", [64, 96])
def test_every_number_has_a_place_of_its_own(name, dim):
    shape, place = places.Shape(128, 2, dim), places.place(name)
    axes = np.ix_(range(2), range(128), range(dim))
    index = np.stack([place.index(kind, *axes, shape) for kind in (0, 1)])
    assert len(np.unique(index)) == index.size and index.min() == 0
    assert index.max() < 2 * 2 * 128 * place.width(dim) and place.width(dim) == (128 if (name, dim) == ("bicl_64", 96) else dim)


@pytest.mark.parametrize("name, layout", [
    ("head_major", None), ("channel_major", Contiguous()),
    ("bicl_64", Bicl(head_dim=96)), ("bicl_32", Bicl(tile=32, head_dim=96)),
])  # fmt: skip
def test_places_are_those_of_the_layouts(name, layout):
    """What lies at the place of a token and channel is its number: in arrays as kvlab's layouts pack them."""
    shape = places.Shape(128, 2, 96)
    numbers = np.arange(1.0, 1 + 2 * 2 * 128 * 96, dtype=np.float32).reshape(2, 1, 2, 2, 64, 96)  # kind, row, head, page, …
    code = {"k": {"x": jnp.asarray(numbers[0])}, "v": {"x": jnp.asarray(numbers[1])}}
    if layout is None:
        memory = numbers.ravel()
    else:
        packed = layout.pack(code, jnp.ones((1, 2, 2), bool))
        arrays = [packed["tiles"]] if "tiles" in packed else [packed["k"]["x"], packed["v"]["x"]]
        memory = np.concatenate([np.asarray(x).ravel() for x in arrays])
    axes = np.ix_(range(2), range(128), range(96))
    for kind in (0, 1):
        assert (memory[places.place(name).index(kind, *axes, shape)] == numbers[kind].reshape(2, 128, 96)).all()


def test_tokens_lie_side_by_side_and_tiles_without_an_order():
    shape = places.Shape(128, 3, 128)
    axes = np.ix_(range(3), range(128), range(128))
    token_major = places.place("token_major").index(0, *axes, shape)
    assert (token_major.transpose(1, 0, 2) == np.arange(128 * 3 * 128).reshape(128, 3, 128)).all()
    plain, z = (places.place(name).index(0, *axes, shape) for name in ("bicl_32_rows", "bicl_32"))
    first = lambda index: (index[0, ::32, ::32] // (2 * 32 * 32))[:2].tolist()
    assert first(plain) == [[0, 1, 2, 3], [4, 5, 6, 7]] and first(z) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ConfigError, match="did you mean 'head_major'"):
        places.place("headmajor")


SMALL = {"tokens": 1024, "kv_heads": 4, "heads": 2}


@pytest.mark.parametrize("read", ["dense", "pages"])
@pytest.mark.parametrize("walk", ["stored", "tokens"])
def test_streams_fetch_the_same_lines_in_every_layout(read, walk):
    """Whole pages are whole lines wherever they lie, so what a load is wide alone makes the rate."""
    reads = Reads(read=read, walk=walk, share=0.25, **SMALL)
    names = ["token_major", "head_major", "bicl_64", "bicl_32", *(["channel_major"] if walk == "stored" else [])]
    found = [lru.simulate(reads.addresses(name), reads.useful, (2, 32), lru.Machine()) for name in names]
    assert {each.first for each in found} == {reads.useful // 64} and {each.moved for each in found} == {1.0}
    if walk == "stored":
        assert {each.rate(32) for each in found} == {0.5}
    assert found[0].pages > 1.9 * found[1].pages == 1.9 * found[2].pages, "only the TLB sees the tokens of other heads between"


def test_reads_that_break_lines():
    far = Reads(walk="channels", block=1024, **SMALL)
    of = lambda reads, name: lru.simulate(reads.addresses(name), reads.useful, (2,), lru.Machine())
    assert of(far, "head_major").moved > 10 and of(far, "channel_major").moved == of(far, "bicl_64").moved == 1
    single = Reads(read="tokens", share=1 / 16, **SMALL)
    assert of(single, "head_major").moved == 1 and of(single, "bicl_64").moved > 5, "one token of a channel-major tile"


def test_padding_is_read_and_is_no_use():
    reads = Reads(tokens=128, kv_heads=1, heads=1, head_dim=80)
    found = [
        lru.simulate(reads.addresses(name), reads.useful, (32,), lru.Machine()).moved
        for name in ("head_major", "bicl_64", "bicl_32")
    ]
    assert found == pytest.approx([1, 128 / 80, 96 / 80])


def test_chosen_tokens():
    pages = Reads(read="pages", share=0.25, **SMALL).chosen()
    assert (
        pages.shape == (2, 256)
        and (np.diff(pages) > 0).all()
        and (pages[:, ::64] % 64 == 0).all()
        and (pages[0] != pages[1]).any()
    )
    tokens = Reads(read="tokens", share=0.25, **SMALL).chosen()
    assert tokens.shape == (2, 256) and (np.diff(tokens) > 0).all() and (np.diff(tokens) > 1).any()
    for wrong, message in (
        ({"tokens": 100}, "whole pages"),
        ({"block": 48}, "does not divide"),
        ({"read": "pages", "share": 0.001}, "is none"),
    ):
        with pytest.raises(ConfigError, match=message):
            Reads(**{**SMALL, **wrong})


def test_copies_read_the_trace_in_order():
    reads = Reads(tokens=128, kv_heads=2, heads=1, read="tokens", share=0.5, walk="tokens")
    for name, length in (("head_major", 128), ("token_major", 128), ("bicl_32", 1)):
        address = reads.addresses(name)
        first, run = copies.runs(address, 2)
        assert run == length and ((first[:, None] + np.arange(run)).ravel() * 2 == address).all()
    keys, values = reads.addresses("bicl_32").reshape(2, -1)
    assert (copies.runs(keys, 2)[1], copies.runs(values, 2)[1]) == (1, 32), "keys' tiles lie channel by channel"


def test_copies_are_of_the_numbers_asked_for(monkeypatch):
    """Every look-up, with what it looks up in, makes the trace again."""
    reads, seen = Reads(tokens=128, kv_heads=2, heads=1, read="tokens", share=0.5, walk="tokens"), []
    address = reads.addresses("bicl_32")
    read = copies.reader(address, 2, 2)
    numbers = lambda table, first: (first[:, None] * table.shape[1] + np.arange(table.shape[1])).ravel()
    monkeypatch.setattr(np, "take", lambda table, first, axis, buffer, mode: seen.append((numbers(table, first), buffer.shape)))
    assert read() > 0 and (np.concatenate([found for found, _ in seen]) * 2 == address).all()
    assert all(len(found) == rows * columns for found, (rows, columns) in seen), "as much room as is read"


def test_memory_begins_a_line():
    assert all(copies._aligned(n, np.uint16).ctypes.data % 64 == 0 for n in (1, 77, 4096, 10**6))
    assert copies._aligned(3, np.uint32).tolist() == [1, 1, 1]


def test_programs_take_turns():
    order = []
    taken = copies.interleaved([lambda i=i: order.append(i) or float(i) for i in range(2)], 3)
    assert taken.tolist() == [[0, 1]] * 3 and order == [0, 1, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("layout", sorted(products.FORMS))
def test_products_are_the_same_in_every_layout(layout):
    query, key, value = (
        np.random.default_rng(i).normal(size=(2, n, 128)).astype(np.float32) for i, n in enumerate((3, 192, 192))
    )
    lay, both = products.FORMS[layout]
    wanted = np.einsum("hgd,hsd->hgs", query, key) @ value
    np.testing.assert_allclose(both(query, *lay(key, value)), wanted, rtol=1e-3, atol=1e-2)
    with pytest.raises(ConfigError, match="products over layout 'bicl_16'"):
        products.laid_out(products.Rows(64, 1, 1, 64, 64, "float32"), "bicl_16")


def test_rows_of_every_type_give_the_same_products():
    rng = np.random.default_rng(0)
    key, value = rng.integers(-9, 9, (2, 2, 1024, 80))
    query = rng.normal(size=(2, 3, 80)).astype(np.float32)
    whole = np.einsum("hgd,hsd->hgs", query, key) @ value
    for dtype in products.TYPES:
        blocked = products._blocked(query, *(jnp.asarray(x.astype(dtype)) for x in (key, value)))
        np.testing.assert_allclose(blocked, whole, rtol=1e-3, atol=1)
    assert products.program(products.Rows(512, 1, 2, 80, 128, "int8"))() > 0
