"""What is stored: error bounds, packing, scales at the edges of their range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import norm

from kvlab.attention import rotary, rotate
from kvlab.codec import KV, NF4, Fp8, Hadamard, Int2, Int4, Int8, Kivi, Outliers, PreRope, Raw, nf4
from kvlab.codec.hadamard import matrix
from kvlab.codec.packed import wide
from kvlab.core import PAGE
from kvlab.errors import ConfigError
from tests import tools

pytestmark = pytest.mark.compiled_quickly

ALL = {name: codec for name, codec in (tools.CODECS | tools.MORE_CODECS).items() if codec.keys is codec.values is codec}
PAGES = hnp.arrays(np.float32, (1, 1, 1, PAGE, 8), elements=st.floats(-(2.0**80), 2.0**80, width=32))


@pytest.mark.parametrize("scale", ["token", "channel", "tensor"])
@given(x=PAGES)
@settings(max_examples=40, deadline=None)
def test_int8_error_is_at_most_half_a_step(scale, x):
    codec = Int8(scale)
    code = codec.encode(jnp.asarray(x))
    step = np.asarray(code["scale"])
    error = np.abs(np.asarray(codec.decode(code), np.float64) - x)
    assert np.isfinite(error).all()
    smallest = 127 * 2.0**-126  # a scale below the smallest normal number is flushed to zero
    assert (error <= step * (0.5 + 1e-5) + smallest).all()


@pytest.mark.parametrize("scale", ["token", "channel", "tensor"])
@pytest.mark.parametrize("name", ["small", "constant", "zero", "outlier"])
def test_int8_at_the_edges(scale, name):
    """CASES 13: |x| ≤ .5, a constant channel, zeros, one huge outlier."""
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 1, 1, PAGE, 16)).astype(np.float32)
    if name == "constant":
        x[..., 3] = 0.25
    if name == "zero":
        x[:] = 0
    if name == "outlier":
        x[0, 0, 0, 5, 2] = 1e6
    code = Int8(scale).encode(jnp.asarray(x))
    back, step = np.asarray(Int8(scale).decode(code)), np.asarray(code["scale"])
    assert np.isfinite(back).all() and (np.abs(back - x) <= step * 0.50001).all()
    if name == "small":
        assert step.max() < 0.5 / 127 + 1e-6, "a floor on the scale would lose small values"


def test_one_scale_for_a_page_of_a_head():
    """Pages and heads do not share it, and a large channel costs all the others their precision."""
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 2, 3, PAGE, 16)).astype(np.float32)
    x[0, 1, 2, :, 4] *= 100
    code = {scale: Int8(scale).encode(jnp.asarray(x)) for scale in ("tensor", "channel")}
    step = np.asarray(code["tensor"]["scale"])
    assert step.shape == (1, 2, 3, 1, 1)
    np.testing.assert_allclose(step, np.abs(x).max((-2, -1), keepdims=True) / 127, rtol=1e-6)
    error = {scale: np.abs(np.asarray(Int8(scale).decode(c)) - x)[..., :4].mean((-2, -1))[0] for scale, c in code.items()}
    assert error["tensor"][1, 2] > 20 * error["channel"][1, 2] and error["tensor"][0, 0] < 2 * error["channel"][0, 0]
    assert Int8("tensor").page_bytes(16) == PAGE * 16 + 4 and Int8("tensor").group == PAGE


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_raw_rounds_to_its_dtype(dtype):
    x = np.random.default_rng(0).standard_normal((1, 1, 2, PAGE, 8)).astype(np.float32)
    codec = Raw(dtype)
    code = codec.encode(jnp.asarray(x))
    np.testing.assert_array_equal(codec.decode(code), jnp.asarray(x).astype(dtype).astype(jnp.float32))
    assert code["x"].dtype.itemsize == (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("codec", ALL.values(), ids=ALL)
def test_page_bytes_are_those_of_the_code(codec):
    code = jax.eval_shape(codec.encode, jnp.zeros((1, 1, 1, PAGE, 32)))
    assert codec.page_bytes(32) == sum(x.size * x.dtype.itemsize for x in code.values())


@pytest.mark.parametrize("codec", ALL.values(), ids=ALL)
def test_scores_and_mix_are_products_with_the_decoded_block(codec):
    rng = np.random.default_rng(1)
    x, q, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 2, 3, PAGE, 32), (1, 2, 4, 32), (1, 2, 4, 3, PAGE)))
    code = encoded(codec, jnp.asarray(x))
    decoded = np.asarray(opened(codec, code))
    np.testing.assert_allclose(codec.scores(jnp.asarray(q), code), np.einsum("bhqd,bhnpd->bhqnp", q, decoded), atol=1e-4)
    np.testing.assert_allclose(codec.mix(jnp.asarray(w), code), np.einsum("bhqnp,bhnpd->bhqd", w, decoded), atol=1e-4)


# --------------------------------------------------------------------------------------------- fewer bits, and wrappers

DIM = 32
SMALLEST = 2.0**-126  # XLA on the CPU takes smaller numbers for zero


def parameters(leaf, shape):
    """A parameter's float16 bit patterns as numbers, repeated over its group."""
    x = np.asarray(wide(leaf), np.float64)
    for axis in (-2, -1):
        x = np.repeat(x, shape[axis] // x.shape[axis], axis)
    return x


def bound(codec, x, code):
    """The largest error of each number that a codec's docstring promises."""
    if isinstance(codec, Fp8):
        relative, tiny = (2.0**-4, 2.0**-10) if codec.format == "e4m3" else (2.0**-3, 2.0**-17)
        return np.maximum(relative * np.abs(x), tiny * np.asarray(code.get("scale", 1.0))) + codec.largest * SMALLEST
    if isinstance(codec, NF4):
        return 0.152 * parameters(code["scale"], x.shape)
    return parameters(code["scale"], x.shape) / 2


@jax.jit
def encoded(codec, x):
    return codec.encode(x)


@jax.jit
def opened(codec, code):
    return codec.decode(code)


def decoded(codec, x):
    code = encoded(codec, jnp.asarray(x))
    return np.asarray(opened(codec, code), np.float64), code


BOUNDED = {
    "fp8": Fp8(),
    "fp8 channel": Fp8("e4m3", "channel"),
    "fp8 e5m2": Fp8("e5m2"),
    "int4 channel": Int4("channel", 16),
    "int4 token": Int4("token", 8),
    "int2 channel": Int2("channel", 64),
    "int2 token": Int2("token", 32),
    "nf4": NF4(16),
}
bounded = pytest.mark.parametrize("codec", BOUNDED.values(), ids=BOUNDED)


@bounded
@given(
    x=hnp.arrays(np.float32, (1, 1, 2, PAGE, DIM), elements=st.floats(-60_000, 60_000, width=32), fill=st.floats(-1, 1, width=32))
)
@settings(max_examples=15, deadline=None)
def test_errors_stay_within_what_is_promised(codec, x):
    back, code = decoded(codec, x)
    assert (np.abs(back - x) <= bound(codec, x, code) + 2.0**-21 * np.abs(x).max()).all()


@bounded
@pytest.mark.parametrize("name", ["small", "constant", "zero", "outlier", "shifted"])
def test_few_bits_at_the_edges(codec, name):
    """CASES 13, for codecs of 8 bits and less; and numbers that lie far from zero, all on one side."""
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 1, 2, PAGE, DIM)).astype(np.float32)
    if name == "constant":
        x[..., 3] = 0.1
    if name == "zero":
        x[:] = 0
    if name == "outlier":
        x[0, 0, 0, 5, 2] = 6e4
    if name == "shifted":
        x += 100
    back, code = decoded(codec, x)
    assert (np.abs(back - x) <= bound(codec, x, code) + 2.0**-21 * np.abs(x).max()).all()
    if name == "zero":
        assert (back == 0).all()
    if name == "small" and "scale" in code:
        assert bound(codec, x, code).max() < 0.17, "a floor on the scale would lose small values"
    if name == "outlier":
        assert np.abs(back - x)[0, 0, 1].max() < 0.17, "other pages pay for an outlier"


@pytest.mark.parametrize("codec", [c for c in ALL.values() if c != Raw("float16")], ids=str)
@pytest.mark.parametrize("value", [1e6, -1e6, 3e38])
def test_what_is_too_large_saturates(codec, value):
    x = np.zeros((1, 1, 2, PAGE, DIM), np.float32)
    x[..., 7, 3], x[..., 9, 1] = value, 1.0
    if isinstance(codec, Hadamard):
        codec = Hadamard(Int8())
    back, _ = decoded(codec, x)
    assert np.isfinite(back).all() and np.sign(back[0, 0, 0, 7, 3]) == np.sign(value)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_are_the_bits_of_the_format(format):
    """Against ml_dtypes, over all magnitudes; infinities saturate too."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1, 1, 2, PAGE, DIM)) * 10.0 ** rng.uniform(-9, 6, (1, 1, 2, PAGE, DIM))).astype(np.float32)
    x[..., 0, 0], x[..., 0, 1] = np.inf, -np.inf
    codec = Fp8(format, "none")
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[format]
    dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[format]
    back, code = decoded(codec, x)
    want = np.clip(x, -largest, largest).astype(dtype)
    np.testing.assert_array_equal(code["x"], want.view(np.uint8))
    np.testing.assert_array_equal(back, want.astype(np.float32))
    for scale in ("token", "channel"):
        assert np.isfinite(decoded(Fp8(format, scale), x)[0]).all()


def test_the_levels_of_normal_float():
    """Those printed in the paper's appendix E, and scipy's normal quantiles."""
    outer = 1 - (1 / 32 + 1 / 30) / 2
    below, above = (norm.ppf(np.linspace(0.5, outer, n)) for n in (8, 9))
    np.testing.assert_allclose(nf4.LEVELS, [*(-below[:0:-1] / below[-1]), *(above / above[-1])], atol=1e-7)
    printed = [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0]
    printed += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
    np.testing.assert_allclose(nf4.LEVELS, printed, atol=1e-6)


def test_normal_float_takes_the_nearest_level():
    x = np.random.default_rng(0).standard_normal((1, 1, 1, PAGE, DIM)).astype(np.float32)
    back, code = decoded(NF4(DIM), x)
    a = parameters(code["scale"], x.shape)
    assert (np.abs(a[..., 0] / np.abs(x).max(-1) - 1) < 2.0**-10).all()
    best = np.abs(x[..., None] - a[..., None] * nf4.LEVELS).min(-1)
    np.testing.assert_allclose(np.abs(back - x), best, atol=1e-6)


def test_a_hadamard_rotation_is_undone_by_query_and_output(rng):
    """q·k and Σ w v do not change, but what is stored does; each vector keeps its length."""
    np.testing.assert_allclose(matrix(64) @ matrix(64), np.eye(64), atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix(64)), 1 / 8)
    codec = Hadamard(Raw())
    x, q, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 2, 3, PAGE, DIM), (1, 2, 4, DIM), (1, 2, 4, 3, PAGE)))
    code = codec.encode(jnp.asarray(x))
    assert np.abs(code["x"] - x).max() > 1
    np.testing.assert_allclose(np.linalg.norm(code["x"], axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(codec.scores(codec.query(q), code), np.einsum("bhqd,bhnpd->bhqnp", q, x), atol=1e-4)
    np.testing.assert_allclose(codec.output(codec.mix(w, code)), np.einsum("bhqnp,bhnpd->bhqd", w, x), atol=1e-4)


def test_rotations_and_outliers_help_where_a_few_numbers_are_large(rng):
    """What the two are for: one large channel ruins the group that it is in, unless it is spread or kept apart."""
    x = rng.standard_normal((1, 1, 2, PAGE, DIM)).astype(np.float32)
    x[..., 5] = 30 * np.sign(x[..., 5])
    page = lambda codec: np.asarray(jax.jit(lambda x: codec.output(codec.decode(codec.encode(x))))(x))
    error = {codec: np.square(np.delete(page(codec) - x, 5, -1)).mean() for codec in (Int4(), Hadamard(Int4()), Outliers(Int4()))}
    plain, turned, apart = error.values()
    assert turned < plain / 3 and apart < plain / 30


def test_outliers_are_kept_apart(rng):
    """The two largest of 32 numbers to 8 bits of mantissa, the rest as if these were zero."""
    x = rng.standard_normal((1, 1, 1, PAGE, DIM)).astype(np.float32)
    x[..., 4, 3], x[..., 4, 9] = 1e6, -70.3
    codec = Outliers(Int4("channel"), 0.05)
    back, code = decoded(codec, x)
    largest = np.argsort(-np.abs(x), -1)[..., :2]
    assert code["kept"].shape == code["channel"].shape == (1, 1, 1, PAGE, 2) and code["channel"].dtype == jnp.uint8
    take = lambda a: np.take_along_axis(a, largest, -1)
    np.testing.assert_array_equal(take(back), take(x).astype(jnp.bfloat16).astype(np.float64))
    rest = x.copy()
    np.put_along_axis(rest, largest, 0, -1)
    want = decoded(Int4("channel"), rest)[0]
    np.put_along_axis(want, largest, take(back), -1)
    np.testing.assert_allclose(back, want, atol=1e-6)


def test_keys_are_stored_as_they_were_before_the_rotary_embedding(rng):
    """Equal keys at 64 positions get equal codes, and come back turned; values are inner's own."""
    model = tools.tiny_model(windows=(8, None), local_rope_base=100.0).config
    key, pos = rng.standard_normal(16).astype(np.float32), jnp.arange(500, 564)[None, None, None]
    for layer in (0, 1):
        codec = PreRope(Int8()).at(layer, model)
        assert codec.at(layer, model) is codec and codec.values == Int8()
        np.testing.assert_array_equal(codec.frequency, model.rope(layer).frequencies(16))
        turned = rotate(jnp.asarray(key), *rotary(pos, model.rope(layer).frequencies(16)))
        code = codec.encode(turned, pos)
        np.testing.assert_allclose(code["x"] * code["scale"], np.broadcast_to(key, turned.shape), atol=0.02)
        np.testing.assert_allclose(codec.decode(code, pos), turned, atol=0.03)
    assert np.abs(turned - key).max() > 0.5


def test_wrappers_compose(rng):
    """Keys before the rotary embedding, their outliers apart, the rest turned: what comes back is the key."""
    x, pos = rng.standard_normal((1, 1, 1, PAGE, DIM)).astype(np.float32), jnp.arange(PAGE)[None, None, None]
    codec = PreRope(Outliers(Hadamard(Raw()), 0.1), tools.FREQUENCIES)
    there_and_back = jax.jit(lambda x, pos: codec.decode(codec.encode(x, pos), pos))
    np.testing.assert_allclose(there_and_back(x, pos), x, atol=0.02)
    kivi = PreRope(Kivi(4), tools.FREQUENCIES)
    assert (kivi.keys.inner, kivi.values) == (Kivi(4).keys, Kivi(4).values) and kivi.keys.residual == 128
    assert KV(Hadamard(Kivi()), Kivi(4)).values == Kivi(4).values and KV(Hadamard(Kivi()), Raw()).keys == Hadamard(Kivi().keys)


@pytest.mark.parametrize("make,message", [
    (lambda: Fp8("e4m4"), "did you mean 'e4m3'"),
    (lambda: Fp8(scale="tokens"), "did you mean 'token'"),
    (lambda: Int4("chanel"), "int4 codec: along='chanel'; did you mean 'channel'"),
    (lambda: Int2("channel", 48), "int2 codec: group_size=48; allowed: .*64 tokens"),
    (lambda: Int4(residual=-1), "0 tokens or more"),
    (lambda: Kivi(3), "bits=3; allowed: 2, 4"),
    (lambda: Kivi(group_size=48), "group_size=48"),
    (lambda: NF4(0), "group_size=0"),
    (lambda: Outliers(Raw(), 1.0), "above 0 and below 1"),
    (lambda: Int4("token", 32).at(0, tools.tiny_model().config), "does not divide the head dimension 16; .* such as 16"),
    (lambda: KV(Raw(), Outliers(Int2("token", 64))).at(0, tools.tiny_model().config), "does not divide"),
    (lambda: Kivi().at(0, tools.tiny_model().config), "does not divide the head dimension 16"),
    (lambda: NF4(64).at(0, tools.tiny_model().config), "nf4 codec: group_size=64 .* 16"),
    (lambda: Hadamard(Raw()).at(0, tools.tiny_model(head_dim=24).config), "head dimension of 24; allowed: powers of two"),
    (lambda: PreRope(Raw()).encode(jnp.zeros((1, 1, 1, PAGE, 8)), jnp.zeros((1, 1, 1, PAGE), int)), "no frequencies"),
])  # fmt: skip
def test_refusals_say_what_is_allowed(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_bad_options_name_the_allowed_ones():
    with pytest.raises(ConfigError, match="did you mean 'channel'.*tensor, token"):
        Int8("chanel")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        Raw("bfloat1")
