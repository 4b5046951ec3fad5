"""What the best token of each page scores, from a gate's index keys: scored, masked and reduced in registers.

As `kvlab.selection.gated` does through XLA for pages. Where the scores of a KV head's query heads are averaged that takes one
pass; where the distributions that they make are, a pass before it gives each its denominator.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from kvlab.attention import MASKED
from kvlab.core import BLOCK
from kvlab.errors import ConfigError
from kvlab.kernels import backends, codes

DTYPES = ("float32", "float16", "bfloat16", "int8")


def page_scores(index_BHRS, query_BHQR, visible_BHNP, dtype: str, softmax: bool, flattening: float, implementation: str):
    """Float32 `[B, H, N]`, −inf for a page of which nothing is visible.

    Args:
      index_BHRS: index keys as `kvlab.selection.gated.Gated` stores them, R numbers of `dtype` for each slot.
      query_BHQR: float32 queries; their products with an index key are its scores.
      visible_BHNP: which slots count.
      softmax: whether each query's scores become a distribution over all that is visible, and a slot's score is the logarithm of
        its mean over the queries; without, there is one query.
      flattening: share of a page's log mass, log Σ exp(score) of what is visible, that is taken off its scores.

    Errors: ConfigError for "xla" (`Gated.page_scores` is that), and on a GPU for R that is no power of two.
    """
    R, Q = index_BHRS.shape[2], query_BHQR.shape[2]
    backends.known(implementation)
    if implementation == "xla":
        raise ConfigError('implementation="xla" has no kernel for page scores; write "triton", "tpu" or "interpret"')
    if dtype not in DTYPES:
        raise ConfigError(f"index keys of {dtype!r}; allowed: {', '.join(DTYPES)}")
    if Q > 1 and not softmax:
        raise ConfigError(f"{Q} queries without softmax; give their mean")
    if implementation == "triton" and R & (R - 1):
        raise ConfigError(f"index keys have {R} numbers; on a GPU allowed: powers of two; use a gate of another rank")
    query_BHQR = backends.only_on(query_BHQR, backends.BACKENDS[implementation].platform, implementation)
    given = jnp.swapaxes(query_BHQR, 2, 3), index_BHRS, visible_BHNP
    if not softmax:
        return _call(_best(dtype, flattening), *given, None, 1, implementation)[..., 0]
    mass_BHNQ = _call(_mass(dtype), *given, None, Q, implementation)
    less = jax.nn.logsumexp(mass_BHNQ, 2)[:, :, None] + math.log(Q)
    return _call(_best(dtype, flattening), *given, less, 1, implementation)[..., 0]


def _best(dtype: str, flattening: float):
    """A page's best score, `[1, 1]`."""

    def page(query_ref, key, visible, less_ref):
        scores = _scores(query_ref, key)
        if less_ref is not None:
            scores = [x - less_ref[:, pl.ds(q, 1)] for q, x in enumerate(scores)]
            top = _largest(scores)
            scores = [top + jnp.log(sum(jnp.exp(x - top) for x in scores))]
        score = jnp.where(visible, scores[0], MASKED)
        best = score.max(axis=1, keepdims=True)
        out = best - flattening * _log_mass(score, best) if flattening else best
        return [jnp.where(best > MASKED / 2, out, -jnp.inf)]

    return dtype, page


def _mass(dtype: str):
    """A page's log Σ exp(score) for each query, `[1, 1]`; MASKED or less where nothing is visible."""

    def page(query_ref, key, visible, less_ref):
        scores = [jnp.where(visible, x, MASKED) for x in _scores(query_ref, key)]
        return [_log_mass(x, x.max(axis=1, keepdims=True)) for x in scores]

    return dtype, page


def _scores(query_ref, key_RP):
    """Of each query, `[1, P]`, channel by channel."""
    return [(query_ref[:, pl.ds(q, 1)] * key_RP).sum(axis=0, keepdims=True) for q in range(query_ref.shape[1])]


def _largest(scores):
    top = scores[0]
    for x in scores[1:]:
        top = jnp.maximum(top, x)
    return top


def _log_mass(score, best):
    return best + jnp.log(jnp.exp(score - best).sum(axis=1, keepdims=True))


def _call(work, query_BHRQ, index_BHRS, visible_BHNP, less_BH1Q, wide: int, implementation: str):
    """`work`'s figures of every page, `[B, H, N, wide]`."""
    B, H, N, P = visible_BHNP.shape
    R, Q = query_BHRQ.shape[2:]
    dtype, figures = work
    pages = 1 if implementation == "triton" else min(BLOCK, N)  # read at a time

    def kernel(query_ref, index_ref, visible_ref, less_ref, out_ref):
        for page in range(pages):
            slots = pl.ds(page * P, P)
            key, visible = _widen(index_ref[:, slots], dtype), visible_ref[:, slots] != 0
            for i, x in enumerate(figures(query_ref, key, visible, less_ref)):
                out_ref[pl.ds(page, 1), pl.ds(i, 1)] = x

    block = lambda *shape, at=lambda b, h, n: (b, h, 0, n): pl.BlockSpec((None, None, *shape), at)
    first = lambda b, h, n: (b, h, 0, 0)
    options: dict = {"compiler_params": plgpu.CompilerParams(num_warps=2, num_stages=2)}
    if implementation == "tpu":
        options = {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",) * 3)}
    less = None if less_BH1Q is None else block(1, Q, at=first)
    return pl.pallas_call(
        kernel,
        grid=(B, H, pl.cdiv(N, pages)),
        in_specs=[block(R, Q, at=first), block(R, pages * P), block(1, pages * P), less],
        out_specs=block(pages, wide, at=lambda b, h, n: (b, h, n, 0)),
        out_shape=jax.ShapeDtypeStruct((B, H, N, wide), jnp.float32),
        interpret=implementation == "interpret",
        name="page_scores",
        **options,
    )(query_BHRQ, index_BHRS, visible_BHNP.reshape(B, H, 1, N * P).astype(jnp.int8), less_BH1Q)


def _widen(x, dtype: str):
    """Float32 index keys of stored ones."""
    if dtype == "int8":
        return x.astype(jnp.float32) / 127
    return codes.NUMBERS[dtype](x).astype(jnp.float32)
