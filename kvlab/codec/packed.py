"""What several codecs share: numbers of 2 or 4 bits in bytes, parameters in 16 bits."""

import jax
import jax.numpy as jnp

LARGEST = 65504.0  # of float16


def pack(q, bits: int):
    """Integers below 2^bits, `[..., D]`, as uint8 `[..., D·bits/8]`; byte c holds channels c, c + D·bits/8, and so on.

    Parts far from each other share a byte, so that unpacking lays whole runs side by side.
    """
    parts = jnp.split(q.astype(jnp.uint8), 8 // bits, -1)
    return sum((part << (bits * i) for i, part in enumerate(parts[1:], 1)), start=parts[0])


def unpack(x, bits: int):
    """The inverse of `pack`, as uint8."""
    return jnp.concatenate([(x >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], -1)


def half(x, up: bool):
    """Bit patterns (uint16) of the next float16 that is not below x (`up`) or not above it; finite: ±65504 at most."""
    x = jnp.clip(x, -LARGEST, LARGEST)
    near = x.astype(jnp.float16)
    wrong = near.astype(jnp.float32) < x if up else near.astype(jnp.float32) > x
    beyond = jnp.nextafter(near, jnp.full_like(near, jnp.inf if up else -jnp.inf))
    return jax.lax.bitcast_convert_type(jnp.where(wrong, beyond, near), jnp.uint16)


def wide(bits):
    """Float32 numbers of float16 bit patterns."""
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
