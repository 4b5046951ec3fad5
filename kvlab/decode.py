"""Prefill, fill, and the jitted decode loop.

    engine = Engine(load("smollm2-135m"))
    prompt = engine.prefill([ids])                        # one record, which every policy may use
    session = engine.start(prompt, policy, new_tokens=32)
    session.run(32)                                       # greedy; session.tokens grows

Device work is three jitted functions (`_prefill`, `_fill`, `_decode`) of explicit state. `Session` is the host's side: it
owns the donated state, counts the room that is left and refuses before anything would be overwritten.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab import attention, compilation
from kvlab.core import EMPTY, PAGE, Cache, Record, part
from kvlab.errors import CapacityError, ConfigError
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind
from kvlab.policy import Policy
from kvlab.retention import Window
from kvlab.selection import ReadAll

WATCHABLE = frozenset({"logits", "entropy", "reads"})


@part
class State:
    """What the loop carries: a cache per layer, and per row the next token, its position, how many were fed, whether done."""

    caches: tuple[Cache, ...]
    token_B: Any
    pos_B: Any
    fed_B: Any
    done_B: Any


class Steps(NamedTuple):
    """What n steps of B rows leave: the token sampled after each (−1 where a row had stopped) and what was watched.

    logits `[n, B, V]`, entropy `[n, L, B, H, G]` in nats, reads `[n, L, B, H]` in tokens; None if not watched.
    """

    tokens_nB: Any
    logits: Any = None
    entropy: Any = None
    reads: Any = None


# --------------------------------------------------------------------------------------------------------- on device


@functools.partial(jax.jit, static_argnames="config")
def _prefill(config: ModelConfig, params, tokens_BT, length_B):
    """Records of all layers and the logits after each row's last token. Pads lie on the right."""
    model = bind(config, params)
    T = tokens_BT.shape[1]
    pos_T = jnp.arange(T)
    pos_BT = jnp.where(pos_T < length_B[:, None], pos_T, EMPTY)
    records = []

    def attend(layer, query, key, value):
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        records.append(Record(key, value, pos_BT))
        return attention.prefill(query, key, value, config.attention(layer))

    x = model(tokens_BT, pos_T[None], attend)
    last = x[jnp.arange(len(tokens_BT)), length_B - 1]
    return tuple(records), model.logits(last)


@functools.partial(jax.jit, static_argnames="budget")
def _fill(policy: Policy, record: Record, budget: int) -> Cache:
    """One layer's cache; a jit per layer, so that layers alike are compiled once."""
    return policy.fill(record, budget)


@functools.partial(jax.jit, static_argnames=("config", "n", "watch"), donate_argnames="state")
def _decode(config: ModelConfig, params, policies, state: State, forced_BF, stops, n: int, watch: frozenset):
    """Feeds up to n tokens per row: the forced ones first, then what was sampled."""
    model = bind(config, params)
    B = state.token_B.shape[0]
    forced = lambda fed: jnp.take_along_axis(forced_BF, jnp.minimum(fed, forced_BF.shape[1] - 1)[:, None], 1)[:, 0]
    is_forced = lambda fed: (fed < forced_BF.shape[1]) & (forced(fed) >= 0)
    out = _outputs(config, n, B, watch)

    def going(carry):
        i, state, _ = carry
        return (i < n) & ~state.done_B.all()  # steps are left, and a row that has not stopped

    def step(carry):
        i, state, out = carry
        live = ~state.done_B
        token = jnp.where(is_forced(state.fed_B), forced(state.fed_B), state.token_B)
        x, caches, infos = _layers(config, model, policies, state.caches, token, state.pos_B, live)
        logits = model.logits(x)
        sampled = jnp.argmax(logits, -1).astype(jnp.int32)
        fed = state.fed_B + live
        stopped = ~is_forced(fed) & (sampled[:, None] == stops).any(-1)
        seen = {
            "tokens_nB": jnp.where(live, sampled, -1),
            "logits": logits,
            "entropy": jnp.stack([a.entropy_BHQ for a in infos]),
            "reads": jnp.stack([a.reads_BH for a in infos]),
        }
        out = {name: buffer.at[i].set(seen[name]) for name, buffer in out.items()}
        state = State(caches, jnp.where(live, sampled, state.token_B), state.pos_B + live, fed, state.done_B | stopped)
        return i + 1, state, out

    _, state, out = lax.while_loop(going, step, (0, state, out))
    return state, Steps(**out)


def _layers(config, model, policies, caches, token_B, pos_B, live_B):
    """One token per row through the model: the last layer's output, the new caches and each layer's diagnostics."""
    new, infos = [], []

    def attend(layer, query, key, value):
        policy = policies[layer]
        cache = policy.append(caches[layer], key, value, pos_B, live_B)
        done = policy.attend(cache, query, pos_B, config.attention(layer))
        new.append(done.cache)
        infos.append(done.info)
        return done.out_BHQD

    return model(token_B, pos_B, attend), tuple(new), infos


def _outputs(config: ModelConfig, n: int, B: int, watch: frozenset) -> dict:
    L, H, G, V = config.layers, config.kv_heads, config.groups, config.vocab
    buffers = {
        "tokens_nB": lambda: jnp.full((n, B), -1, jnp.int32),
        "logits": lambda: jnp.zeros((n, B, V)),
        "entropy": lambda: jnp.zeros((n, L, B, H, G)),
        "reads": lambda: jnp.zeros((n, L, B, H), jnp.int32),
    }
    return {name: make() for name, make in buffers.items() if name == "tokens_nB" or name in watch}


@jax.jit
def _rows(policy: Policy, cache: Cache, index) -> Cache:
    return policy.rows(cache, index)


# -------------------------------------------------------------------------------------------------------- on the host


class Prefilled(NamedTuple):
    """A prompt's records (one per layer), its next-token logits, its lengths, and how long it took."""

    records: tuple[Record, ...]
    logits_BV: Any
    lengths: np.ndarray
    seconds: float


def bucket(length: int) -> int:
    """The power of two, at least a page, that a prompt is padded to."""
    return max(PAGE, 1 << (length - 1).bit_length())


class Engine:
    """A model ready to prefill and decode; policies come with each session."""

    def __init__(self, model: Model):
        compilation.use_private_cache()
        self.model = model
        self.config = model.config

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Runs the prompts (token ids, ragged) together, exactly. Errors: CapacityError for an empty or too long prompt."""
        lengths = np.array([len(p) for p in prompts], np.int32)
        if not len(lengths) or lengths.min() == 0:
            raise CapacityError("a prompt is empty; give at least one token in each row")
        if lengths.max() > self.config.context:
            raise CapacityError(
                f"a prompt has {lengths.max()} tokens, {self.model.name} takes at most {self.config.context}; shorten it"
            )
        tokens = np.zeros((len(prompts), bucket(int(lengths.max()))), np.int32)
        for row, prompt in zip(tokens, prompts):
            row[: len(prompt)] = prompt
        begin = time.perf_counter()
        records, logits = jax.block_until_ready(_prefill(self.config, self.model.params, tokens, lengths))
        return Prefilled(records, logits, lengths, time.perf_counter() - begin)

    def start(
        self,
        prompt: Prefilled,
        policy: Policy | Sequence[Policy],
        new_tokens: int,
        rows: Sequence[int] | None = None,
        forced: Sequence[Sequence[int]] | None = None,
        stops: Sequence[int] = (),
    ) -> "Session":
        """Fills caches from a prompt, which stays usable, and returns a session with room for `new_tokens` more.

        Args:
          policy: one for all layers, or one per layer.
          rows: which of the prompt's rows each row of the session continues; all in order by default.
          forced: tokens that each row is fed one by one before it goes on with what it samples.
          stops: token ids that end a row once it samples.
        """
        longest = int(prompt.lengths.max())
        if longest + new_tokens > self.config.context:
            raise CapacityError(
                f"{longest} prompt tokens and {new_tokens} new ones exceed the {self.config.context} that "
                f"{self.model.name} takes; shorten the prompt or ask for fewer"
            )
        policies = per_layer(policy, self.config)
        total = -(-(longest + new_tokens) // PAGE) * PAGE
        budgets = tuple(p.budget(longest, total) for p in policies)
        begin = time.perf_counter()
        caches = jax.block_until_ready(tuple(map(_fill, policies, prompt.records, budgets)))
        seconds = time.perf_counter() - begin
        logits = prompt.logits_BV
        lengths = jnp.asarray(prompt.lengths)
        if rows is not None:
            index = jnp.asarray(rows)
            caches = tuple(_rows(p, c, index) for p, c in zip(policies, caches))
            logits, lengths = logits[index], lengths[index]
        B = len(lengths)
        width = -(-max([len(f) for f in forced or ()] + [1]) // PAGE) * PAGE  # so that lengths close by share a trace
        feed = np.full((B, width), -1, np.int32)
        for row, ids in zip(feed, forced or ()):
            row[: len(ids)] = ids
        first = jnp.argmax(logits, -1).astype(jnp.int32)
        done = (feed[:, 0] < 0) & np.isin(np.asarray(first), stops)
        state = State(caches, first, lengths, jnp.zeros(B, jnp.int32), jnp.asarray(done))
        return Session(self, policies, state, feed, stops, new_tokens, seconds)


class Session:
    """A batch being decoded. It owns its caches: `run` donates them to the device and takes the new ones back.

    Attributes:
      room: tokens that may still be fed per row.
      fill_seconds: how long filling the caches took.
      step_seconds: wall time of every `run`, with its number of steps.
      tokens: `[B][steps + 1]`: the token sampled after the prompt, then after every step (−1 once a row has stopped).
    """

    def __init__(self, engine: Engine, policies, state: State, forced, stops, room: int, fill_seconds: float):
        self.engine = engine
        self.policies = policies
        self.state = state
        self.room = room
        self.fill_seconds = fill_seconds
        self.step_seconds: list[tuple[float, int]] = []
        self._forced = forced
        self._stops = jnp.asarray(list(stops) or [-2], jnp.int32)
        self._sampled = [np.asarray(state.token_B)[None]]

    def run(self, n: int = 1, watch: Sequence[str] = ()) -> Steps:
        """Feeds n tokens per row in one jitted loop, which ends early once every row has stopped.

        Args:
          watch: what to return besides tokens: "logits", "entropy", "reads".
        Errors: CapacityError before the loop when fewer than n tokens fit; the session stays usable.
        """
        if n > self.room:
            raise CapacityError(f"{n} more tokens asked for, {self.room} fit; start the session with a larger new_tokens")
        if unknown := set(watch) - WATCHABLE:
            raise ConfigError(f"watch={sorted(unknown)} is unknown; allowed: {', '.join(sorted(WATCHABLE))}")
        engine = self.engine
        begin = time.perf_counter()
        args = engine.config, engine.model.params, self.policies, self.state, self._forced, self._stops
        self.state, steps = jax.block_until_ready(_decode(*args, n=n, watch=frozenset(watch)))
        self.step_seconds.append((time.perf_counter() - begin, n))
        self.room -= n
        self._sampled.append(np.asarray(steps.tokens_nB))
        return steps

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate(self._sampled).T

    @property
    def done(self) -> bool:
        return bool(np.asarray(self.state.done_B).all())

    def answers(self) -> list[list[int]]:
        """What each row sampled after its forced tokens, without the stop token."""
        given = (self._forced >= 0).sum(1)
        return [[t for t in row[k:].tolist() if t >= 0 and t not in self._stops] for row, k in zip(self.tokens, given)]


def per_layer(policy: Policy | Sequence[Policy], config: ModelConfig) -> tuple[Policy, ...]:
    """One policy per layer: a checked sequence as it stands, or one policy for all *global* layers.

    A layer with a local window never reads past it, so it stores that window and no more, with the policy's codec and
    layout, whatever the policy keeps elsewhere.
    """
    if not isinstance(policy, Policy):
        policies = tuple(policy)
        if len(policies) != config.layers:
            raise ConfigError(f"{len(policies)} policies for a model of {config.layers} layers; give one, or one per layer")
        return policies
    windows = (config.window(layer) for layer in range(config.layers))
    return tuple(policy if w is None else Policy(Window(w, 0), policy.codec, policy.layout, ReadAll()) for w in windows)
