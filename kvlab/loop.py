"""What runs on the device: prefill, filling, chunks and the decode loop, as jitted functions of explicit state.

`kvlab.decode` is the host's side: it checks, counts the room and owns the state that is donated here.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvlab import attention, compilation, reading, sampling
from kvlab.core import EMPTY, PAGE, Cache, Record, part
from kvlab.kernels import prefill as kernels
from kvlab.models.config import ModelConfig
from kvlab.models.transformer import bind
from kvlab.needs import Pass, Prompt, of_prompt, of_tokens
from kvlab.policy import Policy


@part
class State:
    """What the loop carries: a cache per layer, and per row the next token, its position, how many were fed, whether done.

    `key_B` and `first_BV` (the position where each token first occurred, or NEVER) serve sampling; () where it is greedy.
    """

    caches: tuple[Cache, ...]
    token_B: Any
    pos_B: Any
    fed_B: Any
    done_B: Any
    key_B: Any = ()
    first_BV: Any = ()


NEVER = np.int32(np.iinfo(np.int32).max)


class Steps(NamedTuple):
    """What n steps of B rows leave: the token sampled after each (−1 where a row had stopped), how many steps were taken
    before all rows had stopped, and what was watched (zeros after that).

    logits `[n, B, V]`, outputs (of attention) `[n, L, B, H, G, D]`, entropy `[n, L, B, H, G]` in nats, reads `[n, L, B, H]` in
    tokens, bound `[n, L, B, H]` (which limit a selection met, see `kvlab.core.NO_BOUND`); followed `[n, L, B, H, W]`: what
    became of W tokens of each row (see `kvlab.reading.followed`). None if not watched.
    """

    tokens_nB: Any
    taken: Any
    logits: Any = None
    outputs: Any = None
    entropy: Any = None
    reads: Any = None
    bound: Any = None
    followed: Any = None


@functools.partial(
    jax.jit, static_argnames=("config", "needs", "block", "implementation"), compiler_options=compilation.memory_first()
)
def prefill(
    config: ModelConfig, params, tokens_BT, length_B, needs: frozenset = frozenset(), block: int = attention.PREFILL_BLOCK,
    implementation: str = "xla",
):  # fmt: skip
    """Records of all layers and the logits after each row's last token. Pads lie on the right.

    `needs` names what the records hold besides keys and values (`kvlab.needs`), without a replay; `block` is how many queries
    and keys meet at a time, and `implementation` what computes attention (`kvlab.kernels.backends`): both change only how sums
    are rounded. Kernels take smaller blocks where theirs are smaller, and skip pads, whose keys and values mean nothing.
    """
    model = bind(config, params)
    pos_T = jnp.arange(tokens_BT.shape[1])
    pos_BT = jnp.where(pos_T < length_B[:, None], pos_T, EMPTY)
    records = []

    def attend(layer, query, key, value, x):
        spec, frequency = config.attention(layer), config.rope(layer).frequencies(config.head_dim)
        own = _seen(config, model, layer, x, value, needs)
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        prompt = Prompt(query, key, pos_BT, spec, frequency)
        records.append(Record(key, value, pos_BT, {**own, **of_prompt(prompt, needs)}))
        if implementation == "xla":
            return attention.prefill(query, key, value, spec, block, block)
        return kernels.prefill(query, key, value, length_B, spec, block, implementation)

    x = model(tokens_BT, pos_T[None], attend)
    return tuple(records), model.logits(_last(x, length_B))


def _seen(config: ModelConfig, model, layer: int, x, value, needs):
    """What retentions may need of tokens with layer inputs `x [B, ..., hidden]`: those of `needs` that every token has."""
    out = model.blocks[layer].out[...].reshape(config.hidden, config.kv_heads, config.groups, config.head_dim)
    return of_tokens(Pass(x, value, out), needs)


def _last(x_BTD, length_B):
    """The output after each row's last token."""
    return x_BTD[jnp.arange(len(x_BTD)), jnp.maximum(length_B, 1) - 1]


@functools.partial(jax.jit, static_argnames=("budget", "pages"))
def fill(policy: Policy, record: Record, budget: int, pages: int | None = None) -> Cache:
    """One layer's cache; a jit per layer, so that layers alike are compiled once."""
    return policy.fill(record, budget, pages)


@functools.partial(jax.jit, static_argnames="budget")
def pages(policy: Policy, record: Record, budget: int) -> jax.Array:
    """Pages that each row of a layer's cache needs, `[B]`, where heads get unequal budgets."""
    return policy.pages(record, budget)


@functools.partial(jax.jit, static_argnames=("config", "every"), donate_argnames="caches")
def extend(config: ModelConfig, params, policies, caches, tokens_BT, first_B, length_B, every: bool = False):
    """Feeds a chunk of `length` tokens per row from position `first` on: the new caches, and logits `[B, V]` after the last one.

    With `every`, logits `[B, T, V]` after each of them; those of pads mean nothing.
    """
    model = bind(config, params)
    step_T = jnp.arange(tokens_BT.shape[1])
    true_BT = first_B[:, None] + step_T
    pos_BT = jnp.where(step_T < length_B[:, None], true_BT, EMPTY)
    new = []

    def attend(layer, query, key, value, x):
        policy, seen = policies[layer], _seen(config, model, layer, x, value, policies[layer].retention.needs)
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        out, cache = policy.extend(caches[layer], query, key, value, pos_BT, config.attention(layer), seen)
        new.append(cache)
        return out

    x = model(tokens_BT, true_BT, attend)
    return tuple(new), model.logits(x if every else _last(x, length_B))


@functools.partial(jax.jit, static_argnames=("config", "n", "watch"), donate_argnames="state")
def decode(
    config: ModelConfig, params, policies, state: State, how, forced_BF, stops, n: int, watch: frozenset, follow_BW=None
):  # fmt: skip
    """Feeds up to n tokens per row: the forced ones first, then what was sampled (`how`: a `Sampling` of rows, or None).

    `follow` are positions of tokens to be followed, where that is watched.
    """
    model = bind(config, params)
    B = state.token_B.shape[0]
    forced = lambda fed: jnp.take_along_axis(forced_BF, jnp.minimum(fed, forced_BF.shape[1] - 1)[:, None], 1)[:, 0]
    is_forced = lambda fed: (fed < forced_BF.shape[1]) & (forced(fed) >= 0)

    def going(carry):
        i, state, _ = carry
        return (i < n) & ~state.done_B.all()  # steps are left, and a row that has not stopped

    def step(carry):
        i, state, out = carry
        live = ~state.done_B
        token = jnp.where(is_forced(state.fed_B), forced(state.fed_B), state.token_B)
        x, caches, infos, outs = _layers(config, model, policies, state.caches, token, state.pos_B, live)
        logits = model.logits(x)
        first = () if how is None else state.first_BV.at[jnp.arange(B), token].min(jnp.where(live, state.pos_B, NEVER))
        sampled = draw(how, logits, first, state.key_B, state.pos_B + 1)
        fed = state.fed_B + live
        stopped = ~is_forced(fed) & (sampled[:, None] == stops).any(-1)
        watched = {
            "tokens_nB": jnp.where(live, sampled, -1),
            "logits": logits,
            "outputs": jnp.stack(outs),
            "entropy": jnp.stack([a.entropy_BHQ for a in infos]),
            "reads": jnp.stack([a.reads_BH for a in infos]),
            "bound": jnp.stack([a.bound_BH for a in infos]),
        }
        if follow_BW is not None:
            seen = enumerate(zip(policies, caches, infos))
            found = [reading.followed(p, c, a.picked, state.pos_B, config.attention(i), follow_BW) for i, (p, c, a) in seen]
            watched["followed"] = jnp.stack(found)
        out = {name: buffer.at[i].set(watched[name]) for name, buffer in out.items()}
        state = dataclasses.replace(
            state, caches=caches, token_B=jnp.where(live, sampled, state.token_B), pos_B=state.pos_B + live,
            fed_B=fed, done_B=state.done_B | stopped, first_BV=first,
        )  # fmt: skip
        return i + 1, state, out

    taken, state, out = lax.while_loop(going, step, (0, state, _outputs(config, n, B, watch, follow_BW)))
    return state, Steps(taken=taken, **out)


def _layers(config, model, policies, caches, token_B, pos_B, live_B):
    """One token per row through the model: the last layer's output, the new caches, each layer's diagnostics and attention."""
    new, infos, outs, shared = [], [], [], None

    def attend(layer, query, key, value, x):
        nonlocal shared
        policy = policies[layer]
        seen = _seen(config, model, layer, x, value, policy.retention.needs)
        cache = policy.append(caches[layer], key, value, pos_B, live_B, seen)
        done = policy.attend(cache, query, pos_B, config.attention(layer), shared, live_B)
        shared = done.shared
        new.append(done.cache)
        infos.append(done.info)
        outs.append(done.out_BHQD)
        return done.out_BHQD

    return model(token_B, pos_B, attend), tuple(new), infos, outs


def _outputs(config: ModelConfig, n: int, B: int, watch: frozenset, follow_BW) -> dict:
    L, H, G, V = config.layers, config.kv_heads, config.groups, config.vocab
    buffers = {
        "tokens_nB": lambda: jnp.full((n, B), -1, jnp.int32),
        "logits": lambda: jnp.zeros((n, B, V)),
        "outputs": lambda: jnp.zeros((n, L, B, H, G, config.head_dim)),
        "entropy": lambda: jnp.zeros((n, L, B, H, G)),
        "reads": lambda: jnp.zeros((n, L, B, H), jnp.int32),
        "bound": lambda: jnp.zeros((n, L, B, H), jnp.int32),
        "followed": lambda: jnp.zeros((n, L, B, H, follow_BW.shape[1]), jnp.int8),
    }
    return {name: make() for name, make in buffers.items() if name == "tokens_nB" or name in watch}


@jax.jit
def draw(how, logits_BV, first_BV, key_B, pos_B):
    """The next token of each row, which will stand at `pos`."""
    return sampling.draw(how, logits_BV, None if how is None else first_BV < NEVER, key_B, pos_B)


def pick_rows(policies, caches, index, tokens: int):
    """The named rows of every layer's cache, in that order, with room for as many more tokens."""
    return _pick_rows(policies, caches, index, tuple(_places(*x, index, tokens) for x in zip(policies, caches)))


@functools.partial(jax.jit, static_argnames="places")
def _pick_rows(policies, caches, index, places: tuple[int | None, ...]):
    return tuple(policy.rows(cache, index, n) for policy, cache, n in zip(policies, caches, places))


def _places(policy: Policy, cache: Cache, index, tokens: int) -> int | None:
    """Pages that rows which share them need: those that they have, and what `tokens` more may add for each row and head."""
    if not policy.layout.shares:
        return None
    heads, pages = cache.opened.shape[1], cache.pos.shape[1] * cache.pos.shape[2]
    new = min(heads * (-(-tokens // PAGE) + policy.waits), pages)
    return min(int(policy.layout.used(cache.memory, index)) + len(index) * new, len(index) * pages)


def rows(policies, state: State, index, tokens: int) -> State:
    """The named rows of a state, in that order, with room for as many more tokens."""
    rest = jax.tree.map(lambda x: x[index], dataclasses.replace(state, caches=()))
    return dataclasses.replace(rest, caches=pick_rows(policies, state.caches, index, tokens))


@functools.partial(jax.jit, donate_argnames="caches")
def truncate(policies, caches, length_B):
    """Every layer's cache cut back to `length` tokens per row."""
    return tuple(policy.truncate(cache, length_B) for policy, cache in zip(policies, caches))
