"""Compiled pieces of work, timed in turns."""

import functools
import time
from collections.abc import Callable, Mapping

import jax

from kvlab import memory


def compiled(function, args) -> tuple[Callable, int]:
    """A program with its arguments, run once, and its temporaries in bytes."""
    program = jax.jit(function).lower(*args).compile()
    run = functools.partial(program, *args)
    jax.block_until_ready(run())
    return run, memory.compiled(program).temporaries


def interleaved(programs: Mapping[str, tuple[Callable, int]], pairs: int) -> dict[str, list[float]]:
    """Milliseconds of every program, one after another, `pairs` times."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(pairs):
        for name, (run, _) in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - begin) * 1e3)
    return times
