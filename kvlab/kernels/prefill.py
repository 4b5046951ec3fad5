"""Attention of prompts over themselves, ragged and packed: FlashAttention's "varlen" call.

Of packed keys every query sees one run, `[low, high)`: that is all that is left of row borders, causality and local windows. The
kernel over such runs is `kvlab.kernels.ragged`, the reference is here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvlab.attention import MASKED, AttentionSpec
from kvlab.errors import ConfigError
from kvlab.kernels import backends, ragged
from kvlab.kernels.ragged import LEAST, Shape

FORMS: dict[str, Any] = {
    "triton": ragged.programs,
    "tpu": ragged.grid,
    "interpret": functools.partial(ragged.programs, interpret=True),
}
MOST = 128  # tokens of a block
BYTES = 32_768  # of a block's vectors: a GPU's core holds queries, and keys and values twice over


def varlen_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int, causal: bool = True, window: int | None = None,
    softcap: float | None = None, scale: float | None = None, implementation: str = "xla",
):  # fmt: skip
    """Attention of packed rows: output `[total_q, Hq, D]` in q's type and log-sum-exp `[Hq, total_q]` in float32.

    A query that sees nothing gives 0 and −inf. "xla" is the dense reference in float32, with all logits at once; only it has
    gradients.

    Args:
      q: `[total_q, Hq, D]`; k, v: `[total_k, Hkv, D]`, Hkv a divisor of Hq: query head h reads KV head h // (Hq / Hkv).
      cu_seqlens_q, cu_seqlens_k: int32 `[rows + 1]`, where each row begins, from 0 up to the total; rows may be empty. Tokens
        after the last border belong to no row.
      max_seqlen_q, max_seqlen_k: the longest row's tokens; they choose the size of blocks.
      causal: the last query of a row stands at its last key, also where a row has more of one than of the other.
      window: a query at position t sees t − window + 1 and what follows it.
      scale: of the logits, D^−½ by default; then `softcap` as in `AttentionSpec`.

    Errors: ConfigError for shapes that do not fit; RefusedPolicy where this machine cannot run it.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, window, implementation)
    spec = AttentionSpec(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
    shape = Shape(spec, _block(max_seqlen_q, q), _block(max_seqlen_k, k))
    return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, shape, implementation)


def varlen_attention_packed(qkv, kv_heads: int, cu_seqlens, max_seqlen: int, **options):
    """`varlen_attention` of `qkv [total, Hq + 2·Hkv, D]`: queries, then keys, then values, of the same tokens."""
    heads = qkv.shape[1] - 2 * kv_heads
    if heads < 1:
        raise ConfigError(f"qkv {qkv.shape} with kv_heads={kv_heads} leaves no query heads; it has Hq + 2·Hkv heads")
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), 1)
    return varlen_attention(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def prefill(query_BTHGD, key_BHTD, value_BHTD, length_B, spec: AttentionSpec, block: int, implementation: str):
    """`kvlab.attention.prefill` by a kernel, `[B, T, H, G, D]`; pads, right of `length` tokens, cost nothing and give 0."""
    B, T, H, G, D = query_BTHGD.shape
    token = jnp.arange(T)
    high = jnp.where(token < length_B[:, None], token + 1, 0)
    low = jnp.zeros_like(high) if spec.window is None else jnp.maximum(high - spec.window, 0)
    first = jnp.arange(B)[:, None] * T
    low, high = (jnp.where(high > 0, x + first, 0).reshape(-1).astype(jnp.int32) for x in (low, high))
    query = query_BTHGD.reshape(B * T, H * G, D).swapaxes(0, 1)
    key, value = (jnp.swapaxes(x, 0, 1).reshape(H, B * T, D) for x in (key_BHTD, value_BHTD))
    size = min(block, _block(T, query))
    out, _ = attend(query, key, value, low, high, Shape(spec, size, size), implementation)
    return out.swapaxes(0, 1).reshape(B, T, H, G, D)


@functools.partial(jax.jit, static_argnames=("causal", "shape", "implementation"))
def _varlen(q, k, v, begins_q, begins_k, causal: bool, shape: Shape, implementation: str):
    low, high = _runs(begins_q, begins_k, len(q), causal, shape.spec.window)
    query, key, value = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))
    out, lse = attend(query, key, value, low, high, shape, implementation)
    return jnp.swapaxes(out, 0, 1), lse


def attend(query_HXD, key_HYD, value_HYD, low_X, high_X, shape: Shape, implementation: str):
    """Queries over the run of keys that each sees: output `[Hq, X, D]` and log-sum-exp `[Hq, X]`."""
    if implementation == "xla":
        return _dense(query_HXD, key_HYD, value_HYD, low_X, high_X, shape.spec)
    query_HXD = backends.only_on(query_HXD, backends.BACKENDS[implementation].platform, implementation)
    return ragged.run(FORMS[implementation], query_HXD, key_HYD, value_HYD, low_X, high_X, shape)


def _dense(query_HXD, key_HYD, value_HYD, low_X, high_X, spec: AttentionSpec):
    wide = lambda x: x.astype(jnp.float32)
    key, value = (jnp.repeat(wide(x), len(query_HXD) // len(x), 0) for x in (key_HYD, value_HYD))
    logits = spec.cap(jnp.einsum("hxd,hyd->hxy", wide(query_HXD), key) * spec.scale)
    number = jnp.arange(key.shape[1])
    ok = (number >= low_X[:, None]) & (number < high_X[:, None])
    some = ok.any(-1)
    logits = jnp.where(ok, logits, MASKED)
    out = jnp.where(some[:, None], jax.nn.softmax(logits, -1) @ value, 0.0)
    return out.astype(query_HXD.dtype), jnp.where(some, jax.nn.logsumexp(logits, -1), -jnp.inf)


def _runs(begins_q, begins_k, total: int, causal: bool, window: int | None):
    """The keys `[low, high)` that each of `total` packed queries sees."""
    token = jnp.arange(total, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(begins_q, token, side="right") - 1, 0, len(begins_q) - 2)
    first, last = begins_k[row], begins_k[row + 1]
    here = token - begins_q[row + 1] + last  # the last query stands at the last key
    high = jnp.clip(here + 1, first, last) if causal else last
    low = first if window is None else jnp.clip(here - window + 1, first, high)
    return jnp.where(token < begins_q[-1], low, 0), jnp.where(token < begins_q[-1], high, 0)


def _block(tokens: int, vectors) -> int:
    """A power of two: enough for so many tokens, and no more vectors `[..., D]` than a core holds."""
    most = BYTES // (pl.next_power_of_2(vectors.shape[-1]) * vectors.dtype.itemsize)
    return max(min(pl.next_power_of_2(max(tokens, 1)), most, MOST), LEAST)


def _check(q, k, v, cu_q: Any, cu_k: Any, window, implementation) -> None:
    backends.known(implementation)
    given = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ConfigError(f"{given}; wanted: [total_q, Hq, D] and twice [total_k, Hkv, D], Hkv a divisor of Hq")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"{given} are of types {q.dtype}, {k.dtype}, {v.dtype}; give all three the same")
    if cu_q.ndim != 1 or cu_q.shape != cu_k.shape or len(cu_q) < 2:
        raise ConfigError(f"cu_seqlens of shapes {cu_q.shape} and {cu_k.shape}; both hold rows + 1 borders")
    if window is not None and window < 1:
        raise ConfigError(f"window={window}; allowed: 1 and more, or None for none")
