"""What every part owes the others, checked by running it with them.

    from kvlab.testing import check
    print(check(MyRule(size=96)))

Every product with the built-in parts must fill, append and attend with the shapes it promises, or be refused with a reason.
Then, with each built-in part once, over a ragged batch whose pads are poison: outputs equal dense attention over what is
stored, budgets hold, positions are unique and none is from the future, a row gives what it gives alone, bytes are what they
were said to be, one trace serves all steps, and no copy of the cache is made. Parts of a kind have to keep some promises more.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import memory, ranking, reading
from kvlab.codec import Int8, Raw
from kvlab.core import PAGE, Cache, Codec, Layout, Retention, Selection, Tokens
from kvlab.errors import ConfigError, KvlabError, RefusedPolicy
from kvlab.layout import Bicl, Contiguous, Paged, PageMajor
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import KeepAll, Random, Window
from kvlab.selection import Quest, ReadAll, Recency
from kvlab.testing import sequence as made
from kvlab.testing.sequence import Sequence

KINDS = {"retention": Retention, "codec": Codec, "layout": Layout, "selection": Selection}
BUILT_IN: dict[str, tuple] = {
    "retention": (KeepAll(), Window(70, 4), Random(size=96, unit=1), Random(size=128, unit=PAGE)),
    "codec": (Raw(), Int8(), Int8("channel")),
    "layout": (Contiguous(), PageMajor(), Paged(), Bicl(32)),
    "selection": (ReadAll(), Recency(sparsity=0.5), Quest(sparsity=0.5)),
}
SHAPE = ModelConfig(layers=2, hidden=24, ffn=32, heads=6, kv_heads=2, head_dim=32, vocab=64, context=1024)
STEPS = 80
TOLERANCE = 5e-5


class Breach(KvlabError):
    """A part broke its contract."""


@dataclasses.dataclass
class Report:
    """What was checked of a part.

    Attributes:
      products: combinations with the built-in parts whose shapes are right.
      refused: reasons by combination, of those that kvlab refuses to build.
      passed: the promises that were kept, as sentences.
      error: of a codec, the root mean square error of normal numbers, relative to them; else None.
    """

    part: Any
    products: int = 0
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    passed: list[str] = dataclasses.field(default_factory=list)
    error: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.part}", f"  {self.products} products with built-in parts fill, append and attend"]
        lines += [f"  {name}: refused, {reason}" for name, reason in self.refused.items()]
        return "\n".join([*lines, *(f"  {each}" for each in self.passed)])


def check(part: Any, model: ModelConfig | None = None) -> Report:
    """Puts a part through the contract. Takes half a minute; whatever it needs of a model, it gets of a small random one.

    Args:
      part: a retention, codec, layout or selection.
      model: the shape to check it at, for parts that were made for one; two layers of 2 KV heads of 32 otherwise.
    Errors: Breach with what was broken, by which combination, and what was seen.
    """
    shape = model or SHAPE
    kind = next((name for name, cls in KINDS.items() if isinstance(part, cls)), None)
    if kind is None:
        raise ConfigError(f"{part!r} is no part; give a retention, a codec, a layout or a selection")
    report, s = Report(part), _sequence(shape)
    policies = _products(kind, part, shape, s, report)
    if not policies:
        raise Breach(f"{part}: every product with built-in parts was refused: {next(iter(report.refused.values()))}")
    first = next(iter(policies.values()))
    if kind == "retention":
        ranks(first, s)  # the cheapest first
    for name, policy in policies.items():
        lives(name, policy, s)
    _one_trace(first, s)
    _in_place(first, shape)
    report.passed += [
        f"with {', '.join(policies)}: outputs equal dense attention over what is stored and read; budgets hold; positions are "
        "unique and none is from the future; a row alone gives what it gives beside others and their pads",
        "one trace serves every step and every equal part; the cache is updated in place",
    ]
    OWN[kind](first, s, report)
    return report


def _sequence(shape: ModelConfig) -> Sequence:
    return made.sequence((150, 97), 192, STEPS, shape.kv_heads, shape.groups, shape.head_dim)


# ------------------------------------------------------------------------------------------------------------ products


def _products(kind: str, part, shape: ModelConfig, s: Sequence, report: Report) -> dict[str, Policy]:
    """Checks the shapes of all products; returns as many as meet every built-in part once."""
    others = [name for name in KINDS if name != kind]
    meets: dict[str, Policy] = {}
    missing = {(name, i) for name in others for i in range(len(BUILT_IN[name]))}
    for picks in itertools.product(*(range(len(BUILT_IN[name])) for name in others)):
        chosen = dict(zip(others, picks))
        parts = {name: BUILT_IN[name][i] for name, i in chosen.items()} | {kind: part}
        name = " × ".join(_short(parts[name]) for name in others)
        try:
            policy = Policy(**parts).at(0, shape)
        except RefusedPolicy as error:
            report.refused[name] = str(error)
            continue
        _shapes(name, policy, s)
        report.products += 1
        if new := missing & set(chosen.items()):
            meets[name], missing = policy, missing - new
    return meets


def _short(part) -> str:
    fields = [f"{f.name}={getattr(part, f.name)}" for f in dataclasses.fields(part) if getattr(part, f.name) != f.default]
    return type(part).__name__ + (f"({', '.join(fields)})" if fields else "")


def _shapes(name: str, policy: Policy, s: Sequence) -> None:
    B, H, G, D = s.query.shape[1:]
    wanted = policy.retention.needs
    cache = jax.eval_shape(lambda r: policy.fill(r, _budget(policy, s)), s.prompt(wanted))
    own = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], s.later(wanted)))
    step = lambda c, k, q, t, own: policy.attend(policy.append(c, k, k, t, seen=own), q, t, s.spec)
    f = jax.ShapeDtypeStruct
    done = jax.eval_shape(step, cache, f((B, H, D), "f4"), f((B, H, G, D), "f4"), f((B,), "i4"), own)
    if done.out_BHQD.shape != (B, H, G, D):
        raise Breach(f"{name}: the output is {done.out_BHQD.shape}, it should be {(B, H, G, D)}")
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (cache, done.cache))
    if before != after:
        raise Breach(f"{name}: a step changes shapes or dtypes of the cache, from {before} to {after}")


def _budget(policy: Policy, s: Sequence) -> int:
    return policy.budget(int(s.lengths.max()), int(s.lengths.max()) + STEPS)


# ---------------------------------------------------------------------------------------------------------- a whole life


class Life(NamedTuple):
    first: Cache
    last: Cache
    seen: dict[str, np.ndarray]


def _live(policy: Policy, s: Sequence, budget: int) -> Life:
    """Fills and decodes; of every step the output, the positions, the waiting pages and what was picked."""
    wanted, pages = policy.retention.needs, None
    record = s.prompt(wanted)
    if policy.slots.pooled:
        pages = int(policy.pages(record, budget).max())
    first = policy.fill(record, budget, pages)
    key, value = made.appended(s)

    def step(cache, x):
        k, v, q, i, own = x
        now = s.lengths + i
        cache = policy.append(cache, k, v, now, seen=own)
        picked, visible = reading.pick(policy, cache, q, now, s.spec)
        done = policy.attend(cache, q, now, s.spec)
        seen = {"out": done.out_BHQD, "pos": cache.pos, "waiting": cache.waiting}
        if picked.index is not None:
            seen |= {"picked": picked.index, "tokens": jnp.asarray(isinstance(picked, Tokens)), "visible": visible}
        return done.cache, seen

    xs = key, value, jnp.asarray(s.query), jnp.arange(STEPS), s.later(wanted)
    last, seen = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs))(first, xs)
    return Life(first, last, jax.tree.map(np.asarray, seen))


def lives(name: str, policy: Policy, s: Sequence) -> None:
    """A whole life of one product, filled and decoded, against numpy. Errors: Breach."""
    life = _live(policy, s, _budget(policy, s))
    if (a := memory.resident(life.first)) != (b := memory.resident(life.last)):
        raise Breach(f"{name}: the cache took {a} bytes when filled and {b} after {STEPS} steps")
    for step in (0, 1, STEPS // 2, STEPS - 1):
        for row, head in np.ndindex(*life.seen["out"].shape[1:3]):
            _stored_well(name, policy, s, life, step, row, head)
            want, got = _dense(policy, s, life, step, row, head), life.seen["out"][step, row, head]
            if not np.allclose(got, want, atol=TOLERANCE * max(1, np.abs(want).max())):
                raise Breach(
                    f"{name}: row {row}, head {head}, step {step}: the output differs by {np.abs(got - want).max():.2g} from "
                    "dense attention over what the cache says it stores and reads"
                )
    _alone(name, policy, s, life)


def _slots(policy: Policy, life: Life, row: int, head: int) -> tuple[int, slice]:
    """Where a head's pages lie along the second and third axis of leaves."""
    if not policy.slots.pooled:
        return head, slice(None)
    return 0, slice(*np.asarray(life.first.bounds)[row, head : head + 2])


def _stored_well(name: str, policy: Policy, s: Sequence, life: Life, step: int, row: int, head: int) -> None:
    at, own = _slots(policy, life, row, head)
    pos, now = life.seen["pos"][step, row, at, own], int(s.lengths[row]) + step
    held = pos[pos >= 0]
    where = f"{name}: row {row}, head {head}, position {now}:"
    if len(np.unique(held)) != len(held):
        raise Breach(f"{where} a position is stored twice")
    if held.max(initial=-1) > now:
        raise Breach(f"{where} position {held.max()} is stored, which is in the future")
    if now not in held:
        raise Breach(f"{where} the newest token is not stored")
    if not policy.slots.pooled and len(held) > life.first.budget:
        raise Breach(f"{where} {len(held)} tokens are stored, the budget is {life.first.budget}")


def _dense(policy: Policy, s: Sequence, life: Life, step: int, row: int, head: int):
    """Attention in numpy over what a head's slots say they hold and its selection names."""
    at, own = _slots(policy, life, row, head)
    pages, waiting = life.seen["pos"][step, row, at], life.seen["waiting"][step, row, head]
    read = _named(life, step, row, head, pages)
    now, rule = int(s.lengths[row]) + step, policy.retention.visibility().by_head(lambda x: np.asarray(x)[head])
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    ok: list[np.ndarray] = []
    for n in range(len(pages))[own]:
        pos = pages[n]
        rows = [np.where((pos >= 0)[:, None], x[row, head, np.maximum(pos, 0)], 0).astype(np.float32) for x in (s.key, s.value)]
        if not (policy.tailed and n in waiting):
            rows = [made.through(codec, x, pos) for codec, x in zip((policy.codec.keys, policy.codec.values), rows)]
        sees = np.asarray(s.spec.sees(pos, now)) & np.asarray(rule.mask(pos, now))
        for found, each in ((keys, rows[0]), (values, rows[1]), (ok, sees & read[n])):
            found.append(each)
    key, value, seen = np.concatenate(keys), np.concatenate(values), np.concatenate(ok)
    logits = np.where(seen, s.query[step, row, head] @ key.T * s.spec.scale, -np.inf)
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ value


def _named(life: Life, step: int, row: int, head: int, pages) -> np.ndarray:
    """Which slots `[N, P]` are read."""
    if "picked" not in life.seen:
        return np.ones(pages.shape, bool)
    picked = life.seen["picked"][step, row, head]
    named = picked[picked >= 0]
    if len(picked) and (picked[: len(named)] < 0).any():
        raise Breach("the selection names slots or pages after a −1; ids come first, padding last")
    if len(np.unique(named)) != len(named):
        raise Breach("the selection names a slot or a page twice")
    single = life.seen["tokens"][step]
    read = np.zeros(pages.size if single else len(pages), bool)
    read[named] = True
    return read.reshape(pages.shape) if single else np.repeat(read[:, None], PAGE, 1)


def _alone(name: str, policy: Policy, s: Sequence, life: Life) -> None:
    """The shorter row without the other and without its pads."""
    row = int(np.argmin(s.lengths))
    alone = _live(policy.for_rows(np.array([row])), s.row(row), _budget(policy, s))
    got, want = alone.seen["out"][:, 0], life.seen["out"][:, row]
    if not np.allclose(got, want, atol=TOLERANCE * max(1, np.abs(want).max())):
        raise Breach(f"{name}: row {row} alone gives other outputs than in the batch, by {np.abs(got - want).max():.2g}")


# ------------------------------------------------------------------------------------------------------ compiled programs


def _one_trace(policy: Policy, s: Sequence) -> None:
    traces, wanted = 0, policy.retention.needs
    own = jax.tree.map(lambda x: x[0], s.later(wanted))

    @jax.jit
    def step(policy, cache, key, query, now, own):
        nonlocal traces
        traces += 1
        return policy.attend(policy.append(cache, key, key, now, seen=own), query, now, s.spec).cache

    key = made.appended(s)[0]
    for again in (policy, jax.tree.map(lambda x: x, policy)):
        cache = again.fill(s.prompt(wanted), _budget(policy, s))
        for i in range(3):
            cache = step(again, cache, key[i], s.query[i], jnp.asarray(s.lengths + i), own)
    if traces != 1:
        raise Breach(f"{policy}: {traces} traces of one step; what sets shapes must be static and hashable, the rest arrays")


def _in_place(policy: Policy, shape: ModelConfig) -> None:
    """A step with a donated cache of many pages must not need another one beside it."""
    H, G, D, T = shape.kv_heads, shape.groups, shape.head_dim, 8192
    f = jax.ShapeDtypeStruct
    s = made.sequence((T - 64,), T, 1, H, G, D)
    wanted = policy.retention.needs
    cache = jax.eval_shape(lambda r: policy.fill(r, policy.budget(T - 64, T)), s.prompt(wanted))
    own = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], s.later(wanted)))

    def step(policy, cache, key, query, now, own):
        done = policy.attend(policy.append(cache, key, key, now, seen=own), query, now, s.spec)
        return done.out_BHQD, done.cache

    args = policy, cache, f((1, H, D), "f4"), f((1, H, G, D), "f4"), f((1,), "i4"), own
    account = memory.compiled(jax.jit(step, donate_argnums=1).lower(*args).compile())
    total = memory.resident(cache)
    if cache.pos.size >= T and account.temporaries > total / 2:
        raise Breach(f"{policy}: a step takes {account.temporaries:,} bytes beside a cache of {total:,}: part of it is copied")
    if account.aliased < total - 64 * 1024:
        raise Breach(f"{policy}: of a donated cache of {total:,} bytes only {account.aliased:,} come back in place")


# --------------------------------------------------------------------------------------------------- what kinds owe besides


def ranks(policy: Policy, s: Sequence) -> None:
    """A prompt's priorities are numbers, and the same alone as beside a longer one and more pads. Errors: Breach."""
    row, budget = int(np.argmin(s.lengths)), _budget(policy, s)
    both, alone = _priorities(policy, s, budget), _priorities(policy.for_rows(np.array([row])), s.row(row), budget)
    for b, length in enumerate(s.lengths):
        if np.isnan(both[b, :, :length]).any():
            raise Breach(f"{policy.retention}: the priority of a stored token is not a number; guard divisions and logarithms")
    got, want = alone[0, :, : s.lengths[row]], both[row, :, : s.lengths[row]]
    most = np.abs(want[np.isfinite(want)]).max(initial=1)
    if not np.allclose(got, want, rtol=1e-3, atol=TOLERANCE * most):
        raise Breach(
            f"{policy.retention}: a prompt alone is ranked otherwise than beside a longer one; leave out of sums and means what "
            "has no position (pos < 0), or draw randomness from positions"
        )


def _priorities(policy: Policy, s: Sequence, budget: int) -> np.ndarray:
    """What the retention says of a prompt's tokens, `[B, H, T]`."""
    record = s.prompt(policy.retention.needs)
    pos = jnp.broadcast_to(record.pos_BT[:, None], record.key_BHTD.shape[:3])
    score = policy.retention.score(
        record.key_BHTD, record.value_BHTD, record.pos_BT[:, None], **ranking.seen(policy, record, budget)
    )
    priority = policy.retention.priority(score, pos, record.pos_BT.max(-1)[:, None, None])
    return np.asarray(jnp.broadcast_to(priority, pos.shape).astype(jnp.float32))


def _retention(policy: Policy, s: Sequence, report: Report) -> None:
    """Asking twice gives the same."""
    keep, wanted = policy.retention, policy.retention.needs
    budget = _budget(policy, s)
    held = [memory.positions(policy, _live(policy, each, budget).first) for each in (s, s)]
    if (np.asarray(held[0]) != np.asarray(held[1])).any():
        raise Breach(f"{keep}: the same prompt is kept differently the second time; draw randomness from positions")
    report.passed.append(
        f"needs {', '.join(wanted) or 'keys and values only'}; a prompt is kept the same way every time, "
        "and ranked alone as it is beside others"
    )


def _codec(policy: Policy, s: Sequence, report: Report) -> None:
    """Bytes are as said; no input gives NaN; what is stored of nothing is nothing; the error is measured."""
    for codec, vectors in ((policy.codec.keys, s.key), (policy.codec.values, s.value)):
        page = vectors[:1, :1, :PAGE].reshape(1, 1, 1, PAGE, -1)
        pos = jnp.arange(PAGE, dtype=jnp.int32).reshape(1, 1, 1, PAGE)
        code = codec.encode(jnp.asarray(page), pos)
        held, said = sum(leaf.nbytes for leaf in jax.tree.leaves(code)), codec.page_bytes(page.shape[-1])
        if held != said:
            raise Breach(f"{codec}: a page takes {held} bytes, page_bytes says {said}")
        page = page[0, 0, 0]
        outlier = page * 1e-3
        outlier[7, 3] = 3e4
        odd = {"a constant": 0 * page + 0.37, "one outlier of 3e4": outlier, "numbers around 1e-30": page * 1e-30}
        for what, rows in odd.items():
            if not np.isfinite(made.through(codec, rows)).all():
                raise Breach(f"{codec}: {what} gives numbers that are not finite")
        if (most := np.abs(made.through(codec, 0 * page)).max()) != 0:
            raise Breach(f"{codec}: zeros come back as {most:.2g}")
        error = float(np.sqrt(np.mean((made.through(codec, page) - page) ** 2) / np.mean(page**2)))
        report.error = max(report.error or 0.0, error)
    report.passed.append(f"bytes are as said; nothing gives NaN; relative error of normal numbers {report.error:.2g}")


def _layout(policy: Policy, s: Sequence, report: Report) -> None:
    """What was packed and written comes back from slices, named pages and named tokens."""
    layout, N = policy.layout, 4
    cut = lambda x: jnp.asarray(x[:, :, : N * PAGE].reshape(*x.shape[:2], N, PAGE, -1))
    code = {"k": {"x": cut(s.key)}, "v": {"x": cut(s.value)}}
    B, H = code["k"]["x"].shape[:2]
    held = jnp.ones((B, H, N), bool).at[..., 2].set(False)
    new = jax.tree.map(lambda x: x[:, :, :1] + 1, code)
    memory_ = layout.write(layout.pack(code, held), jnp.full((B, H), 2), None, new)
    want = jax.tree.map(lambda x, y: np.asarray(x.at[:, :, 2:3].set(y)), code, new)
    page = jnp.broadcast_to(jnp.array([3, 0, 2]), (B, H, 3))
    slot = page * PAGE + jnp.array([0, 63, 17])
    named = lambda x: np.take_along_axis(x, np.asarray(page)[..., None, None], 2)
    single = lambda x: np.take_along_axis(x.reshape(B, H, N * PAGE, 1, -1), np.asarray(slot)[..., None, None], 2)
    for how, got, of in (
        ("slice", layout.slice(memory_, 1, 3), lambda x: x[:, :, 1:]),
        ("pages", layout.pages(memory_, page), named),
        ("tokens", layout.tokens(memory_, slot), single),
    ):
        for side in ("k", "v"):
            if not np.array_equal(np.asarray(got[side]["x"]), of(want[side]["x"])):
                raise Breach(f"{layout}: {how} does not give back what was packed and written, on the side of {side}")
    report.passed.append("slices, named pages and named tokens give back what was packed and written")


def _selection(policy: Policy, s: Sequence, report: Report) -> None:
    """It names only what it was let see, and something wherever there is something."""
    life = _live(policy, s, _budget(policy, s))
    if "picked" not in life.seen:
        report.passed.append("reads everything")
        return
    for step, row, head in itertools.product((0, STEPS - 1), range(len(s.lengths)), range(life.first.opened.shape[1])):
        visible = life.seen["visible"][step, row, head]
        read = _named(life, step, row, head, visible)
        if not (read & visible).any():
            raise Breach(f"{policy.selection}: row {row}, head {head}, step {step}: nothing that is visible is read")
    report.passed.append("ids come first and once each; something is read wherever something is stored")


OWN = {"retention": _retention, "codec": _codec, "layout": _layout, "selection": _selection}
