"""What a model takes in memory under a policy, before anything is allocated.

    figures = plan(Dims.read("layers=48,kv_heads=8,head_dim=128"), policies, batch=8, length=131_072)
    figures.total("cache")                       # 206_158_430_208 in 16 bits

Caches are the shapes that `Policy.fill` returns, as `Engine.start` calls it, so parts with state of their own are right
too, and the sum is what a run then reports: `resident_bytes` of a sequence, times the batch.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import msgspec

from kvlab import parts, workspace
from kvlab.core import PAGE, Cache
from kvlab.errors import CapacityError, ConfigError, nearest
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.workspace import Workspace

LEVELS = ("cache", "metadata", "index", "state")  # of a layer's resident bytes
NEEDED, INNER = ("layers", "kv_heads", "head_dim"), ("heads", "hidden", "ffn", "vocab")
LENGTH = 131_072  # of a prompt, unless it is given or the model's context is known
LIMIT = 1 << 30  # rows or tokens that a search stops at
SLACK = 10  # one part in so many of the memory is kept free
UNITS = {"": 1, "b": 1} | {f"{u}{b}": base**i for i, u in enumerate("kmgt", 1) for b, base in (("b", 1000), ("ib", 1024))}


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

    @classmethod
    def model(cls, name: str) -> "Dims":
        """Of a named model, a folder or a .gguf file, whose weights are not read. Errors: ModelError."""
        from kvlab import models
        from kvlab.models import fetch

        return cls.of(models._config(models._json(fetch.find(name) / "config.json")))

    @classmethod
    def read(cls, text: str) -> "Dims":
        """From "layers=48,kv_heads=8,head_dim=128"; heads, hidden, ffn, vocab (all four) and context may follow."""
        given: dict[str, Any] = {}
        for item in text.split(","):
            key, equals, value = (x.strip() for x in item.partition("="))
            if key not in (*NEEDED, *INNER, "context"):
                raise ConfigError(f"--dims: unknown {key!r}; {nearest(key, [*NEEDED, *INNER, 'context'])}")
            if key in given:
                raise ConfigError(f"--dims: {key} is given twice; give it once")
            given[key] = positive(f"--dims {key}", value)
        if missing := [key for key in NEEDED if key not in given]:
            raise ConfigError(f"--dims: {', '.join(missing)} missing; write --dims layers=32,kv_heads=8,head_dim=128")
        if given.get("heads", given["kv_heads"]) % given["kv_heads"]:
            raise ConfigError(f"--dims: heads={given['heads']} is no multiple of kv_heads={given['kv_heads']}")
        context = given.get("context")
        config = ModelConfig(**{"context": LIMIT, **given}) if all(key in given for key in INNER) else None
        return cls(given["layers"], given["kv_heads"], given["head_dim"], config, context)


def positive(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`. Errors: ConfigError."""
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name}={value}; allowed: a whole number of at least {least}")
    return number


def parse_bytes(text: str) -> int:
    """Bytes from "24GB" (powers of 1000), "24GiB" (powers of 1024) or plain digits. Errors: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    number = int(Fraction(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if number < 1:
        raise ConfigError(f"memory size {text!r}; allowed: a positive number and kB, MB, GB, TB, KiB, MiB, GiB, TiB or nothing")
    return number


def read_policies(options: Sequence[str], dtype: str | None, layers: int) -> tuple[str, tuple[Policy, ...]]:
    """A label and a policy per layer, from files and overrides such as "codec=int8" or "retention.size=512", in order.

    Args:
      dtype: short for the raw codec of that dtype.
    """
    from kvlab.experiment import config

    table: dict[str, Any] = {}
    overrides: list[Any] = []
    for option in options:
        if option.endswith(".toml"):
            more, overrides = parts.read_layers(option)
            table |= more
        elif "=" in option:
            _set(table, *config.parse_override(option))
        else:
            raise ConfigError(f"--policy {option!r}; write a .toml file or an override such as codec=int8")
    if dtype is not None:
        if "codec" in table:
            raise ConfigError(f"--dtype {dtype} and a codec in --policy are both given; --dtype is short for the raw codec")
        table["codec"] = {"name": "raw", "dtype": dtype}
    try:
        cell = msgspec.convert({"model": {}, "task": {}, "policy": table, "layers": overrides}, config.Cell, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"layers: {error}; write layers = [{{ range = [0, 2], policy = {{ ... }} }}]") from error
    return cell.label, cell.make_policies(layers)


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    """Sets "kind" or "kind.option"; a part that was given as a name becomes a table."""
    kind, _, key = path.partition(".")
    old = table.get(kind, {})
    table[kind] = {**({"name": old} if isinstance(old, str) else old), key: value} if key else value


# ------------------------------------------------------------------------------------------------------------ figures


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


def answer(
    model: str | None,
    dims: str | None,
    batch: int,
    length: int | None,
    new_tokens: int,
    policy: Sequence[str],
    dtype: str | None,
    memory: str | None,
    exact: bool,
) -> tuple[str, Plan]:
    """The policy's label and the plan that the command line asks for, from its options. Errors: KvlabError."""
    if (model is None) == (dims is None):
        raise ConfigError("give one of --model smollm2-135m and --dims layers=48,kv_heads=8,head_dim=128")
    rows, new = positive("--batch", batch), positive("--new-tokens", new_tokens, 0)
    there = None if memory is None else parse_bytes(memory)
    tokens = None if length is None else positive("--length", length)
    shape = Dims.read(dims) if dims is not None else Dims.model(str(model))
    if tokens is None:
        tokens = max((shape.context or LENGTH + new) - new, 1)
    label, policies = read_policies(policy, dtype, shape.layers)
    return label, plan(shape, policies, rows, tokens, new, there, exact)


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
        if dims.config is None:
            raise ConfigError("--exact compiles the model; give --model, or heads, hidden, ffn and vocab in --dims")
        shapes = _caches(dims, policies, batch, length, new_tokens)
        true = workspace.exact(dims.config, policies, [cache for _, cache in shapes], batch, length)
        scale = Fraction(true.bytes, here.workspace.bytes)
        here = dataclasses.replace(here, workspace=true)
    if memory is None:
        return here

    def fits(rows: int, prompt: int) -> bool:
        there = _figures(dims, policies, rows, prompt, new_tokens)
        return there.need - there.workspace.bytes + there.workspace.bytes * scale <= room(memory)

    longest = most(lambda n: fits(batch, n), min(dims.context or LIMIT, LIMIT) - new_tokens)
    return dataclasses.replace(
        here,
        memory=memory,
        largest_batch=most(lambda n: fits(n, length), LIMIT),
        longest_context=longest + new_tokens if longest else 0,
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
        _layer(policy, budget, cache, dims, batch, size(params["blocks"].get(i, ())))
        for i, (policy, (budget, cache)) in enumerate(zip(policies, filled))
    )
    space = workspace.estimate(dims, policies, [budget for budget, _ in filled], batch, length)
    return Plan(dims, batch, length, new_tokens, size(params), layers, space)


def _caches(dims: Dims, policies, batch: int, length: int, new_tokens: int) -> list[tuple[int, Cache]]:
    """Budget and shapes of each layer's cache, as `Engine.start` fills it; layers that share a policy are traced once."""
    record = workspace.record(batch, dims.kv_heads, dims.head_dim, length)
    total = -(-(length + new_tokens) // PAGE) * PAGE
    made: dict[int, tuple[int, Cache]] = {}
    for policy in policies:
        if id(policy) not in made:
            budget = policy.budget(length, total)
            made[id(policy)] = budget, jax.eval_shape(lambda r, p=policy, b=budget: p.fill(r, b), record)
    return [made[id(policy)] for policy in policies]


def _layer(policy: Policy, budget: int, cache: Cache, dims: Dims, batch: int, weights: int) -> Layer:
    memory = size(cache.memory)
    own = max(memory - batch * dims.kv_heads * page_bytes(policy, dims.head_dim) * -(-budget // PAGE), 0)
    metadata = size((cache.pos, cache.opened, cache.open, cache.offset, cache.tail))
    return Layer(policy, budget, weights, memory - own, metadata, size(cache.index), size(cache.retained) + own)


def page_bytes(policy: Policy, head_dim: int) -> int:
    """Codes of one head's page, keys and values, by the codecs' own figures."""
    return policy.codec.keys.page_bytes(head_dim) + policy.codec.values.page_bytes(head_dim)


def size(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays, in a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
