"""Numbers that look random and depend on nothing but what they are made from."""

import jax.numpy as jnp


def mixed(x):
    """The finaliser of MurmurHash3 on unsigned 32-bit integers: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
