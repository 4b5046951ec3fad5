"""What a prefill and a decode step need beside weights and caches: by arithmetic, or by XLA's account of the programs.

A prompt's records stay while its policies decode (one record serves them all), so they count throughout; of what prefill
and a step need for themselves only the larger counts. Filling a cache needs less than prefill does.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from kvlab import loop, memory
from kvlab.core import BLOCK, PAGE, Cache, Record
from kvlab.decode import needs
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import ROWS, skeleton
from kvlab.needs import REPLAYED, blank
from kvlab.policy import Policy
from kvlab.session import bucket

QUERY_BLOCK = 512  # tokens whose logits prefill holds at a time, as in `kvlab.attention.prefill`


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Bytes, and how each figure arises.

    Attributes:
      records: keys, values and positions of the prompt in all layers, and its next-token logits.
      prefill, decode: temporaries of either program.
      source: "estimate" or "XLA".
      how: a formula, numbers put in, for each of the three.
    """

    records: int
    prefill: int
    decode: int
    source: str
    how: dict[str, str]

    @property
    def bytes(self) -> int:
        return self.records + max(self.prefill, self.decode)


def record(dims, needs: set[str], batch: int, length: int) -> Record:
    """The shapes of one layer's record of a prompt, which is padded to its bucket, with what policies need."""
    tokens = bucket(length)
    vector = jax.ShapeDtypeStruct((batch, dims.kv_heads, tokens, dims.head_dim), "float32")
    hidden, groups = (dims.config.hidden, dims.config.groups) if dims.config else (1, 1)
    seen = jax.eval_shape(lambda: blank(needs, batch, dims.kv_heads, groups, tokens, hidden, dims.head_dim))
    return Record(vector, vector, jax.ShapeDtypeStruct((batch, tokens), "int32"), seen)


def weights(config: ModelConfig) -> dict:
    """The shapes of a model's parameters."""
    return nnx.to_pure_dict(skeleton(config)[1])


def estimate(dims, policies: Sequence[Policy], budgets: Sequence[int], batch: int, length: int) -> Workspace:
    """By arithmetic. Of a model whose inner dimensions are unknown only the records are counted."""
    tokens = bucket(length)
    kept = 4 * dims.layers * batch * tokens * (2 * dims.kv_heads * dims.head_dim + 1)
    how = f"{dims.layers} layers × {batch} rows × {tokens:,} tokens × (2 × {dims.kv_heads} × {dims.head_dim} + 1) × 4 B"
    if extra := dims.layers * memory.resident(record(dims, needs(policies), batch, length).seen):
        kept, how = kept + extra, f"{how} + {', '.join(sorted(needs(policies)))} {extra:,} B"
    if dims.config is None:
        unknown = "unknown without hidden, ffn, vocab and heads"
        return Workspace(kept, 0, 0, "estimate", {"records": how, "prefill": unknown, "decode": unknown})
    config = dims.config
    prefill, prefill_how = _prefill(config, batch, tokens)
    step, step_how = max(_step(config, p, b, batch) for p, b in zip(policies, budgets))
    logits = 4 * batch * config.vocab
    how += f" + logits {batch} × {config.vocab:,} × 4 B"
    return Workspace(kept + logits, prefill, step, "estimate", {"records": how, "prefill": prefill_how, "decode": step_how})


def _prefill(c: ModelConfig, batch: int, tokens: int) -> tuple[int, str]:
    """Vectors of all tokens in and between two layers, and the larger of a block's logits and the feed-forward rows."""
    count, block = batch * tokens, min(QUERY_BLOCK, tokens)
    rows = ROWS if count % ROWS == 0 else count
    logits, feed = 4 * block * c.groups * block, 4 * rows * 3 * c.ffn
    how = (
        f"{count:,} tokens × 2 × ({c.hidden} + {c.heads} heads × {c.head_dim}) × 4 B + max("
        f"logits {block} × {c.groups} × {block} × 4 B, feed-forward {rows:,} × 3 × {c.ffn} × 4 B)"
    )
    return 4 * count * 2 * (c.hidden + c.heads * c.head_dim) + max(logits, feed), how


def _step(c: ModelConfig, policy: Policy, budget: int, batch: int) -> tuple[int, str]:
    """Logits and weights of the slots read at once; unless codes are read in place, also what they unpack to."""
    pages = -(-budget // PAGE)
    in_place = policy.codec.keys.in_place and policy.codec.values.in_place and policy.selection.reads_all
    pages = pages if in_place else min(pages, BLOCK)
    wide = (c.heads * pages if in_place else 2 * c.kv_heads * pages * PAGE) * c.head_dim
    what = f"{pages} pages × {c.heads} heads" if in_place else f"2 × {pages} pages × {PAGE} × {c.kv_heads} heads"
    numbers = 2 * c.heads * pages * PAGE + wide + c.vocab + 2 * c.ffn
    how = (
        f"{batch} rows × (logits and weights 2 × {c.heads} × {pages * PAGE:,} slots + {what} × {c.head_dim}"
        f" + vocabulary {c.vocab:,} + feed-forward 2 × {c.ffn}) × 4 B"
    )
    return 4 * batch * numbers, how


def exact(config: ModelConfig, policies: Sequence[Policy], caches: Sequence[Cache], batch: int, length: int) -> Workspace:
    """By XLA's account of the two programs, compiled for this backend but not run; takes as long as compiling does."""
    shape: Any = jax.ShapeDtypeStruct
    ints, params = shape((batch,), "int32"), weights(config)
    tokens = shape((batch, bucket(length)), "int32")
    first = memory.compiled(loop.prefill.lower(config, params, tokens, ints, frozenset(needs(policies)) - REPLAYED).compile())
    state = loop.State(tuple(caches), ints, ints, ints, shape((batch,), "bool"))
    forced, stops = shape((batch, PAGE), "int32"), shape((1,), "int32")
    lowered = loop.decode.lower(config, params, tuple(policies), state, None, forced, stops, n=1, watch=frozenset())
    step = memory.compiled(lowered.compile())
    how = {
        "records": "outputs of the compiled prefill",
        "prefill": "temporaries of the compiled prefill",
        "decode": "temporaries of the compiled step, and outputs that take over no input's memory",
    }
    return Workspace(first.outputs, first.temporaries, step.temporaries + step.outputs - step.aliased, "XLA", how)
