"""From prompts to sessions: prefill by record or by stream, and filling the caches. The host's side of `kvlab.loop`.

engine = Engine(load("smollm2-135m"))
prompt = engine.prefill([ids])                        # one record, which every policy may use
session = engine.start(prompt, policy, new_tokens=32)
session.run(32)                                       # greedy; session.tokens grows
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import compilation, loop, replay
from kvlab.attention import PREFILL_BLOCK
from kvlab.core import EMPTY, PAGE, Cache, Record
from kvlab.errors import CapacityError, ConfigError
from kvlab.kernels import backends
from kvlab.loop import State
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.needs import OF_PROMPTS, REPLAYED, blank
from kvlab.policy import Policy
from kvlab.retention import Window
from kvlab.sampling import Sampling
from kvlab.selection import ReadAll
from kvlab.session import Session, bucket, padded

__all__ = ["Engine", "Prefilled", "Session", "bucket", "needs", "per_layer"]


class Prefilled(NamedTuple):
    """Prompts, their records (one per layer), their next-token logits, and how long prefill took; a replay not included."""

    prompts: Sequence[Sequence[int]]
    records: tuple[Record, ...]
    logits_BV: jax.Array
    seconds: float
    replay_seconds: float = 0.0


class Engine:
    """A model ready to prefill and decode; policies come with each session.

    `implementation` is what computes the attention of prompts, a name of `kvlab.kernels.backends`.
    """

    def __init__(self, model: Model, implementation: str = "xla"):
        backends.known(implementation)
        compilation.use_private_cache()
        self.model = model
        self.config = model.config
        self.implementation = implementation

    def prefill(self, prompts: Sequence[Sequence[int]], needs: Iterable[str] = (), block: int = PREFILL_BLOCK) -> Prefilled:
        """Runs the prompts (token ids, ragged) together, exactly.

        Args:
          needs: what policies need of the prompt besides keys and values (`Retention.needs`).
          block: queries and keys that meet at a time, a power of two: another one sums in another order, and changes no more.
        Errors: CapacityError for an empty or too long prompt, also where the replay that a policy needs does not fit;
        RefusedPolicy where this machine cannot run the engine's implementation.
        """
        tokens, needs = padded(prompts, bucket(self._longest(prompts))), frozenset(needs)
        begin = time.perf_counter()
        done = loop.prefill(
            self.config, self.model.params, tokens, _lengths(prompts), needs - REPLAYED, min(block, tokens.shape[1]),
            self.implementation,
        )  # fmt: skip
        records, logits = jax.block_until_ready(done)
        prompt = Prefilled(prompts, records, logits, time.perf_counter() - begin)
        return self._replayed(prompt) if "importance" in needs else prompt

    def _replayed(self, prompt: Prefilled) -> Prefilled:
        """The same with what a replay of the prompts says in its records."""
        begin = time.perf_counter()
        found = jax.block_until_ready(replay.importance(self.model, prompt.prompts, prompt.records))
        records = tuple(replace(r, seen={**r.seen, "importance": x}) for r, x in zip(prompt.records, found))
        return prompt._replace(records=records, replay_seconds=time.perf_counter() - begin)

    def start(
        self,
        prompt: Prefilled,
        policy: Policy | Sequence[Policy],
        new_tokens: int,
        rows: Sequence[int] | None = None,
        forced: Sequence[Sequence[int]] = (),
        stops: Sequence[int] = (),
        sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
    ) -> Session:
        """Fills caches from a prompt, which stays usable, and returns a session with room for `new_tokens` more.

        Args:
          policy: one for all layers, or one per layer.
          rows: which of the prompt's rows each row of the session continues; all in order by default.
          forced: tokens that each row is fed one by one before it goes on with what it samples.
          stops: token ids that end a row once it samples.
          sampling: how tokens are drawn (see `kvlab.sampling`); greedy without.
          seed: of the draws: one, from which every row gets a key of its own, or one per row.
        """
        policies, sizes, limit = self._plan(prompt.prompts, policy, new_tokens)
        if missing := needs(policies) - set(prompt.records[0].seen):
            raise ConfigError(f"the policy needs {sorted(missing)} of the prompt; write engine.prefill(prompts, needs(policies))")
        begin = time.perf_counter()
        caches = jax.block_until_ready(tuple(map(_filled, policies, prompt.records, sizes)))
        seconds = time.perf_counter() - begin
        index = jnp.arange(len(prompt.prompts)) if rows is None else jnp.asarray(rows)
        prompts = [prompt.prompts[i] for i in index.tolist()]
        if rows is not None:
            caches = loop.pick_rows(policies, caches, index, new_tokens)
        state = _state(caches, _lengths(prompts))
        session = Session(self.model, policies, state, limit, forced, stops, sampling, seed)
        session.fill_seconds = seconds
        session.continue_from(prompts, prompt.logits_BV[index])
        return session

    def stream(self, prompts: Sequence[Sequence[int]], policy: Policy | Sequence[Policy], new_tokens: int, **options) -> Session:
        """A session whose prompts went through the caches in chunks: memory is bounded by the caches and one chunk.

        Unlike `prefill`, which is exact and compresses afterwards, every chunk reads only what the policy has kept by then.
        `options` are those of `start` after `new_tokens`, without `rows`.
        """
        policies, sizes, limit = self._plan(prompts, policy, new_tokens)
        unseen = {name for p in policies if not p.retention.observes for name in p.retention.needs}
        if early := (needs(policies) & REPLAYED) | unseen.intersection(OF_PROMPTS):
            raise ConfigError(
                f"the policy needs {sorted(early)}, which takes the whole prompt at once; write engine.prefill, not stream"
            )
        if learning := [p.selection for p in policies if p.selection.from_prompt]:
            raise ConfigError(f"{learning[0]} learns from the whole prompt; calibrate it beforehand, or write engine.prefill")
        c, B = self.config, len(prompts)
        nothing = jnp.zeros((B, c.kv_heads, PAGE, c.head_dim))
        seen = blank(needs(policies), B, c.kv_heads, c.groups, PAGE, c.hidden, c.head_dim)
        record = Record(nothing, nothing, jnp.full((B, PAGE), EMPTY), seen)
        caches = tuple(_filled(p, record, budget) for p, budget in zip(policies, sizes))
        options = {"forced": (), "stops": (), "sampling": None, "seed": 0, **options}
        session = Session(self.model, policies, _state(caches, np.zeros(B, np.int32)), limit, mode="streamed", **options)
        session.extend(prompts)
        return session

    def _longest(self, prompts, new_tokens: int = 0) -> int:
        """The longest prompt's length. Errors: CapacityError."""
        longest, most = max(map(len, prompts), default=0), self.config.context
        if not longest or not min(map(len, prompts)):
            raise CapacityError("a prompt is empty; give at least one token in each row")
        if longest > most:
            raise CapacityError(f"a prompt has {longest} tokens, {self.model.name} takes at most {most}; shorten it")
        if longest + new_tokens > most:
            raise CapacityError(
                f"{longest} prompt tokens and {new_tokens} new ones exceed the {most} that "
                f"{self.model.name} takes; shorten the prompt or ask for fewer"
            )
        return longest

    def _plan(self, prompts, policy, new_tokens: int):
        """A policy per layer, the tokens that each layer's cache holds, and the tokens that a row may come to."""
        longest = self._longest(prompts, new_tokens)
        policies = per_layer(policy, self.config)
        return policies, budgets(policies, longest, new_tokens), longest + new_tokens


def budgets(policies: Sequence[Policy], longest: int, new_tokens: int) -> tuple[int, ...]:
    """Tokens that each layer's cache holds for prompts of up to `longest` tokens and `new_tokens` more, in whole pages."""
    total = -(-(longest + new_tokens) // PAGE) * PAGE
    return tuple(policy.budget(longest, total) for policy in policies)


def _filled(policy: Policy, record: Record, budget: int) -> Cache:
    """One layer's cache; where heads get unequal budgets, with as many pages as the row that needs most."""
    pages = int(loop.pages(policy, record, budget).max()) if policy.slots.pooled else None
    return loop.fill(policy, record, budget, pages)


def _lengths(rows) -> np.ndarray:
    return np.array([len(row) for row in rows], np.int32)


def _state(caches, length_B) -> State:
    none = jnp.zeros(len(length_B), jnp.int32)
    return State(caches, none, jnp.asarray(length_B), none, none > 0)


def per_layer(policy: Policy | Sequence[Policy], config: ModelConfig) -> tuple[Policy, ...]:
    """One policy per layer: a checked sequence as it stands, or one policy for all *global* layers.

    A layer with a local window never reads past it, so it stores that window and no more, with the policy's codec and
    layout, whatever the policy keeps elsewhere.
    """
    if not isinstance(policy, Policy):
        policies = tuple(policy)
        if len(policies) != config.layers:
            raise ConfigError(f"{len(policies)} policies for a model of {config.layers} layers; give one, or one per layer")
    else:
        local = lambda w: Policy(Window(w, 0), policy.codec, policy.layout, ReadAll(), policy.implementation)
        windows = (config.window(layer) for layer in range(config.layers))
        policies = tuple(policy if w is None else local(w) for w in windows)
    return tuple(each.at(layer, config) for layer, each in enumerate(policies))


def needs(policies: Sequence[Policy]) -> set[str]:
    """What the policies need of a prompt besides keys and values, for `Engine.prefill`."""
    return {name for policy in policies for name in policy.retention.needs} - {"budget"}
