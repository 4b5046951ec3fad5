"""What a cache takes: by arithmetic, by adding up its arrays, and by XLA's own account.

Three figures go with every run. The *nominal* ratio is what was asked for; the *logical* one counts live tokens; the
*resident* one adds up every array that exists: codes, scales, positions, tail, index keys, padding. Only the last is
memory saved.

What one step *reads* of it is another matter: a selection stores all and reads a part (`read_bytes`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvlab import slots
from kvlab.core import EMPTY, PAGE, Cache
from kvlab.errors import ConfigError
from kvlab.policy import Policy


def kv_bytes(batch: int, tokens: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of plain keys and values: 2 · batch · tokens · layers · heads · dim · itemsize."""
    return 2 * batch * tokens * layers * kv_heads * head_dim * itemsize


def resident(tree) -> int:
    """Bytes of all arrays, or shapes of arrays, in a cache (or any pytree)."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def page_bytes(policy: Policy, head_dim: int) -> int:
    """Codes of one head's page, keys and values, by the codecs' own figures."""
    return policy.codec.keys.page_bytes(head_dim) + policy.codec.values.page_bytes(head_dim)


def token_bytes(policy: Policy, head_dim: int) -> float:
    """Codes of one token and KV head, key and value; parameters that a page shares are spread over its tokens."""
    return page_bytes(policy, head_dim) / PAGE


POSITION = 4  # bytes of the position of one slot of one head


def read_bytes(policy: Policy, head_dim: int, reads, stored):
    """Bytes that a KV head of one layer reads at one decode step: `reads` tokens out of `stored` ones, arrays of any shape.

        reads · codes of a token + stored · (index keys of a token + 4 of its position)

    Positions are looked at for every stored token, because masks are made of them; empty slots count for nothing. Tokens in
    the tail count as if they were coded already, so that the figure does not depend on where a page ends.
    """
    each = policy.selection.index_bytes(head_dim) + POSITION
    return reads * token_bytes(policy, head_dim) + stored * each


def full_read_bytes(full: Policy, head_dim: int, length):
    """Bytes that a KV head of one layer reads of the plain policy's cache of `length` tokens."""
    return read_bytes(full, head_dim, length, length)


@jax.jit
def stored(caches: Sequence[Cache]) -> jax.Array:
    """Tokens in each layer's cache, `[L, B, H]`."""
    return jnp.stack([(slots.of(cache).apart(cache.pos, cache, EMPTY) >= 0).sum((-1, -2)) for cache in caches])


def gated_share(read: float, layers: int, gated: int) -> float:
    """Share that each of `gated` layers may read, so that all `layers` read the share `read` on average and the rest all.

        r = 1 − layers · (1 − read) / gated

    Errors: ConfigError where the layers that read all exceed `read` by themselves.
    """
    share = 1 - layers * (1 - read) / max(gated, 1)
    if not (gated and 0 < share and read <= 1):
        raise ConfigError(
            f"read={read} with {gated} of {layers} layers sparse; allowed: above {1 - gated / layers:.3f} "
            "(the layers that read all take that), up to 1; or let fewer layers read all"
        )
    return share


def expected(policy: Policy, batch: int, kv_heads: int, head_dim: int, budget: int) -> int:
    """Bytes that one layer's cache must have, from the parts' own figures. Equal to `resident` exactly.

    For parts without state of their own; a page takes its codes and 64 positions, a row and head three counters, one for
    each page that waits to be full and, where codes are committed by the page, these pages' raw vectors.
    """
    pages = -(-budget // PAGE)
    codes = page_bytes(policy, head_dim)
    tail = policy.waits * 2 * PAGE * head_dim * 4 if policy.tailed else 0
    codes += policy.layout.overhead(policy.codec, head_dim, pages)
    return batch * kv_heads * (pages * (codes + PAGE * POSITION) + tail + (3 + policy.waits) * 4)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes per sequence over all layers, beside those of the full fp32 cache of the same length.

    Attributes:
      resident_bytes: sum of all arrays.
      full_bytes: what the plain fp32 policy would hold, positions included.
      nominal_ratio: share of fp32 keys and values that was asked for: budget × bits, over `total` tokens.
      logical_ratio: share that the codes of visible tokens take, over the tokens seen so far.
      resident_ratio: resident_bytes / full_bytes.
    """

    resident_bytes: int
    full_bytes: int
    nominal_ratio: float
    logical_ratio: float

    @property
    def resident_ratio(self) -> float:
        return self.resident_bytes / self.full_bytes


def footprint(policies: Sequence[Policy], caches: Sequence[Cache], full: Policy, total: int) -> Footprint:
    """The three figures of a session's caches.

    Args:
      full: the plain policy to compare with.
      total: tokens that a cache must have room for, prompt and continuation.
    """
    (rows, heads), dim = caches[0].opened.shape, _head_dim(caches[0], policies[0])
    budget = full.budget(total, total)
    full_bytes = len(caches) * expected(full, 1, heads, dim, budget)
    seen = float((caches[0].pos.max((1, 2, 3)) + 1).mean())
    plain = len(caches) * heads * 2 * dim * 4
    asked = live = 0.0
    for policy, cache in zip(policies, caches):
        per_token = heads * token_bytes(policy, dim)
        asked += min(policy.retention.budget(total, total, 1), total) * per_token
        live += float((positions(policy, cache) >= 0).sum()) / (rows * heads) * per_token
    return Footprint(resident(caches) // rows, full_bytes, asked / (plain * total), live / (plain * seen))


def _head_dim(cache: Cache, policy: Policy) -> int:
    code = policy.layout.slice(cache.memory, 0, 1)
    return jax.eval_shape(policy.codec.values.decode, code["v"]).shape[-1]


def positions(policy: Policy, cache: Cache):
    """Positions of the tokens that a query at the newest position would see, `[B, H, N, P]`, EMPTY elsewhere."""
    pos = slots.of(cache).apart(cache.pos, cache, EMPTY)
    rule = policy.retention.visibility().by_head(lambda x: x.reshape(-1, 1, 1))
    return jnp.where(rule.mask(pos, pos.max((1, 2, 3), keepdims=True)), pos, EMPTY)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """XLA's account of one compiled program, in bytes."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int


def compiled(program) -> Compiled:
    """From a `jax.jit(f).lower(...).compile()`."""
    m = program.memory_analysis()
    return Compiled(m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes)
