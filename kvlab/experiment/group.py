"""Cells that see the same prompts: each batch is prefilled once, and every policy fills its own cache from that record."""

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlab import compilation
from kvlab.attention import PREFILL_BLOCK
from kvlab.decode import Engine, Prefilled, needs
from kvlab.errors import ConfigError, nearest
from kvlab.experiment import causes, compare, config, failures, sharing, store, summary
from kvlab.experiment.decoded import FULL, Decoded, decode
from kvlab.experiment.environment import environment, files_digest
from kvlab.experiment.kept import Kept
from kvlab.models import load
from kvlab.policy import Policy
from kvlab.session import padded
from kvlab.tasks import Batch, Task

WAIT = 0.5  # seconds between looks at what other processes are at


def group_name(cell: config.Cell) -> str:
    """A short name of the group that a cell belongs to."""
    return hashlib.sha256(cell.group.encode()).hexdigest()[:12]


@functools.lru_cache(maxsize=1)
def engine(name: str) -> Engine:
    """A model's engine; one is kept."""
    return Engine(load(name))


class Group:
    """Cells with the same model, task and seed. Those that failed, now or before, are left out.

    `kept` holds prompts and the reference's answers beyond their batch.
    """

    def __init__(
        self,
        cells: list[config.Cell],
        folder: Path,
        accept_stale: bool,
        seen: Callable[[str], None],
        kept: Kept | None = None,
    ):
        self.cells, self.kept = cells, kept or Kept()
        self.engine = engine(model_name(cells[0].model))
        self.task: Task = cells[0].make_task()
        self.seed, self.folder, self.seen = cells[0].seed, folder, seen
        self.name = group_name(cells[0])
        self.runs: list[tuple[store.Run, tuple[Policy, ...]]] = []
        env = environment(self.engine, self.task)
        for each in (store.Run(folder, cell) for cell in cells):
            if not each.failed:
                with failures.kept(each):
                    policies = each.cell.make_policies(self.engine.config)
                    each.open({**env, "files": files_digest(each.cell)}, accept_stale)
                    self.runs.append((each, policies))
        self.runs.sort(key=lambda run: not compare.is_full(run[0].cell))  # the others' causes lean on its answers

    def run(self) -> list[int]:
        """Computes every batch that nobody else is at, and returns those that others are."""
        left = [index for index in range(self.task.count()) if not self.batch(index)]
        for each, _ in self.runs:
            if not each.failed:
                summary.finish(each.cell, self.folder)
        return left

    def batch(self, index: int) -> bool:
        """Computes what is missing of a batch; False where another process is at it."""
        if not self._todo(index):
            self.seen("")
            return True
        with sharing.batch(self.folder, self.name, index) as mine:
            if mine and (todo := self._todo(index)):  # somebody may have finished it meanwhile
                self._compute(index, todo)
            return mine

    def need(self, index: int) -> None:
        """Sees to it that a batch is there, whoever computes it. Errors: FailedCells."""
        while not self.batch(index):
            time.sleep(WAIT)
        failures.raise_found(self.cells, self.folder)

    def _todo(self, index: int) -> list[tuple[store.Run, tuple[Policy, ...]]]:
        return [(each, policies) for each, policies in self.runs if not (each.failed or each.has(index))]

    def _compute(self, index: int, todo) -> None:
        batch = functools.cache(lambda: self.task.batch(index, self.seed, self.engine.model.tokenizer))
        keep = lambda key, make: self.kept.get((self.name, index, key), make)
        prompts = Prompts(self.engine, batch, todo, keep)
        reference = functools.cache(lambda: keep("reference", lambda: self._reference(batch(), prompts)))
        full = functools.cache(lambda: self._full(index, batch(), prompts))
        for each, policies in todo:
            with failures.kept(each):
                self._cell(index, each, policies, batch(), prompts.of(each.cell, policies), reference(), full)
            self.seen(each.cell.label)
            compilation.relieve()

    def _cell(self, index: int, each: store.Run, policies, batch: Batch, prompt: Prefilled, reference, full) -> None:
        """One cell's share of a batch, from the record to the disk."""
        begin = time.perf_counter()
        made = decode(self.engine, prompt, policies, batch, logits=self.task.compares_logits)
        scores = self.task.score(batch, made.answers, reference.answers if reference else None)
        rows = [{**fact, **score, **made.row, **read} for fact, score, read in zip(batch.facts, scores, made.reads)]
        drift = made.drift(reference) if reference and not batch.sampling else None
        if drift is not None:
            rows = [{**row, "drift": float(mean)} for row, mean in zip(rows, drift.mean((0, 1)))]
        if not self.task.compares_logits:  # there it is the text itself that is fed
            rows = [{**row, "question": self.engine.model.tokenizer.decode(f)} for row, f in zip(rows, batch.forced)]
        if batch.spans:
            rows = [{**row, "span": [int(end) for end in span]} for row, span in zip(rows, batch.spans)]
            mine = compare.is_full(each.cell)
            for i, row in enumerate(rows):
                model = not row["correct"] and (mine or not full()[i])
                row["cause"] = causes.cause(row, model, causes.rounds(policies))
        arrays = {
            "kept": made.kept,
            "entropy": made.entropy,
            "entropy_steps": made.entropy_steps,
            "rows": np.array(batch.rows),
            "answers": padded(made.answers.tokens, max(map(len, made.answers.tokens)), -1),
        }
        arrays |= {} if drift is None else {"drift": drift}
        arrays |= {f"prompt_{i}": np.array(p, np.int32) for i, p in enumerate(batch.prompts)}
        each.write(index, rows, arrays, {**made.timing, "seconds": time.perf_counter() - begin})

    def _reference(self, batch: Batch, prompts: "Prompts") -> "Decoded | None":
        """What the full fp32 cache gives, where the task compares with it."""
        if not (self.task.compares_logits or self.task.compares_answers):
            return None
        return decode(self.engine, prompts.plain(), FULL, batch, logits=self.task.compares_logits)

    def _full(self, index: int, batch: Batch, prompts: "Prompts") -> list[bool]:
        """Which samples the full fp32 cache gets right: as a cell of the group has it, or else decoded for this."""
        for each, _ in self.runs:
            if compare.is_full(each.cell) and each.has(index):
                return [row["correct"] for row in each.batch(index)["rows"]]
        made = decode(self.engine, prompts.plain(), FULL, batch, logits=False)
        return [score["correct"] for score in self.task.score(batch, made.answers)]


class Prompts:
    """The records of a batch's prompts: one for all cells, or one for each where what some of them need cannot be had.

    `keep(key, make)` gives what `make` makes, or made before.
    """

    def __init__(
        self,
        engine: Engine,
        batch: Callable[[], Batch],
        todo: Sequence[tuple[store.Run, tuple[Policy, ...]]],
        keep: Callable[[Any, Callable[[], Prefilled]], Prefilled],
    ):
        self._engine, self._batch, self._todo, self._keep = engine, batch, todo, keep
        self._shared = functools.cache(self._joint)

    def of(self, cell: config.Cell, policies: Sequence[Policy]) -> Prefilled:
        return self._get(cell.prefill_block, policies)

    def plain(self) -> Prefilled:
        """As the full fp32 cache is compared with."""
        return self._get(PREFILL_BLOCK, ())

    def _get(self, block: int, policies: Sequence[Policy]) -> Prefilled:
        return self._shared(block) or self._engine.prefill(self._batch().prompts, needs(policies), block)

    def _joint(self, block: int) -> Prefilled | None:
        asking = [policy for each, policies in self._todo if each.cell.prefill_block == block for policy in policies]
        needed = frozenset(needs(asking))
        try:
            return self._keep((block, needed), lambda: self._engine.prefill(self._batch().prompts, needed, block))
        except Exception:  # each cell meets it again by itself, if it is its own
            return None


def model_name(table: dict[str, Any]) -> str:
    """The name in `model = {name = "..."}`."""
    for key in table:
        if key != "name":
            raise ConfigError(f"model: unknown key {key!r}; {nearest(key, ['name'])}")
    if not isinstance(table.get("name"), str):
        raise ConfigError('model: no name; write model = {name = "smollm2-135m"}')
    return table["name"]
