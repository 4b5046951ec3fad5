"""kvlab: a laboratory for KV-cache policies in JAX."""

__version__ = "0.1.0"
