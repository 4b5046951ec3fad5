"""What a model takes in memory under a policy, before anything is allocated.

    figures = plan(Dims(layers=48, kv_heads=8, head_dim=128), policies, batch=8, length=131_072)
    figures.total("cache")                       # 206_158_430_208 in 16 bits

Caches are the shapes that `Policy.fill` returns, as `Engine.start` calls it, so parts with state of their own are right
too, and the sum is what a run then reports: `resident_bytes` of a sequence, times the batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax

from kvlab.core import PAGE, Cache
from kvlab.decode import budgets, needs
from kvlab.errors import CapacityError, ConfigError
from kvlab.memory import page_bytes, resident
from kvlab.models.config import ModelConfig
from kvlab.plan import workspace
from kvlab.plan.workspace import Workspace
from kvlab.policy import Policy

LEVELS = ("cache", "metadata", "index", "state")  # of a layer's resident bytes
LIMIT = 1 << 30  # rows or tokens that a search stops at
SLACK = 10  # one part in so many of the memory is kept free


@dataclasses.dataclass(frozen=True)
class Dims:
    """What of a model memory depends on; `config` is None where only the cache's dimensions are known."""

    layers: int
    kv_heads: int
    head_dim: int
    config: ModelConfig | None = None
    context: int | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> "Dims":
        return cls(config.layers, config.kv_heads, config.head_dim, config, config.context)

    def bare(self) -> ModelConfig:
        """A configuration of which only the cache's dimensions mean anything; all its layers are global."""
        return ModelConfig(self.layers, 0, 0, self.kv_heads, self.kv_heads, self.head_dim, 0, 0)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's bytes, all rows together.

    Attributes:
      cache: codes of keys and values, their scales included.
      metadata: positions, counters and the raw tail.
      index: the selection's state.
      state: the retention's, and what the layout holds beside codes.
    """

    policy: Policy
    budget: int
    weights: int
    cache: int
    metadata: int
    index: int
    state: int

    @property
    def resident(self) -> int:
        return sum(getattr(self, level) for level in LEVELS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of a batch. `memory` and what follows from it are None unless a memory size was given."""

    dims: Dims
    batch: int
    length: int
    new_tokens: int
    weights: int
    layers: tuple[Layer, ...]
    workspace: Workspace
    memory: int | None = None
    largest_batch: int | None = None
    longest_context: int | None = None

    def total(self, level: str) -> int:
        """Of one level ("cache", …, or "resident"), over all layers."""
        return sum(getattr(layer, level) for layer in self.layers)

    @property
    def need(self) -> int:
        return self.weights + self.total("resident") + self.workspace.bytes

    @property
    def slack(self) -> int | None:
        return None if self.memory is None else -(-self.memory // SLACK)

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.need <= room(self.memory)


def room(memory: int) -> int:
    """What of a memory may be used."""
    return memory - -(-memory // SLACK)


def plan(
    dims: Dims,
    policies: Sequence[Policy],
    batch: int,
    length: int,
    new_tokens: int = 0,
    memory: int | None = None,
    exact: bool = False,
) -> Plan:
    """The bytes of `batch` prompts of `length` tokens with room for `new_tokens` more.

    Args:
      policies: one per layer.
      memory: bytes there are; given, the largest batch and the longest context are searched too.
      exact: take the workspace from XLA, which compiles for a while. The searches scale the estimate to it.
    Errors: CapacityError beyond the model's context.
    """
    if dims.context is not None and length + new_tokens > dims.context:
        raise CapacityError(f"{length} prompt tokens and {new_tokens} new ones exceed the model's {dims.context}; ask for fewer")
    here = _figures(dims, policies, batch, length, new_tokens)
    scale = Fraction(1)
    if exact:
        true = _exact(here)
        scale, here = Fraction(true.bytes, here.workspace.bytes), dataclasses.replace(here, workspace=true)
    return here if memory is None else _answers(here, memory, scale)


def _exact(here: Plan) -> Workspace:
    if here.dims.config is None:
        raise ConfigError("--exact compiles the model; give --model, or heads, hidden, ffn and vocab in --dims")
    policies = [layer.policy for layer in here.layers]
    caches = [cache for _, cache in _caches(here.dims, policies, here.batch, here.length, here.new_tokens)]
    return workspace.exact(here.dims.config, policies, caches, here.batch, here.length)


def _answers(here: Plan, memory: int, scale: Fraction) -> Plan:
    """The plan with what a memory allows; `scale` is what the estimated workspace is multiplied by."""
    policies, new = [layer.policy for layer in here.layers], here.new_tokens

    def fits(rows: int, prompt: int) -> bool:
        there = _figures(here.dims, policies, rows, prompt, new)
        return there.need + (scale - 1) * there.workspace.bytes <= room(memory)

    longest = most(lambda n: fits(here.batch, n), min(here.dims.context or LIMIT, LIMIT) - new)
    return dataclasses.replace(
        here,
        memory=memory,
        largest_batch=most(lambda n: fits(n, here.length), LIMIT),
        longest_context=longest + new if longest else 0,
    )


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n up to `limit` that fits, 0 if none does; what fits must not fail for a smaller n."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _figures(dims: Dims, policies: Sequence[Policy], batch: int, length: int, new_tokens: int) -> Plan:
    """The plan with an estimated workspace, without a memory size."""
    filled = _caches(dims, policies, batch, length, new_tokens)
    params = workspace.weights(dims.config) if dims.config else {"blocks": {}}
    layers = tuple(
        _layer(policy, budget, cache, dims, batch, resident(params["blocks"].get(i, ())))
        for i, (policy, (budget, cache)) in enumerate(zip(policies, filled))
    )
    space = workspace.estimate(dims, policies, [budget for budget, _ in filled], batch, length)
    return Plan(dims, batch, length, new_tokens, resident(params), layers, space)


def _caches(dims: Dims, policies, batch: int, length: int, new_tokens: int) -> list[tuple[int, Cache]]:
    """Budget and shapes of each layer's cache, as `Engine.start` fills it; layers that share a policy are traced once."""
    record = workspace.record(dims, needs(policies), batch, length)
    made: dict[int, tuple[int, Cache]] = {}
    for policy, budget in zip(policies, budgets(policies, length, new_tokens)):
        if id(policy) not in made:
            made[id(policy)] = budget, jax.eval_shape(lambda r, p=policy, b=budget: p.fill(r, b), record)
    return [made[id(policy)] for policy in policies]


def _layer(policy: Policy, budget: int, cache: Cache, dims: Dims, batch: int, weights: int) -> Layer:
    memory = resident(cache.memory)
    own = max(memory - batch * dims.kv_heads * page_bytes(policy, dims.head_dim) * -(-budget // PAGE), 0)
    metadata = resident((cache.pos, cache.opened, cache.waiting, cache.offset, cache.lost, cache.tail))
    scores = resident((cache.retained, cache.carried)) + own
    return Layer(policy, budget, weights, memory - own, metadata, resident(cache.index), scores)
