"""Runs the cells of an experiment.

Cells that see the same prompts form a group: for each batch the prompts are prefilled once, and every policy of the group
fills its own cache from that record, answers, is scored and is written down. Finished batches are never computed again.
"""

import dataclasses
import functools
import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvlab
from kvlab import compilation, memory
from kvlab.attention import PREFILL_BLOCK
from kvlab.decode import Engine, Prefilled, Session, needs
from kvlab.errors import ConfigError, nearest
from kvlab.experiment import causes, compare, config, reads, report, store
from kvlab.models import load
from kvlab.needs import REPLAYED
from kvlab.tasks import Answers, Batch, Task

ENTROPY_STEPS = 4  # steps of a sample whose entropy and reads are kept, evenly spaced
FULL = reads.FULL


def run(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
):
    """Runs an experiment file (or the same tables as a dict) and returns its table, a pandas frame with a row per policy.

    Args:
      overrides: "dotted.path=value" strings, as after `--set`.
      smoke: use the file's [smoke] overrides; results go to a folder of their own.
      accept_stale: build on results of other code, weights or text.
      fresh: discard what the cells have so far.
    Errors: KvlabError with one clear line; finished batches stay.
    """
    name, experiment = config.read(source)
    return execute(name, experiment, config.expand(experiment, overrides, smoke), Path(out), smoke, accept_stale, fresh)


def folder(name: str, out: Path, smoke: bool) -> Path:
    """Where the results of an experiment lie."""
    return out / (f"{name}-smoke" if smoke else name)


def execute(
    name: str, experiment: config.Experiment, cells: list[config.Cell], out: Path, smoke: bool, accept_stale: bool, fresh: bool
):
    """Runs cells and returns the table; as `run`, for cells that were expanded already."""
    place = folder(name, out, smoke)
    store.check_writable(place)
    with report.progress() as bar:
        total = sum(cell.make_task().count() for cell in cells)
        task = bar.add_task(name, total=total)
        groups: dict[str, list[config.Cell]] = {}
        for cell in cells:
            groups.setdefault(cell.group, []).append(cell)
        for group in groups.values():
            Group(group, place, accept_stale, fresh, lambda what: bar.update(task, advance=1, description=what)).run()
    return report.finish(name, experiment, cells, place)


@functools.lru_cache(maxsize=1)
def engine(name: str) -> Engine:
    """A model's engine; one is kept."""
    return Engine(load(name))


class Group:
    """Cells with the same model, task and seed."""

    def __init__(self, cells: list[config.Cell], folder: Path, accept_stale: bool, fresh: bool, done):
        self.engine = engine(model_name(cells[0].model))
        self.task: Task = cells[0].make_task()
        self.seed = cells[0].seed
        self.done = done
        env = environment(self.engine, self.task)
        self.runs = [(store.Run(folder, cell), cell.make_policies(self.engine.config)) for cell in cells]
        for each, _ in self.runs:
            each.open({**env, "files": files_digest(each.cell)}, accept_stale, fresh)
        self.runs.sort(key=lambda run: not compare.is_full(run[0].cell))  # the others' causes lean on its answers

    def run(self) -> None:
        for index in range(self.task.count()):
            todo = [(each, policies) for each, policies in self.runs if not each.has(index)]
            for each, _ in self.runs:
                if each.has(index):
                    self.done(each.cell.label)
            if todo:
                self._batch(index, todo)
        for each, policies in self.runs:
            each.finish(summarise(self.task, each, policies))

    def _batch(self, index: int, todo) -> None:
        batch = self.task.batch(index, self.seed, self.engine.model.tokenizer)

        @functools.cache
        def prompt(block: int) -> Prefilled:
            asking = [policy for each, policies in todo if each.cell.prefill_block == block for policy in policies]
            return self.engine.prefill(batch.prompts, needs(asking), block)

        reference = self._reference(batch, prompt)
        full = functools.cache(lambda: self._full(index, batch, prompt(PREFILL_BLOCK)))
        for each, policies in todo:
            made = decode(self.engine, prompt(each.cell.prefill_block), policies, batch, logits=self.task.compares_logits)
            scores = self.task.score(batch, made.answers, reference.answers if reference else None)
            rows = [{**fact, **score, **made.row, **read} for fact, score, read in zip(batch.facts, scores, made.reads)]
            drift = made.drift(reference) if reference and not batch.sampling else None
            if drift is not None:
                rows = [{**row, "drift": float(mean)} for row, mean in zip(rows, drift.mean((0, 1)))]
            if batch.spans:
                mine = compare.is_full(each.cell)
                for i, row in enumerate(rows):
                    model = not row["correct"] and (mine or not full()[i])
                    row["cause"] = causes.cause(row, model, causes.rounds(policies))
            arrays = {
                "kept": made.kept,
                "entropy": made.entropy,
                "entropy_steps": made.entropy_steps,
                "rows": np.array(batch.rows),
            }
            arrays |= {} if drift is None else {"drift": drift}
            arrays |= {f"prompt_{i}": np.array(p, np.int32) for i, p in enumerate(batch.prompts)}
            each.write(index, rows, arrays, made.timing)
            self.done(each.cell.label)
            compilation.relieve()

    def _reference(self, batch: Batch, prompt: Callable[[int], Prefilled]) -> "Decoded | None":
        """What the full fp32 cache gives, where the task compares with it."""
        if not (self.task.compares_logits or self.task.compares_answers):
            return None
        return decode(self.engine, prompt(PREFILL_BLOCK), FULL, batch, logits=self.task.compares_logits)

    def _full(self, index: int, batch: Batch, prompt: Prefilled) -> list[bool]:
        """Which samples the full fp32 cache gets right: as a cell of the group has it, or else decoded for this."""
        for each, _ in self.runs:
            if compare.is_full(each.cell) and each.has(index):
                return [row["correct"] for row in each.batch(index)["rows"]]
        made = decode(self.engine, prompt, FULL, batch, logits=False)
        return [score["correct"] for score in self.task.score(batch, made.answers)]


@dataclasses.dataclass
class Decoded:
    """One policy over one batch: answers, what was watched, and what each row of the results gets."""

    answers: Answers
    outputs: np.ndarray | None  # of attention [steps, L, B, H · G · D], where logits are there too
    kept: np.ndarray  # [prompt, L, H, S] positions after the fill, −1 where none
    entropy: np.ndarray  # [steps kept, L, B, H, G]
    entropy_steps: np.ndarray
    row: dict[str, Any]
    reads: list[dict[str, float]]  # of each row of the results (see `reads.Reads.rows`, `causes.Followed.rows`)
    timing: dict[str, Any]

    def drift(self, reference: "Decoded") -> np.ndarray | None:
        """How far attention's output is from the full cache's, relative to it: `[steps, L, B]`, by layer and step; where both
        were fed the same tokens. A layer's figure holds what came down from the layers before it."""
        if self.outputs is None or reference.outputs is None:
            return None
        apart = np.linalg.norm(self.outputs - reference.outputs, axis=-1)
        return apart / np.maximum(np.linalg.norm(reference.outputs, axis=-1), 1e-12)


def decode(engine: Engine, prompt: Prefilled, policies, batch: Batch, logits: bool) -> Decoded:
    """Fills from the record, feeds the forced tokens, and samples the rest, one step a call so that each is timed."""
    seeds = batch.seeds if batch.sampling else 0
    session = engine.start(
        prompt, policies, batch.new_tokens, batch.rows, batch.forced, engine.model.stops, batch.sampling, seeds
    )
    kept, footprint = snapshot(session, batch)
    watch = ("entropy", *reads.WATCH, *(("logits", "outputs") if logits else ()))
    seen_reads = reads.Reads(session, reads.planned(batch.new_tokens, ENTROPY_STEPS))
    answer = causes.Followed(engine.config, batch)
    seen_logits: list[np.ndarray] = []
    seen_outputs: list[np.ndarray] = []
    seen_entropy: list[np.ndarray] = []
    while len(seen_entropy) < batch.new_tokens and not (session.done and seen_entropy):
        steps = session.run(1, watch, answer.positions)
        answer.see(len(seen_entropy), steps)
        seen_reads.see(len(seen_entropy), steps)
        seen_entropy.append(np.asarray(steps.entropy[0]))
        if logits:
            seen_logits.append(np.asarray(steps.logits[0]))
            seen_outputs.append(np.asarray(steps.outputs[0]).reshape(*steps.outputs.shape[1:3], -1))
    chosen = np.unique(np.linspace(0, len(seen_entropy) - 1, ENTROPY_STEPS).round().astype(int))
    tokens = session.answers()
    texts = [engine.model.tokenizer.decode(ids) for ids in tokens]
    return Decoded(
        Answers(texts, tokens, np.stack(seen_logits) if logits else None),
        np.stack(seen_outputs) if logits else None,
        kept,
        np.stack([seen_entropy[i] for i in chosen]).astype(np.float32),
        chosen,
        footprint,
        [{**read, **share} for read, share in zip(seen_reads.rows(), answer.rows())],
        timing(session, prompt, len(batch.rows)),
    )


def snapshot(session: Session, batch: Batch) -> tuple[np.ndarray, dict[str, Any]]:
    """Positions visible after the fill, a row per prompt, and the memory figures of one sequence."""
    caches, policies = session.state.caches, session.policies
    first = np.array([list(batch.rows).index(i) for i in range(len(batch.prompts))])
    kept = []
    for policy, cache in zip(policies, caches):
        pos = np.asarray(memory.positions(policy, cache))[first]
        kept.append(np.sort(pos.reshape(*pos.shape[:2], -1), -1))
    width = max(k.shape[-1] for k in kept)
    kept = [np.pad(k, ((0, 0), (0, 0), (width - k.shape[-1], 0)), constant_values=-1) for k in kept]
    longest = max(map(len, batch.prompts))
    figures = memory.footprint(policies, caches, FULL, longest + batch.new_tokens)
    return np.stack(kept, 1), {**dataclasses.asdict(figures), "resident_ratio": figures.resident_ratio}


def timing(session: Session, prompt: Prefilled, rows: int) -> dict[str, Any]:
    """Times of one batch. The first step is left out of the rates: it may have compiled."""
    first, *rest = [seconds / max(n, 1) for seconds, n in session.step_seconds]
    prefill = prompt.seconds + (prompt.replay_seconds if needs(session.policies) & REPLAYED else 0.0)
    return {
        "rows": rows,
        "prefill_seconds": prefill,
        "fill_seconds": session.fill_seconds,
        "first_step_seconds": first,
        "step_seconds": rest or [first],
        "time_to_first_token": prefill + session.fill_seconds,
    }


def summarise(task: Task, each: store.Run, policies) -> dict[str, Any]:
    """A cell's figures from its batches on disk, so that a resumed run gives what an undisturbed one does."""
    batches = each.batches()
    rows = [row for b in batches for row in b["rows"]]
    steps = np.array([s for b in batches for s in b["timing"]["step_seconds"]])
    samples = sum(b["timing"]["rows"] * len(b["timing"]["step_seconds"]) for b in batches)
    memory_names = [f.name for f in dataclasses.fields(memory.Footprint)] + ["resident_ratio"]
    return {
        "run_id": each.cell.run_id,
        "policy": each.cell.label,
        "task": each.cell.task["name"],
        "seed": each.cell.seed,
        **task.summary(rows),
        **{name: float(np.mean([r[name] for r in rows])) for name in memory_names},
        **{
            name: float(np.mean([r[name] for r in rows]))
            for name in (*reads.COLUMNS, *causes.COLUMNS, "drift")
            if all(name in r for r in rows)
        },
        "tokens_per_s": float(samples / steps.sum()),
        "ms_per_token_p50": float(np.quantile(steps, 0.5) * 1e3),
        "ms_per_token_p99": float(np.quantile(steps, 0.99) * 1e3),
        "time_to_first_token": float(np.median([b["timing"]["time_to_first_token"] for b in batches])),
    }


def environment(engine: Engine, task: Task) -> dict[str, str]:
    """What a result depends on besides its config."""
    return {
        "code": code_digest(),
        "weights": engine.model.digest,
        "text": task.digest(),
        "kvlab": kvlab.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.machine()} {jax.default_backend()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def files_digest(cell: config.Cell) -> str:
    """SHA-256 over the gates and rankings that a cell names, "" where it names none. Errors: ConfigError."""
    found = sorted(cell.files())
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in found)).hexdigest() if found else ""


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's sources that can change a number."""
    root = Path(kvlab.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.parts[len(root.parts)] not in ("cli.py", "bench", "claims"):
            total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()


def model_name(table: dict[str, Any]) -> str:
    """The name in `model = {name = "..."}`."""
    for key in table:
        if key != "name":
            raise ConfigError(f"model: unknown key {key!r}; {nearest(key, ['name'])}")
    if not isinstance(table.get("name"), str):
        raise ConfigError('model: no name; write model = {name = "smollm2-135m"}')
    return table["name"]
