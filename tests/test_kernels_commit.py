"""Pages written by a kernel against the codec and the layout, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab import writing
from kvlab.codec import KV, Fp8, Int4, Int8, Raw
from kvlab.errors import ConfigError, RefusedPolicy
from kvlab.kernels import commit, encode
from kvlab.layout import Bicl, Contiguous, Paged, PageMajor
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll
from tests.tools import append, appended, sequence

pytestmark = pytest.mark.compiled_quickly

commit_ = commit.commit
FORMS = {
    "programs": functools.partial(commit._direct, interpret=True),
    "staged": functools.partial(commit._staged, interpret=True),
}
PLATFORMS = {"cuda": ("triton", "__gpu$xla.gpu.triton"), "tpu": ("tpu", "tpu_custom_call")}
LAYOUTS = {
    "page_major": lambda dim: PageMajor(),
    "paged": lambda dim: Paged(),
    "bicl": lambda dim: Bicl(head_dim=dim),
    "bicl 32": lambda dim: Bicl(32, head_dim=dim),
}
CASES = [
    (Int8("channel"), "page_major", 80),
    (Int8("channel"), "bicl 32", 80),
    (Int8("token"), "paged", 64),
    (Int8("token"), "bicl 32", 80),
    (Int8("tensor"), "bicl", 128),
    (Fp8(), "bicl", 80),
    (Fp8("e5m2", "channel"), "paged", 80),
    (Fp8(scale="none"), "page_major", 64),
    (Raw("float16"), "bicl 32", 128),
    (Raw("bfloat16"), "paged", 256),
    (Raw(), "bicl", 80),
    (KV(Int8("channel"), Raw("bfloat16")), "bicl", 64),
]
NAMES = [f"{codec} {layout} {dim}" for codec, layout, dim in CASES]


@functools.cache
def _given(dim: int):
    """Vectors of six orders of magnitude for four pages of two rows and heads, one of which is all zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, 5, 64, dim)) * np.exp(3 * rng.standard_normal((2, 2, 5, 64, dim)))
    x[0, 1, 4] = 0
    with jax.ensure_compile_time_eval():  # what is kept must be numbers, also where a program is being traced
        return jnp.asarray(x, jnp.float32), jnp.asarray([[1, 4], [3, 0]])  # of four pages: row 0, head 1 writes nothing


def _memory(codec, layout, dim):
    """A memory of four pages, which pages are written, and with what."""
    x, page = _given(dim)
    code = {"k": codec.keys.encode(x[:, :, :4]), "v": codec.values.encode(x[::-1, :, :4])}
    held = jnp.asarray([[[1, 0, 0, 1], [1, 1, 0, 0]], [[0, 0, 1, 0], [0, 1, 1, 0]]], bool)
    return layout.pack(code, held), page, x[:, :, 4], -x[:, ::-1, 4]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("codec", "layout", "dim"), CASES, ids=NAMES)
def test_bits(codec, layout, dim, form):
    layout = LAYOUTS[layout](dim)
    memory, page, key, value = _memory(codec, layout, dim)
    want = jax.jit(lambda *args: commit.commit(codec, layout, *args, "xla"))(memory, page, key, value)
    got = jax.jit(lambda *args: commit.run(FORMS[form], codec, layout, *args))(memory, page, key, value)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    changed = 0
    for a, b, before in zip(*map(jax.tree.leaves, (got, want, memory))):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
        changed += (np.asarray(a) != np.asarray(before)).any()
    assert changed


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("codec", "layout", "dim"), CASES, ids=NAMES)
def test_it_lowers(codec, layout, dim, platform):
    implementation, mark = PLATFORMS[platform]
    layout = LAYOUTS[layout](dim)
    args = jax.eval_shape(lambda: _memory(codec, layout, dim))
    call = jax.jit(lambda *args: commit.commit(codec, layout, *args, implementation))
    text = call.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert mark in text
    codes = len(jax.tree.leaves({name: x for name, x in args[0].items() if name != "table"}))
    assert text.count("output_operand_alias<") == codes  # every leaf is updated in place


@pytest.mark.parametrize(
    ("exponent", "mantissa", "dtype"),
    [(4, 3, jnp.float8_e4m3fn), (5, 2, jnp.float8_e5m2), (5, 10, jnp.float16), (8, 7, jnp.bfloat16)],
)
def test_rounding_of_small_floats(exponent, mantissa, dtype):
    """All numbers that the format has, their halves of the way to the next ones, and what lies just beside those."""
    bits = 1 + exponent + mantissa
    exact = jax.lax.bitcast_convert_type(jnp.arange(2**bits, dtype=f"uint{bits}"), dtype).astype(jnp.float32)
    exact = np.unique(np.asarray(exact)[np.isfinite(exact)])
    if exponent == 8:
        exact = exact[np.abs(exact) > 1e-37]  # below, this machine's float32 may count as zero
    middle = (exact[1:].astype(np.float64) + exact[:-1]) / 2
    x = np.concatenate([exact, middle, np.nextafter(middle.astype(np.float32), np.inf), np.nextafter(exact, -np.inf)[1:]])
    x = x.astype(np.float32)
    want = jax.lax.bitcast_convert_type(jnp.asarray(x).astype(dtype), f"uint{bits}")
    got = encode.small_float(jnp.asarray(x), exponent, mantissa)
    np.testing.assert_array_equal(got, np.asarray(want).astype(np.int32))


@pytest.mark.parametrize("layout", ["paged", "bicl 32"])
def test_a_policy_commits_by_it(monkeypatch, layout):
    """Two pages of each row fill while tokens are appended; one row stands still."""
    s, calls = sequence((150, 97), steps=70), []
    monkeypatch.setattr(writing.commit, "commit", lambda *args: calls.append(args[-1]) or commit_(*args))
    key, value = appended(s)
    pos = jnp.asarray(s.lengths + np.arange(70)[:, None])
    caches = []
    for implementation in ("xla", "interpret"):
        policy = Policy(KeepAll(), Int8("channel"), LAYOUTS[layout](32), ReadAll(), implementation)
        caches.append(append(policy, policy.fill(s.record, 256), key, value, pos, jnp.asarray([True, False])))
    assert set(calls) == {"interpret"}
    for a, b in zip(*map(jax.tree.leaves, caches)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_appending_lowers(platform):
    implementation, mark = PLATFORMS[platform]
    s = sequence((150, 97), steps=1)
    policy = Policy(KeepAll(), Int8("channel"), Bicl(32, head_dim=32), ReadAll(), implementation)
    cache = jax.eval_shape(lambda: policy.fill(s.record, 256))
    key = jax.ShapeDtypeStruct((2, 2, 32), jnp.float32)
    traced = jax.jit(policy.append).trace(cache, key, key, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert mark in traced.lower(lowering_platforms=(platform,)).as_text()
    with pytest.raises(RefusedPolicy, match="interpret"):
        traced.lower()


def test_parts_without_a_kernel():
    for codec, layout in ((Int4(), PageMajor()), (Raw(), Contiguous())):
        assert not commit.covers(codec, layout)
        memory = layout.pack({"k": codec.encode(_given(64)[0]), "v": codec.encode(_given(64)[0])}, jnp.ones((2, 2, 5), bool))
        key = _given(64)[0][:, :, 4]
        with pytest.raises(ConfigError, match="implementation"):
            commit.commit(codec, layout, memory, _given(64)[1], key, key, "interpret")
