"""Codes to numbers inside a kernel, scales left out: shifts, masks and conversions that Triton and Mosaic lower alike.

What bfloat16 holds exactly becomes bfloat16: its own numbers, integers and floats of 8 bits. Float16 and float32 become float32:
to be multiplied by float16, parts of queries would have to fit its range.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kvlab.codec import Fp8, Hadamard, Int8, Raw
from kvlab.core import Codec


def name(codec: Codec) -> str | None:
    """What a codec's codes are called in the registry; None where no kernel reads them.

    `Hadamard` leaves its inner codec's codes: queries and outputs are turned outside of a kernel.
    """
    if type(codec) is Hadamard:
        return name(codec.inner)
    if type(codec) is Raw:
        return codec.dtype
    if type(codec) is Int8:
        return f"int8 {codec.scale}"
    return f"fp8 {codec.format} {codec.scale}" if type(codec) is Fp8 else None


def small_float(bits, exponent: int, mantissa: int):
    """Float32 numbers of the bit patterns of an IEEE-like format with a sign, so many exponent and mantissa bits.

    Integers carry everything, so neither the format nor subnormal numbers need be known to the hardware. The topmost exponent
    is taken for a number where the format has no infinities (e4m3) and for infinity or NaN where it has.
    """
    bits = bits.astype(jnp.int32)
    bias, top = 2 ** (exponent - 1) - 1, 2**exponent - 1
    field, rest = (bits >> mantissa) & top, bits & (2**mantissa - 1)
    wide = field + (127 - bias)
    if exponent > 4:
        wide = jnp.where(field == top, 255, wide)
    normal = jax.lax.bitcast_convert_type((wide << 23) | (rest << (23 - mantissa)), jnp.float32)
    size = jnp.where(field == 0, rest.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa), normal)
    return jnp.where((bits >> (exponent + mantissa)) & 1 == 1, -size, size)


def _plain(x):
    return x


def _half(x):
    return small_float(x, 5, 10)


def _bfloat16(x):
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16)


def _int8(x):
    return x.astype(jnp.bfloat16)


def _fp8(exponent: int, mantissa: int) -> Callable:
    return lambda x: small_float(x, exponent, mantissa).astype(jnp.bfloat16)


NUMBERS: dict[str, Callable] = {
    "float32": _plain,
    "float16": _half,
    "bfloat16": _bfloat16,
    **{f"int8 {scale}": _int8 for scale in ("token", "channel", "tensor")},
    **{
        f"fp8 {form} {scale}": _fp8(*widths)
        for form, widths in {"e4m3": (4, 3), "e5m2": (5, 2)}.items()
        for scale in ("token", "channel", "none")
    },
}


def parts(stored: Sequence[tuple[Callable, jax.ShapeDtypeStruct]]) -> int:
    """In how many parts queries and weights are multiplied where some of NUMBERS read such arrays."""
    narrow = lambda numbers, x: jax.eval_shape(numbers, jax.ShapeDtypeStruct((1, 1), x.dtype)).dtype == jnp.bfloat16
    return 3 if any(narrow(*one) for one in stored) else 1
