"""Runs the cells of an experiment.

Cells that see the same prompts form a group: for each batch the prompts are prefilled once, and every policy of the group
fills its own cache from that record, answers, is scored and is written down. Finished batches are never computed again,
and a batch is computed by one process only (see `sharing`). A cell that fails does not stop the others (see `failures`).
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
from kvlab.experiment import causes, compare, config, failures, reads, report, sharing, store
from kvlab.experiment.kept import Kept
from kvlab.models import load
from kvlab.needs import REPLAYED
from kvlab.policy import Policy
from kvlab.session import padded
from kvlab.tasks import Answers, Batch, Task

ENTROPY_STEPS = 4  # steps of a sample whose entropy and reads are kept, evenly spaced
FULL = reads.FULL
WAIT = 0.5  # seconds between looks at what other processes are at


def run(
    source: str | Path | dict,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    out: str | Path = "results",
    accept_stale: bool = False,
    fresh: bool = False,
    retry: bool = False,
):
    """Runs an experiment file (or the same tables as a dict) and returns its table, a pandas frame with a row per policy.

    Several processes may do so at once, into the same folder: they share the batches out among themselves.

    Args:
      overrides: "dotted.path=value" strings, as after `--set`.
      smoke: use the file's [smoke] overrides; results go to a folder of their own.
      accept_stale: build on results of other code, weights or text.
      fresh: discard what the cells have so far.
      retry: try cells again that failed before.
    Errors: KvlabError with one clear line; finished batches stay. FailedCells at the end, where cells failed.
    """
    name, experiment = config.read(source)
    if experiment.search is not None:
        raise ConfigError(f"{name}: has a [search] table; write kvlab run FILE --search")
    cells = config.expand(experiment, overrides, smoke)
    origin = config.origin("run", source, overrides, smoke)
    return execute(name, experiment, cells, Path(out), smoke, accept_stale, fresh, retry, origin)


def folder(name: str, out: Path, smoke: bool) -> Path:
    """Where the results of an experiment lie."""
    return out / (f"{name}-smoke" if smoke else name)


def execute(
    name: str,
    experiment: config.Experiment,
    cells: list[config.Cell],
    out: Path,
    smoke: bool,
    accept_stale: bool,
    fresh: bool,
    retry: bool = False,
    origin: config.Origin = config.Origin(),  # noqa: B008
):
    """Runs cells and returns the table; as `run`, for cells that were expanded already."""
    place = folder(name, out, smoke)
    prepare(cells, place, fresh, retry)
    store.write_experiment(place, name, experiment, origin, cells)
    compute(name, cells, place, accept_stale)
    return conclude(name, experiment, cells, place)


def prepare(cells: list[config.Cell], place: Path, fresh: bool, retry: bool) -> None:
    """What is done once, before anybody computes. Errors: ResultsError."""
    store.check_writable(place)
    if fresh:
        store.discard(place, cells)
    if retry:
        failures.forget(cells, place)
    failures.announce(failures.found(cells, place))


def compute(name: str, cells: list[config.Cell], place: Path, accept_stale: bool) -> None:
    """Computes what nobody else does, then waits for the others and takes over what those leave that die."""
    groups: dict[str, list[config.Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    with sharing.at_work(place), report.progress() as bar:
        seen = report.counter(bar, name, cells, place)
        left = [(same, index) for same in groups.values() for index in Group(same, place, accept_stale, seen).run()]
        while left:
            time.sleep(WAIT)
            free = [(same, index) for same, index in left if not sharing.busy(place, group_name(same[0]), index)]
            done = [(same, index) for same, index in free if Group(same, place, accept_stale, seen).batch(index)]
            left = [each for each in left if each not in done]
            seen("waiting for others")


def conclude(name: str, experiment: config.Experiment, cells: list[config.Cell], place: Path):
    """The table of what is done. Errors: FailedCells."""
    failed = failures.found(cells, place)
    without = {each.cell.run_id for each in failed}
    done = [cell for cell in cells if cell.run_id not in without]
    for cell in done:
        finish(cell, place)
    frame = report.finish(name, experiment, done, place) if done else None
    failures.conclude(failed, len(cells), frame)
    return frame


def raise_failed(cells: list[config.Cell], place: Path) -> None:
    """Speaks of what failed, without a table. Errors: FailedCells."""
    failures.conclude(failures.found(cells, place), len(cells))


def finish(cell: config.Cell, place: Path) -> None:
    """Writes the summary of a cell whose batches are all there; whoever does, it is the same."""
    each, task = store.Run(place, cell), cell.make_task()
    if each.numbers() == list(range(task.count())):
        each.finish(summarise(task, each))


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
                finish(each.cell, self.folder)
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
        raise_failed(self.cells, self.folder)

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


def summarise(task: Task, each: store.Run) -> dict[str, Any]:
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
        if path.parts[len(root.parts)] not in ("cli.py", "__main__.py", "bench", "claims", "report"):
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
