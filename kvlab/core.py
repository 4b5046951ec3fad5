"""A cache policy is a product of four parts. Read this file first.

    Retention   which tokens stay stored          kvlab/retention/
    Codec       what stored vectors look like     kvlab/codec/
    Layout      where the codes lie               kvlab/layout/
    Selection   what one query reads              kvlab/selection/

`Policy` (kvlab/policy.py) owns the rest: positions, counts, the open page, the raw tail and the merge. Parts and policies
are frozen dataclasses registered as pytrees: a field made with `static()` sets shapes and is part of jit's key; any other
field is an array leaf, which may change without a new trace. State is explicit: every method takes a cache and returns one.

Dimensions, used as suffixes throughout:

    B row of the batch   H KV head   G query head per KV head   Q queries at once   D head dim   V vocabulary
    T token of a prompt  S slot      N page of 64 slots         P slot in a page    R unit read  L layer  C code width

A *slot* is where a token lies; `Cache.pos` holds the original position of the token in each slot, EMPTY where none.
Masks, windows and ties look at positions, never at slot numbers. A page is *placed when it opens and committed when it
fills*: its positions and scores go to the final slots at once; only its codes wait, exact, in the tail until a scale can
be computed over the whole page.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp

from kvlab.errors import ConfigError

PAGE = 64
EMPTY = -1
BLOCK = 8  # pages of codes turned into numbers at a time

static = functools.partial(dataclasses.field, metadata={"static": True})


@dataclass_transform(frozen_default=True)
def part(cls):
    """Class decorator: a frozen dataclass that is a pytree; fields made with `static()` are not leaves.

    The class itself belongs to what jit tells apart: with `jax.tree_util.register_dataclass`, structures of two classes are equal
    where their static fields are, and then one part may run the program of another.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names: dict[bool, list[str]] = {True: [], False: []}
    for field in dataclasses.fields(cls):
        names[field.metadata.get("static", False)].append(field.name)
    leaves, fixed = names[False], names[True]
    keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

    def flatten(x):
        return [getattr(x, name) for name in leaves], (cls, *[getattr(x, name) for name in fixed])

    def flatten_with_keys(x):
        values, about = flatten(x)
        return list(zip(keys, values)), about

    def unflatten(about, values):
        return cls(**dict(zip(leaves, values)), **dict(zip(fixed, about[1:])))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


# ---------------------------------------------------------------------------------------------------- the four parts


class Visibility(NamedTuple):
    """A retention's own mask, as data (kernels cannot call methods): pos < sinks, or pos > now − window."""

    sinks: Any = 0
    window: Any = None

    def by_head(self, place: Callable) -> "Visibility":
        """The same with `place` of each figure that differs by head, `[H]`."""
        return Visibility(*(place(x) if getattr(x, "ndim", 0) else x for x in self))

    def mask(self, pos, now):
        return True if self.window is None else (pos < self.sinks) | (pos > now - self.window)


class Retention:
    """Which tokens stay. Says how many slots it wants and ranks tokens; the policy masks, picks and moves.

    A method is as many of these functions as it takes: most are `score` and `priority`.

    Attributes:
      unit: tokens evicted together while decoding: 1, 64 (a page), or None for whatever the other parts need.
      evicts: whether a full cache evicts (True) or refuses to grow (False).
      aligned: with pages as units, a prompt keeps whole aligned pages (as appending would have left them).
      pool: "max" or "mean": how the priorities of a page's tokens make the page's.
      needs: what `score` is given besides, by keyword, of `kvlab.needs`; what nobody needs is not kept.
      observes: `observe` is shown the attention of every token that is decoded.
      uneven: heads get unequal budgets, as `shares` says, in pages of one pool for each row.
      renews: a token's score depends on the others that are stored, so it is not kept but taken anew, over all that is
        stored, whenever something has to go. That reads every key and value: let such a retention evict pages.
    """

    needs: Any = ()
    unit: Any = None
    evicts: Any = True
    aligned: Any = False
    pool: Any = "max"
    observes: Any = False
    uneven: Any = False
    renews: Any = False

    def budget(self, prompt: int, total: int, unit: int) -> int:
        """Tokens to keep for a prompt of `prompt` tokens in a sequence that may grow to `total`. Static."""
        return total

    def at(self, layer: int, model) -> "Retention":
        """The part for one layer of a model (`ModelConfig`), for parts that differ by layer; idempotent."""
        return self

    def score(self, key, value, pos, **seen):
        """A pytree of per-token state, leaves `[B, H, T, ...]`, from keys and values `[B, H, T, D]`, `pos [B, 1 or H, T]`.

        Tokens come in order of position, pads (EMPTY) last. `seen` holds what the retention `needs`.
        """
        return ()

    def fresh(self, key, value, pos, **seen):
        """As `score`, for one token that comes after the prompt (T = 1): `seen` lacks what only prompts have."""
        return self.score(key, value, pos, **seen)

    def observe(self, state, weight, pos, now):
        """The state after a token at position `now [B, 1, 1]` gave the stored tokens, at `pos [B, H, X]`, these attention
        weights `[B, H, X]`: the mean over the query heads of a KV head. Its own weight is among them."""
        raise NotImplementedError(f"{type(self).__name__} observes and must define observe(state, weight, pos, now)")

    def priority(self, state, pos, now):
        """Float `[B, H, X]` for tokens at `pos [B, H, X]`: the lowest goes first, −inf is never kept, ties go oldest first.

        `state` is what `score` returned, for the same X tokens; `now [B, 1, 1]` is the newest position.
        """
        raise NotImplementedError(f"{type(self).__name__} must define priority(state, pos, now)")

    def shares(self, priority, pos, budget: int):
        """Tokens that each head may hold, int32 `[B, H]`, where `uneven`; from the priorities of a prompt's tokens, `[B, H, T]`.

        `budget` is what each would have if they were equal. Pages are given out for as many, and filled as they come.
        """
        raise NotImplementedError(f"{type(self).__name__} is uneven and must define shares(priority, pos, budget)")

    def visibility(self) -> Visibility:
        """What of the stored tokens a query may see; all of them unless this says less. A figure may differ by head, `[H]`."""
        return Visibility()


class Codec:
    """What a stored vector looks like. Arithmetic only; addresses are the layout's.

    A code is a dict of leaves `[B, H, N, p, C]`, p = 64 in `x` (a row per token), and any p that divides 64 in parameters: the
    row of a token is its offset · p // 64. `decode` also takes single tokens, p = 1 throughout. Every codec serves for keys and
    for values; `KV` (kvlab/codec/kv.py) names one for each. `pos [B, H, N, p]` is where the vectors' tokens stand, EMPTY
    where there is none; most codecs have no use for it.

    Attributes:
      group: tokens that share a parameter: 1, or 64 for a scale over a page.
      in_place: codes are fp32 numbers that products read where they lie; otherwise at most BLOCK pages are unpacked.
      residual: newest tokens that stay exact, at least; whole pages of them wait in the tail.
    """

    group: Any = 1
    in_place: Any = False
    residual: Any = 0

    @property
    def keys(self) -> "Codec":
        return self

    @property
    def values(self) -> "Codec":
        return self

    def at(self, layer: int, model) -> "Codec":
        """The part for one layer of a model (`ModelConfig`), for parts that differ by layer; idempotent."""
        return self

    def encode(self, x_BHNPD, pos_BHNP=None) -> dict[str, jax.Array]:
        raise NotImplementedError

    def decode(self, code, pos_BHNP=None) -> jax.Array:
        """Float32 `[B, H, N, p, D]`."""
        raise NotImplementedError

    def query(self, query_BHQD):
        """What `scores` takes for these scaled queries; once, whatever is read. For codecs that store turned keys."""
        return query_BHQD

    def output(self, out_BHQD):
        """Undoes what `encode` did to all values alike, on a sum of them; once, after everything coded was read."""
        return out_BHQD

    def scores(self, query_BHQD, code, by_page: bool = False, pos_BHNP=None):
        """Logits `[B, H, Q, N, P]` of what `query` made of scaled queries against a block of codes.

        `by_page` takes a product for each page, where one over all of them would make XLA copy the pages side by side.
        """
        key = self.decode(code, pos_BHNP)
        if not by_page:
            return jnp.einsum("bhqd,bhnpd->bhqnp", query_BHQD, key)
        query = jnp.broadcast_to(query_BHQD[:, :, None], (*key.shape[:3], *query_BHQD.shape[2:]))
        return jnp.swapaxes(query @ jnp.swapaxes(key, 3, 4), 2, 3)

    def mix(self, weight_BHQNP, code):
        """Weighted sum `[B, H, Q, D]` of a block of codes; page by page, which streams each page once."""
        return jnp.einsum("bhqnp,bhnpd->bhnqd", weight_BHQNP, self.decode(code)).sum(2)

    def page_bytes(self, dim: int) -> int:
        """Bytes that one page of one head's vectors takes, parameters included."""
        raise NotImplementedError


class Layout:
    """Where codes lie: an address map over the leaves of a code, `{"k": {...}, "v": {...}}`, without arithmetic.

    Attributes:
      whole_pages: pages are immutable once written, so tokens cannot be replaced one by one.
      by_page: pages lie apart, so products of few queries go page by page, and named pages are read one at a time.
      shares: rows may share pages, so how many there are in all is for the host to say (`rows`).
      native: pages that `scores` and `mix` take at a time where codes are the numbers themselves, because products with
        canonical codes would be copies here; 0: the codec's own products are as good.
    """

    whole_pages = False
    by_page = False
    shares = False
    native = 0

    def at(self, layer: int, model) -> "Layout":
        """The part for one layer of a model (`ModelConfig`), for parts that differ by layer; idempotent."""
        return self

    def overhead(self, codec: Codec, dim: int, pages: int) -> int:
        """Bytes that a page of a row and head takes besides its codes, in a cache of so many pages."""
        return 0

    def pack(self, code, held_BHN):
        """Memory that holds canonical codes `[B, H, N, p, C]`; pages that are not `held` will be written before they are read."""
        raise NotImplementedError

    def write(self, memory, page_BH, offset_BH, code):
        """Writes `[B, H, 1, p, C]` at a page, or one token at (page, offset); pages ≥ N are dropped."""
        raise NotImplementedError

    def head(self, memory, row, head):
        """The memory of one row and head alone, as of a batch of one with one head."""
        return jax.tree.map(lambda x: x[row, head][None, None], memory)

    def rows(self, memory, index, places: int | None = None):
        """The memory of the named rows, in that order. With `shares`, `places` pages are there from then on for all of them."""
        return jax.tree.map(lambda x: x[index], memory)

    def forget(self, memory, held_BHN):
        """The same memory once only the pages `held` are needed."""
        return memory

    def used(self, memory, index):
        """With `shares`: how many places the named rows need for what they hold."""
        raise NotImplementedError

    def free(self, memory):
        """With `shares`: how many places nobody has."""
        raise NotImplementedError

    def slice(self, memory, start, pages: int):
        """Canonical codes of consecutive pages."""
        raise NotImplementedError

    def pages(self, memory, page_BHR):
        """Canonical codes of named pages, as `[B, H, R, p, C]`."""
        raise NotImplementedError

    def tokens(self, memory, slot_BHR):
        """Canonical codes of named slots, as `[B, H, R, 1, C]`; a page's parameters are repeated for each."""
        raise NotImplementedError

    def scores(self, memory, query_BHQD, start, pages: int):
        """Where `native`: dot products `[B, H, Q, N, P]` with the keys of consecutive pages of numbers."""
        raise NotImplementedError

    def mix(self, memory, weight_BHQNP, start):
        """Where `native`: weighted sums `[B, H, Q, D]` of the values of consecutive pages of numbers."""
        raise NotImplementedError


class Pages(NamedTuple):
    """A selection's answer: pages to read, `[B, H, R]`, padded with −1 at the end.

    An index of None is everything. `bound [B, H]` says which limit was active (`NO_BOUND`, `BY_SHARE`, `BY_MAXIMUM`).
    `shared` goes to the layers after this one; where it is None, they get what this one got.
    """

    index: Any
    bound: Any = None
    shared: Any = None


class Tokens(NamedTuple):
    """A selection's answer: slots to read, `[B, H, R]`, padded with −1 at the end. The rest as in `Pages`."""

    index: Any
    bound: Any = None
    shared: Any = None


NO_BOUND, BY_SHARE, BY_MAXIMUM = 0, 1, 2  # everything was read; a share of what is visible or of its attention; a largest number


class Around(NamedTuple):
    """What a selection may use besides its own state.

    `shared` is what a layer before passed on, or None; `logits()` gives the exact logits `[B, H, Q, N, P]` of all that is
    stored, which reads every key; `implementation` is the policy's, for selections that have a kernel.
    """

    shared: Any
    logits: Callable[[], Any]
    implementation: str = "xla"


class Selection:
    """What one query reads of what is stored; may keep index keys beside the cache.

    Attributes:
      reads_all: nothing is left out, so attention is over every visible token.
      by_position: slots of different layers must hold the same tokens, so no layer may evict.
      single: it is known to answer in `Tokens`, which not everything reads.
      from_prompt: `start` learns from the prompt's keys, so the prompt must be there at once.
    """

    reads_all = False
    by_position = False
    single: Any = False
    from_prompt: Any = False

    def at(self, layer: int, model, token_bytes: float) -> "Selection":
        """The part for one layer of a model (`ModelConfig`), whose codes take `token_bytes` a token and head; idempotent."""
        return self

    def rows(self, index) -> "Selection":
        """The part for the named rows of a batch, where it holds a figure per row."""
        return self

    def index_bytes(self, dim: int) -> float:
        """Bytes of index keys that a query reads, per stored token and KV head."""
        return 0.0

    def start(self, key_BHNPD, pos_BHNP):
        """State for a filled cache; EMPTY slots have zero keys."""
        return ()

    def write(self, state, page_BH, offset_BH, key_BHD, pos_B, fresh_BH):
        """State after a token was placed; `fresh` where its page held nothing else. Pages ≥ N are dropped.

        Tokens that are cut off later leave their state behind; `visible` says that they are gone.
        """
        return state

    def select(self, state, query_BHQD, visible_BHNP, cache: "Cache", around: Around) -> Pages | Tokens:
        """What the queries of each KV head read together; queries are scaled."""
        raise NotImplementedError(f"{type(self).__name__} must define select(state, query, visible, cache, around)")


def kept(length: int, ratio: float) -> int:
    """Tokens that stay of `length` when the share `ratio` is removed: max(1, ⌊length·(1 − ratio)⌋), and 0 for ratio 1.

    The floor forgives rounding: 100 tokens at ratio 0.9 leave 10, though 100·(1 − 0.9) is 9.999….
    Errors: ConfigError for a ratio outside 0 … 1.
    """
    if not 0 <= ratio <= 1:
        raise ConfigError(f"ratio={ratio}; allowed: 0 (remove nothing) … 1 (remove everything)")
    return 0 if ratio == 1 else max(1, math.floor(length * (1 - ratio) + 1e-9))


# ----------------------------------------------------------------------------------------------- what passes between


@part
class Record:
    """What one layer's prefill leaves behind for every policy: post-RoPE keys, values, positions (EMPTY in pads).

    `seen` holds what the policies need besides, by the names in `kvlab.needs`.
    """

    key_BHTD: Any
    value_BHTD: Any
    pos_BT: Any
    seen: Any = dataclasses.field(default_factory=dict)


@part
class Cache:
    """One layer's cache.

    `opened` counts the units (tokens or pages) that were ever placed, up to the budget. `waiting` numbers the pages whose
    vectors lie in the tail, oldest first, −1 where there is none; the last of them is the open page and `offset` how many
    tokens it holds (64: none is open). Both are unused where tokens are replaced one by one. `lost` is the position of the
    token that last made the cache drop others, −1 if nothing ever was: the cache can be cut back to any length above it.
    """

    pos: Any  # [B, H, N, P] int32
    opened: Any  # [B, H] int32
    waiting: Any  # [B, H, W] int32
    offset: Any  # [B, H] int32
    lost: Any  # [B, H] int32
    memory: Any  # the layout's
    tail: Any  # (keys, values) of the waiting pages, [B, H, W, P, D], or ()
    retained: Any  # the retention's per-token state, leaves [B, H, N, P, ...]
    carried: Any  # what a retention that renews needs of the prompt, leaves [B, H, ...]
    index: Any  # the selection's state
    bounds: Any = ()  # [B, H + 1] int32, where heads have unequal budgets: `kvlab.slots.Pooled`, leaves [B, 1, M, P, ...]
    budget: int = static(default=0)  # tokens
