"""The cases of one length and batch: built side by side, checked one by one, timed in turns."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from kvlab.bench.kernels import cases, peers, program
from kvlab.bench.kernels.cases import Case, Ready
from kvlab.bench.kernels.exact import Exact
from kvlab.bench.kernels.setting import GIB, Setting, Sizes
from kvlab.core import Record

COPIED = GIB // 2  # bytes of the memory whose copy is timed
QUICK: dict[str, bool | str] = {  # step by step a program runs once, and most of its time is compiling
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
}
LATE = "not run: the time limit was reached"


@dataclasses.dataclass(frozen=True)
class Built:
    """A case that can be called.

    Attributes:
      held: equal memories.
      run: gives the last queries and their output.
      calls: attentions in it, each of which reads `useful` bytes.
      pages: what the last of them read, `[B, H, R]`, or None for everything.
    """

    case: Case
    made: Ready
    held: tuple
    run: Callable
    calls: int
    useful: float
    pages: Any


class Group:
    """Cases over one record.

    Attributes:
      reasons: why a case was not run, by case.
      errors: by case.
      useful: bytes that one attention of a case must read.
      seconds: for each of these bytes, by case, round by round; and of "copy" and "read".
    """

    def __init__(self, sizes: Sizes, late: Callable[[], bool]):
        self.sizes, self.setting, self.late = sizes, sizes.setting, late
        own, theirs = cases.cases(sizes.length, sizes.batch, sizes.dtypes), peers.cases(sizes.length, sizes.batch)
        self.listed = [*own, *theirs]
        self.reasons: dict[Case, str] = {}
        self.errors: dict[Case, float] = {}
        self.useful: dict[Case, float] = {}
        self.seconds: dict[Case | str, list[float]] = {}
        self.options: dict[str, bool | str] = QUICK if sizes.setting.interpret else {}
        self.lock = threading.Lock()  # one filling at a time: each takes memory for itself

    @property
    def cases(self) -> list[Case]:
        return [case for same in self.listed for case in same]

    def run(self) -> Case | None:
        """Builds, checks, and times what is right. The first case that is wrong, after which nothing is timed."""
        try:
            if self.late():
                raise TimeoutError("the time limit was reached")
            self._numbers()
        except Exception as error:
            self.reasons = dict.fromkeys(self.cases, f"not run: {reason(error)}")
            return None
        with ThreadPoolExecutor(self.setting.workers) as pool:
            built = [each for some in pool.map(self._build, self.listed) for each in some]
        exact = Exact(self.record)
        for each in built:
            if self._check(each, exact):
                return each.case
        self._time([each for each in built if each.case not in self.reasons])
        return None

    def _numbers(self) -> None:
        _, length, batch, _, held = self.sizes
        self.record = jax.block_until_ready(cases.draw(self.setting, length, batch, held))
        self.device = self.record.key_BHTD.device
        self.query, self.lists = program.queries(self.setting, batch), jnp.asarray(cases.lists(self.setting, length, batch))

    def _build(self, same: list[Case]) -> list[Built]:
        """Cases that share a memory."""
        found: list[Built] = []
        for case in same:
            if self.late():
                self.reasons[case] = LATE
                continue
            try:
                with jax.default_device(self.device):  # a thread has its own
                    found.append(self._one(case, found[0] if found else None))
            except Exception as error:  # whatever a back end says goes into the table
                self.reasons[case] = reason(error)
        return found

    def _one(self, case: Case, before: Built | None) -> Built:
        made = before.made if before else prepared(self.setting, case, self.record, self._fill)
        pages = self.lists if case.read == "pages" else None
        walk = 1 if pages is None else len(pages)
        sets, repeats = program.sizes(self.setting, made.stored, walk)
        held = before.held if before else self._copies(made.memory, sets)
        compiled = jax.jit(program.program(made, repeats)).lower(held, self.query, pages).compile(self.options)
        last = None if pages is None else pages[(repeats - 1) % walk]
        run = lambda: compiled(held, self.query, pages)
        return Built(case, made, held, run, sets * repeats, made.stored / walk, last)

    def _copies(self, memory, count: int) -> tuple:
        with self.lock:
            return jax.block_until_ready((memory, *(jax.tree.map(jnp.copy, memory) for _ in range(count - 1))))

    def _fill(self, function: Callable, record: Record):
        compiled = jax.jit(function).lower(record).compile(self.options)
        with self.lock:
            return jax.block_until_ready(compiled(record))

    def _check(self, each: Built, exact: Exact) -> bool:
        """Whether a kernel of kvlab's is wrong. A peer that is wrong is not timed, and the reason says so."""
        if self.late():
            self.reasons[each.case] = LATE
            return False
        try:
            used, out = jax.block_until_ready(each.run())
        except Exception as error:
            self.reasons[each.case] = reason(error)
            return False
        peer = each.case.layout in peers.PEERS
        self.useful[each.case] = each.useful
        found = self.errors[each.case] = exact.error(each.case, each.made, used, each.pages, out)
        if found <= self.setting.tolerance(each.case.dtype, peer):
            return False
        self.reasons[each.case] = f"wrong: error {found:.1e}"
        return not peer

    def _time(self, built: list[Built]) -> None:
        if not self.setting.rounds or not built:
            return
        words, times = jnp.zeros(COPIED // 4, jnp.int32), max(1, self.setting.traffic // COPIED)
        roofs: dict[str, Callable] = {}
        for name, work in (("copy", program.copy), ("read", program.total)):
            compiled = jax.jit(work, static_argnums=1).lower(words, times).compile()
            roofs[name] = lambda compiled=compiled: compiled(words)
            jax.block_until_ready(roofs[name]())
        for _ in range(self.setting.rounds):
            if self.late():
                break
            for name, roof in roofs.items():
                moved = COPIED * times * (2 if name == "copy" else 1)
                self.seconds.setdefault(name, []).append(_clock(roof) / moved)
            for each in built:
                self.seconds.setdefault(each.case, []).append(_clock(each.run) / each.calls / each.useful)


def prepared(setting: Setting, case: Case, record: Record, fill: Callable) -> Ready:
    make = peers.ready if case.layout in peers.PEERS else cases.ready
    return make(setting, case, record, fill)


def reason(error: Exception) -> str:
    """An error's kind and first words, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _clock(work: Callable) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begin
