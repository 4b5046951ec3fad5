"""Numbers to codes inside a kernel, bit for bit as the codecs of `kvlab.codec` make them.

Integers do the rounding, half to even, so that a format need not be known to the hardware and subnormal codes come out right
where it takes subnormal numbers for zeros. Numbers are finite, as keys and values are.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvlab.codec import Fp8, Int8, Raw
from kvlab.core import Codec

AXES: dict[str, tuple[int, ...]] = {"token": (1,), "channel": (0,), "tensor": (1, 0)}  # of a page [token, channel]


class Encoder(NamedTuple):
    """How a page `[token, channel]` becomes codes.

    Attributes:
      over: the axes that a scale is taken over; () where there is none.
      scale: from the largest |x| to the scale.
      codes: from x and the scale, or None, to codes.
    """

    over: tuple[int, ...]
    scale: Callable[[Any], Any]
    codes: Callable[[Any, Any], Any]


def of(codec: Codec) -> Encoder | None:
    """The codec's encoder; None where no kernel writes its codes."""
    if type(codec) is Raw:
        formats = {"float32": None, "float16": (5, 10), "bfloat16": (8, 7)}
        return Encoder((), _same, functools.partial(_raw, form=formats[codec.dtype]))
    if type(codec) is Int8:
        return Encoder(AXES[codec.scale], lambda most: most / 127, _int8)
    if type(codec) is Fp8:
        axes = AXES.get(codec.scale, ())
        form = {"e4m3": (4, 3), "e5m2": (5, 2)}[codec.format]
        scale = lambda most: jnp.minimum(most, 2.0**127) / codec.largest
        return Encoder(axes, scale, functools.partial(_fp8, form=form, largest=codec.largest))
    return None


def small_float(x, exponent: int, mantissa: int):
    """Bit patterns, int32, of float32 numbers in a format with a sign and so many exponent and mantissa bits.

    Above the largest number lies infinity; four exponent bits (e4m3) have none, there x must not be larger.
    """
    bias = 2 ** (exponent - 1) - 1
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    sign, size = (bits >> 31) & 1, bits & 0x7FFFFFFF
    drop = 23 - mantissa
    near = size + (2 ** (drop - 1) - 1) + ((size >> drop) & 1)
    code = (near >> drop) - ((127 - bias) << mantissa)
    if exponent > 4:
        code = jnp.minimum(code, (2**exponent - 1) << mantissa)
    if exponent < 8:  # below its smallest normal number the format is a fixed-point one
        steps = jax.lax.bitcast_convert_type(size, jnp.float32) * 2.0 ** (bias - 1 + mantissa)
        code = jnp.where(size < (128 - bias) << 23, _whole(steps) & 0xFFFF, code)
    return code | (sign << (exponent + mantissa))


def _whole(x):
    """x rounded, half to even, in the low bits of an int32, for |x| < 2^22: a float32 of that size plus 1.5 · 2^23 has no
    fraction."""
    return jax.lax.bitcast_convert_type(x + 1.5 * 2.0**23, jnp.int32) - 0x4B400000


def _same(most):
    return most


def _raw(x, scale, form):
    return x if form is None else small_float(x, *form).astype(jnp.uint16)


def _int8(x, scale):
    q = _whole(x / jnp.where(scale > 0, scale, 1.0))
    return jnp.minimum(jnp.maximum(q, -127), 127).astype(jnp.int8)


def _fp8(x, scale, form, largest):
    if scale is not None:
        x = x / jnp.where(scale > 0, scale, 1.0)
    return small_float(jnp.minimum(jnp.maximum(x, -largest), largest), *form).astype(jnp.uint8)
