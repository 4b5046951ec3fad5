"""How long a decode step of the caches alone takes under two policies, layer by layer, on this machine."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import plan
from kvlab.bench.steps import steps
from kvlab.claims.timed import Program, Timed
from kvlab.core import PAGE, Record
from kvlab.errors import ConfigError
from kvlab.experiment import config
from kvlab.memory import read_bytes
from kvlab.models.config import ModelConfig
from kvlab.plan import inputs
from kvlab.policy import Policy

STEPS = 4  # timed together


class StepTime(Timed, frozen=True, kw_only=True):
    """By which factor a step under `policy` is faster than under `against`: appending to all layers' caches and attending them.

    No weights are read, so this is the most that a model's step can gain. Each of the two is a table {policy = {…}, layers = […]}
    as in an experiment file. What both take in bytes is printed.

    Attributes:
      dims: as the option of `kvlab plan`.
      queries: query heads per KV head.
      tokens: that are stored before the first step.
    """

    dims: str
    policy: dict[str, Any]
    against: dict[str, Any]
    queries: int = 3
    tokens: int = 4096

    def programs(self) -> list[tuple[Program, Program]]:
        return [(self._program("against", self.against), self._program("policy", self.policy))]

    def said(self) -> str:
        sizes = [f"{self._bytes(table):,}" for table in (self.against, self.policy)]
        return f"{' → '.join(sizes)} resident bytes, a step "

    def policies(self, table: dict[str, Any]) -> tuple[Policy, ...]:
        """A policy for each layer. Errors: ConfigError, RefusedPolicy."""
        if unknown := sorted(set(table) - {"policy", "layers"}):
            raise ConfigError(f"{self.name}: unknown key {unknown[0]!r}; allowed: policy, layers")
        cell = config.convert({"model": {}, "task": {}, "policy": {}, **table}, config.Cell, self.name)
        return cell.make_policies(self._model)

    @property
    def _model(self) -> ModelConfig:
        return inputs.read_dims(self.dims).bare()

    def _bytes(self, table: dict[str, Any]) -> int:
        new = _room(self.tokens, self.repeats + 1) - self.tokens
        return plan.plan(inputs.read_dims(self.dims), self.policies(table), 1, self.tokens, new).total("resident")

    def _program(self, label: str, table: dict[str, Any]) -> Program:
        model, policies = self._model, self.policies(table)
        dense = all(policy.selection.reads_all for policy in policies)
        read = [read_bytes(policy, model.head_dim, self.tokens, self.tokens) for policy in policies]
        useful = model.kv_heads * round(sum(read)) if dense else None
        return Program(label, stepper(policies, model, self.queries, self.tokens, self.repeats + 1), useful)


def stepper(policies: tuple[Policy, ...], model: ModelConfig, queries: int, tokens: int, rounds: int):
    """A function that takes STEPS steps and returns the seconds of one; `tokens` are there before the first of `rounds` calls."""
    rng = np.random.default_rng(0)
    draw = lambda size: jnp.asarray(rng.normal(size=(1, model.kv_heads, size, model.head_dim)), jnp.float32)
    record, query = Record(draw(tokens), draw(tokens), jnp.arange(tokens)[None]), draw(queries)
    total = _room(tokens, rounds)
    fill = jax.jit(lambda policies: tuple(policy.fill(record, policy.budget(tokens, total)) for policy in policies))
    run = jax.jit(steps, static_argnames="count", donate_argnums=1)
    caches, stored = fill(policies), tokens

    def once() -> float:
        nonlocal caches, stored
        jax.block_until_ready(caches)
        begin = time.perf_counter()
        caches, out = run(policies, caches, query, stored, count=STEPS)
        jax.block_until_ready(out)
        stored += STEPS
        return (time.perf_counter() - begin) / STEPS

    return once


def _room(tokens: int, rounds: int) -> int:
    """Tokens that a cache has room for, in whole pages."""
    return -(-(tokens + rounds * STEPS) // PAGE) * PAGE
