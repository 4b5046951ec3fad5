"""What runs a kernel: `Policy.implementation` by name."""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jax.extend.core import Primitive
from jax.interpreters import mlir

from kvlab.errors import ConfigError, RefusedPolicy, nearest

DEVICES = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}


@dataclasses.dataclass(frozen=True)
class Backend:
    """How a kernel is built.

    Attributes:
      name: what a policy calls it.
      form: "loop": a program walks pages that it finds itself (`kvlab.kernels.loop`); "grid": the grid walks them and blocks are
        fetched beforehand (`kvlab.kernels.grid`).
      platform: what it runs on, as jax calls it; None for anything.
      interpret: whether jax takes the kernel's steps one by one instead of compiling them.
      queries: the rows of a KV head's queries are padded to a power of two of at least so many; 1 leaves them as they are.
      piece: head dimensions must be multiples of this.
    """

    name: str
    form: str
    platform: str | None
    interpret: bool = False
    queries: int = 1
    piece: int = 1

    def options(self) -> dict[str, Any]:
        """What `pallas_call` is told."""
        if self.interpret:
            return {"interpret": True}
        if self.platform == "cuda":
            return {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=2)}
        return {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",))}


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("triton", "loop", "cuda", queries=16, piece=16),
        Backend("tpu", "grid", "tpu"),
        Backend("interpret", "loop", None, interpret=True),
    )
}


IMPLEMENTATIONS = ("xla", *BACKENDS)


def unknown(implementation) -> str | None:
    """What is said of a name that means nothing; None of one that does."""
    if implementation in IMPLEMENTATIONS:
        return None
    return f"implementation={implementation!r}; {nearest(str(implementation), IMPLEMENTATIONS)}"


def known(implementation: str) -> None:
    """Errors: ConfigError for a name that means nothing."""
    if reason := unknown(implementation):
        raise ConfigError(reason)


def only_on(x, platform: str | None, name: str):
    """`x`, in a program that may be lowered for `platform` alone: anywhere, but it runs only there.

    Errors: RefusedPolicy where the program is lowered for another platform, which is where it would run.
    """
    return x if platform is None else _only_on.bind(x, platform=platform, name=name)


_only_on = Primitive("only_on")
_only_on.def_abstract_eval(lambda x, **_: x)
_only_on.def_impl(lambda x, **given: jax.jit(functools.partial(_only_on.bind, **given))(x))


def _lowered(context, x, *, platform: str, name: str):
    found = context.module_context.platforms
    if tuple(found) != (platform,):
        raise RefusedPolicy(
            f"implementation={name!r} runs on {DEVICES[platform]}, but this program is for {', '.join(found)}; write "
            'implementation = "xla", or "interpret" for the same kernel step by step'
        )
    return [x]


mlir.register_lowering(_only_on, _lowered)
