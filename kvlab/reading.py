"""Attention over a cache: everything in blocks, or what a selection picked, and the open page's tail; merged exactly.

`policy` is a `kvlab.policy.Policy`. Masks are `[B, H, M, N, P]`, with M = 1 where all queries stand at one position.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvlab import attention, kernels
from kvlab.attention import MASKED, AttentionSpec, Partial
from kvlab.core import BLOCK, EMPTY, NO_BOUND, PAGE, Around, Cache, Pages, Tokens
from kvlab.slots import owners

GONE, STORED, READ = 0, 1, 2  # what became of a token: see `followed`


class Info(NamedTuple):
    """Diagnostics of one attention: entropy of each query head (nats), tokens read per KV head, which limit held them down
    (`kvlab.core.NO_BOUND` and so on), and what the selection named (for `followed`). Unused ones cost nothing.
    """

    entropy_BHQ: Any
    reads_BH: Any
    bound_BH: Any
    picked: Pages | Tokens = Pages(None)


def token(policy, cache: Cache, query_BHQD, pos_B, spec: AttentionSpec, shared=None):
    """One token's queries over what the selection names: output `[B, H, Q, D]`, log-sum-exp `[B, H, Q]`, `Info`, `shared`."""
    query, sees = query_BHQD * spec.scale, _sight(policy, spec, pos_B[:, None])
    coded = policy.codec.keys.query(query)
    tail_ok, bound = jnp.ones((), bool), jnp.full(cache.opened.shape, NO_BOUND)
    picked, visible = pick(policy, cache, query_BHQD, pos_B, spec, shared)
    bound = bound if picked.bound is None else picked.bound
    shared = shared if picked.shared is None else picked.shared
    if policy.implementation != "xla":
        done, reads, tail_ok = _by_kernel(policy, cache, coded, sees, pos_B, picked, spec)
    elif picked.index is None:
        done, reads = _everything(policy, cache, coded, sees, spec, in_one=True)
    else:
        done, reads, tail_ok = _picked(policy, cache, coded, visible, picked, spec)
    done = done._replace(out=policy.codec.values.output(done.out))
    if policy.tailed:
        done = attention.merge(done, _tail(policy, cache, query, sees, tail_ok, spec))
    out, lse, entropy = attention.finish(done)
    return out, lse, Info(entropy, reads, bound, picked._replace(bound=None, shared=None)), shared


def pick(policy, cache: Cache, query_BHQD, pos_B, spec: AttentionSpec, shared=None):
    """What the selection names for one token's queries, and what it was let see, `[B, H, N, P]`."""
    if policy.selection.reads_all:
        return Pages(None), None
    query = query_BHQD * spec.scale
    visible = _sight(policy, spec, pos_B[:, None])(cache.pos)[:, :, 0]
    logits = functools.partial(_logits, policy, cache, query, policy.codec.keys.query(query), spec)
    around = Around(shared, logits, policy.implementation)
    return policy.selection.select(cache.index, query, visible, cache, around), visible


def followed(policy, cache: Cache, picked: Pages | Tokens, pos_B, spec: AttentionSpec, want_BW):
    """What became of the tokens at positions `want` for a query at `pos`, by KV head: int8 `[B, H, W]`, `GONE`, `STORED`, `READ`.

    `picked` is what the selection named for that query. A token that the query may not see, or a negative position, is gone.
    """
    pos = policy.slots.apart(cache.pos, cache, EMPTY)
    there = _sight(policy, spec, pos_B[:, None])(pos)[:, :, 0, ..., None] & (pos[..., None] == want_BW[:, None, None, None])
    found = there.any((2, 3))
    if picked.index is None:
        return jnp.where(found, READ, GONE).astype(jnp.int8)
    B, H, N, P = pos.shape
    places = N * P if isinstance(picked, Tokens) else N
    head = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None]
    read = jnp.zeros((B, H, places), bool).at[*head, jnp.maximum(picked.index, 0)].max(picked.index >= 0)
    read = read.reshape(B, H, N, -1, 1)
    return jnp.where((there & read).any((2, 3)), READ, jnp.where(found, STORED, GONE)).astype(jnp.int8)


def chunk(policy, cache: Cache, query_BTHGD, key_BHTD, value_BHTD, pos_BT, spec: AttentionSpec):
    """Queries of T tokens over all that is stored and, causally, over the chunk itself: `[B, T, H, G, D]`; pads give 0."""
    B, T, H, G, D = query_BTHGD.shape
    query = jnp.moveaxis(query_BTHGD, 1, 2).reshape(B, H, T * G, D) * spec.scale
    sees = _sight(policy, spec, jnp.repeat(pos_BT, G, 1))
    done, _ = _everything(policy, cache, policy.codec.keys.query(query), sees, spec, in_one=False)
    done = done._replace(out=policy.codec.values.output(done.out))
    if policy.tailed:
        done = attention.merge(done, _tail(policy, cache, query, sees, jnp.ones((), bool), spec))
    own = _raw(
        query, key_BHTD[:, :, None], value_BHTD[:, :, None], sees(jnp.broadcast_to(pos_BT[:, None, None], (B, H, 1, T))), spec
    )
    out, _, _ = attention.finish(attention.merge(done, own))
    return jnp.moveaxis(out.reshape(B, H, T, G, D), 2, 1)


def _sight(policy, spec: AttentionSpec, now_BM):
    """From positions `[B, H, N, P]` to what queries at `now` may see of them, by the model's rules and by the retention's.

    `owner [B, M]` says which head a page of a pool is given to.
    """
    now, rule = now_BM[:, None, :, None, None], policy.retention.visibility()

    def sees(pos_BHNP, owner=None):
        of_head = lambda x: x.reshape(1, -1, 1, 1, 1) if owner is None else x[owner][:, None, None, :, None]
        mine = rule.by_head(of_head)
        pos = pos_BHNP[:, :, None]
        return spec.sees(pos, now) & mine.mask(pos, now)

    return sees


def _nothing(query) -> Partial:
    return attention.nothing(*query.shape)


def in_tail(waiting_BHW, number):
    """Which of the pages `number [N]` wait in the tail, `[B, H, N]`."""
    return (number[:, None] == waiting_BHW[:, :, None]).any(-1)


def pooled(policy, cache: Cache, query, sees, spec):
    """Every visible token of a pool, `BLOCK` pages for each head at a time: one partial for each page, merged by its owner."""
    (B, H), M = cache.opened.shape, cache.pos.shape[2]
    block = min(BLOCK * H, M)
    owner = owners(cache.bounds, M)

    def step(i, carry):
        done, reads = carry
        start = jnp.minimum(i * block, M - block)
        number, cut = start + jnp.arange(block), lambda x, axis: lax.dynamic_slice_in_dim(x, start, block, axis)
        of, pos = cut(owner, 1), cut(cache.pos, 2)
        ok = sees(pos, of) & (number >= i * block)[:, None]
        mine = of[:, None] == jnp.arange(H)[:, None]
        reads = reads + jnp.where(mine, ok[:, :, -1].sum(-1), 0).sum(-1, dtype=jnp.int32)
        if policy.tailed:
            ok = ok & ~in_tail(cache.waiting, number).any(1)[:, None, None, :, None]
        code = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), policy.layout.slice(cache.memory, start, block))
        mixed = jnp.take_along_axis(query, of[..., None, None], 1)
        new = _coded(policy, mixed, code, jnp.swapaxes(ok, 1, 3), spec, jnp.swapaxes(pos, 1, 2))
        return attention.merge_by(done, new, mine), reads

    empty = _nothing(query), jnp.zeros((B, H), jnp.int32)
    return lax.fori_loop(0, -(-M // block), step, empty)


def weights(policy, cache: Cache, query_BHQD, pos_B, spec: AttentionSpec, lse_BHQ):
    """What one token's queries gave each stored token, the mean over Q: `[B, H, N, P]`. Reads every key once more."""
    query = query_BHQD * spec.scale
    logits = _logits(policy, cache, query, policy.codec.keys.query(query), spec)
    lse = jnp.where(jnp.isfinite(lse_BHQ), lse_BHQ, 0.0)[..., None, None]
    owner = owners(cache.bounds, cache.pos.shape[2]) if policy.slots.pooled else None
    ok = _sight(policy, spec, pos_B[:, None])(cache.pos, owner)
    if owner is not None:
        lse = jnp.swapaxes(jnp.take_along_axis(lse, owner[..., None, None, None], 1), 1, 3)
    return jnp.where(ok, jnp.exp(jnp.where(ok, logits, MASKED) - lse), 0.0).mean(2)


def _coded(policy, query, code, ok, spec, pos, by_page=False) -> Partial:
    logits = spec.cap(policy.codec.keys.scores(query, code["k"], by_page, pos))
    return attention.partial(logits, ok, lambda w: policy.codec.values.mix(w, code["v"]))


def _raw(query, key_BHWPD, value_BHWPD, ok, spec) -> Partial:
    """Over pages or a chunk that are not coded."""
    logits = spec.cap(jnp.einsum("bhqd,bhwpd->bhqwp", query, key_BHWPD))
    return attention.partial(logits, ok, lambda w: jnp.einsum("bhqwp,bhwpd->bhqd", w, value_BHWPD))


def _everything(policy, cache: Cache, query, sees, spec, in_one: bool):
    return pooled(policy, cache, query, sees, spec) if policy.slots.pooled else _blocks(policy, cache, query, sees, spec, in_one)


def _blocks(policy, cache: Cache, query, sees, spec, in_one: bool):
    """Every visible token: in one pass where that is allowed, codes are read in place and most are live, else by blocks.

    A `native` layout's own products, which take no copy of a block, serve for numbers in place.
    """
    B, H, N, _ = cache.pos.shape
    empty = _nothing(query), jnp.zeros((B, H), jnp.int32)

    def read(start, pages, floor):
        number, pos = start + jnp.arange(pages), lax.dynamic_slice_in_dim(cache.pos, start, pages, 2)
        ok = sees(pos) & (number >= floor)[:, None]
        reads = ok[:, :, -1].sum((-1, -2), dtype=jnp.int32)
        if policy.tailed:
            ok = ok & ~in_tail(cache.waiting, number)[:, :, None, :, None]
        if native:
            logits = spec.cap(policy.layout.scores(cache.memory, query, start, pages))
            return attention.partial(logits, ok, lambda w: policy.layout.mix(cache.memory, w, start)), reads
        return _coded(policy, query, policy.layout.slice(cache.memory, start, pages), ok, spec, pos, by_page), reads

    def step(i, carry):
        done, reads = carry
        new, more = read(jnp.minimum(i * block, N - block), block, i * block)
        return attention.merge(done, new), reads + more

    by_page = in_one and policy.layout.by_page
    in_one = in_one and policy.codec.keys.in_place and policy.codec.values.in_place
    native = in_one and policy.layout.native > 0
    block = policy.layout.native if native else BLOCK
    if N <= (2 * BLOCK if in_one and not native else block):
        return read(0, N, 0)
    used = jnp.minimum(-(-cache.opened.max() * policy.unit // PAGE), N)
    loop = lambda: lax.fori_loop(0, -(-used // block), step, empty)
    return lax.cond(2 * used > N, lambda: read(0, N, 0), loop) if in_one and not native else loop()


def _logits(policy, cache: Cache, query, coded, spec):
    """Logits of all that is stored `[B, H, Q, N, P]`, from the codes block by block and from the tail; a pool's have H = 1."""
    B, H, N, P = cache.pos.shape
    block, pooled = min(N, BLOCK), policy.slots.pooled
    owner: Any = owners(cache.bounds, N) if pooled else None

    def step(i, out):
        start = jnp.minimum(i * block, N - block)
        code, pos = policy.layout.slice(cache.memory, start, block)["k"], lax.dynamic_slice_in_dim(cache.pos, start, block, 2)
        if pooled:  # a page stands where a head does otherwise
            mixed = jnp.take_along_axis(coded, lax.dynamic_slice_in_dim(owner, start, block, 1)[..., None, None], 1)
            turn = lambda x: jnp.swapaxes(x, 1, 2)
            new = policy.codec.keys.scores(mixed, jax.tree.map(turn, code), pos_BHNP=turn(pos))
            new = jnp.swapaxes(new, 1, 3)
        else:
            new = policy.codec.keys.scores(coded, code, policy.layout.by_page, pos)
        return lax.dynamic_update_slice_in_dim(out, new, start, 3)

    out = lax.fori_loop(0, -(-N // block), step, jnp.zeros((B, H, query.shape[2], N, P)))
    for w in range(policy.waits if policy.tailed else 0):
        own = jnp.einsum("bhqd,bhpd->bhqp", query, cache.tail[0][:, :, w])[..., None, :]
        here = (jnp.arange(N) == cache.waiting[:, :, w, None])[:, :, None, :, None]
        if pooled:
            own, here = jnp.where(here, own, 0.0).sum(1, keepdims=True), here.any(1, keepdims=True)
        out = jnp.where(here, own, out)
    return spec.cap(out)


def _by_kernel(policy, cache: Cache, query, sees, pos_B, picked, spec):
    """As `_picked`, of what was picked or of everything, by the kernel of the policy's implementation."""
    done, _ = kernels.read(policy, cache, query, pos_B, spec, picked)
    visible = sees(cache.pos)[:, :, 0]
    if picked.index is None:
        return done, visible.sum((-1, -2), dtype=jnp.int32), jnp.ones((), bool)
    reads = _chosen(visible, picked.index).sum((-1, -2), dtype=jnp.int32)
    return done, reads, _tail_picked(policy, cache, picked) if policy.tailed else jnp.ones((), bool)


def _chosen(of_BHX, index_BHR):
    """What a list padded with −1 names of masks `[B, H, X, p]`: `[B, H, R, p]`."""
    return jnp.take_along_axis(of_BHX, jnp.maximum(index_BHR, 0)[..., None], 2) & (index_BHR >= 0)[..., None]


def _tail_picked(policy, cache: Cache, picked):
    """Which tokens of the tail are among those picked, `[B, H, 1, W, P]`, or 1 for P where pages were."""
    own = cache.waiting[..., None]
    if isinstance(picked, Tokens):
        own = jnp.where(own < 0, EMPTY, own * PAGE + jnp.arange(PAGE))
    return ((own[..., None] == picked.index[:, :, None, None]).any(-1) & (own >= 0))[:, :, None]


def _picked(policy, cache: Cache, query, visible_BHNP, picked, spec):
    """The pages or slots that a selection named, in blocks; tokens read; and which tokens of the tail are among them."""
    B, H, N, _ = cache.pos.shape
    index = picked.index
    single = isinstance(picked, Tokens)
    fetch = policy.layout.tokens if single else policy.layout.pages
    view = visible_BHNP.reshape(B, H, -1, 1) if single else visible_BHNP
    stored, tail_ok = visible_BHNP, jnp.ones((), bool)
    if policy.tailed:
        stored = visible_BHNP & ~in_tail(cache.waiting, jnp.arange(N))[..., None]
        tail_ok = _tail_picked(policy, cache, picked)
    stored = stored.reshape(view.shape)
    block = min(index.shape[-1], BLOCK * PAGE if single else 1 if policy.layout.by_page else BLOCK)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, -index.shape[-1] % block)), constant_values=-1)

    def step(i, done):
        some = lax.dynamic_slice_in_dim(index, i * block, block, 2)
        code, at = fetch(cache.memory, jnp.maximum(some, 0)), jnp.maximum(some, 0)[..., None]
        pos = jnp.take_along_axis(cache.pos.reshape(view.shape), at, 2)
        return attention.merge(done, _coded(policy, query, code, _chosen(stored, some)[:, :, None], spec, pos))

    most = (index >= 0).sum(-1).max()  # ids come first, so only the densest row's blocks are walked
    done = lax.fori_loop(0, -(-most // block), step, _nothing(query))
    return done, _chosen(view, index).sum((-1, -2), dtype=jnp.int32), tail_ok


def _tail(policy, cache: Cache, query, sees, tail_ok, spec) -> Partial:
    """The newest pages, exact until they are committed."""
    key, value = cache.tail
    pos = policy.slots.pages(cache.pos, cache.waiting)
    ok = sees(jnp.where(cache.waiting[..., None] < 0, EMPTY, pos)) & tail_ok
    return _raw(query, key, value, ok, spec)
