"""What is stored: error bounds, packing, scales at the edges of their range."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvlab.codec import KV, Int8, Raw
from kvlab.core import PAGE
from kvlab.errors import ConfigError
from tests import tools

PAGES = hnp.arrays(np.float32, (1, 1, 1, PAGE, 8), elements=st.floats(-(2.0**80), 2.0**80, width=32))


@pytest.mark.parametrize("scale", ["token", "channel"])
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


@pytest.mark.parametrize("scale", ["token", "channel"])
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_raw_rounds_to_its_dtype(dtype):
    x = np.random.default_rng(0).standard_normal((1, 1, 2, PAGE, 8)).astype(np.float32)
    codec = Raw(dtype)
    code = codec.encode(jnp.asarray(x))
    np.testing.assert_array_equal(codec.decode(code), jnp.asarray(x).astype(dtype).astype(jnp.float32))
    assert code["x"].dtype.itemsize == (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("codec", [c for c in tools.CODECS.values() if not isinstance(c, KV)], ids=str)
def test_page_bytes_are_those_of_the_code(codec):
    code = codec.encode(jnp.zeros((1, 1, 1, PAGE, 32)))
    assert codec.page_bytes(32) == sum(x.nbytes for x in code.values())


@pytest.mark.parametrize("codec", [c for c in tools.CODECS.values() if not isinstance(c, KV)], ids=str)
def test_scores_and_mix_are_products_with_the_decoded_block(codec):
    rng = np.random.default_rng(1)
    x, q, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 2, 3, PAGE, 8), (1, 2, 4, 8), (1, 2, 4, 3, PAGE)))
    code = codec.encode(jnp.asarray(x))
    decoded = np.asarray(codec.decode(code))
    np.testing.assert_allclose(codec.scores(jnp.asarray(q), code), np.einsum("bhqd,bhnpd->bhqnp", q, decoded), atol=1e-4)
    np.testing.assert_allclose(codec.mix(jnp.asarray(w), code), np.einsum("bhqnp,bhnpd->bhqd", w, decoded), atol=1e-4)


def test_bad_options_name_the_allowed_ones():
    with pytest.raises(ConfigError, match="did you mean 'channel'.*token"):
        Int8("chanel")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        Raw("bfloat1")
