"""An experiment by several processes over one results folder (see `sharing`), here; `slurm` has them under Slurm.

A worker is a command that anybody could type, `kvlab run FILE … --no-table`: one that was stopped, or died, is started again by
typing it. Whoever starts the workers only counts what lies on disk, and makes the table at the end.
"""

import dataclasses
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import ConfigError, ResultsError, nearest
from kvlab.experiment import report, store
from kvlab.experiment.config import Cell

WAIT = 0.3  # seconds between looks at the folder
PATIENCE = 5.0  # seconds that a worker has to end when it is told to
LOGS = ".workers"


def command(file: Path, overrides: Sequence[str], smoke: bool, out: Path, accept_stale: bool) -> list[str]:
    """What each worker runs."""
    options = [f"--set={each}" for each in overrides] + ["--smoke"] * smoke + ["--accept-stale"] * accept_stale
    return [sys.executable, "-m", "kvlab", "run", str(file), *options, f"--out={out}", "--no-table"]


def unfinished(cells: Sequence[Cell], place: Path) -> list[Cell]:
    """Cells that neither failed nor have all their batches."""
    runs = [store.Run(place, cell) for cell in cells]
    return [run.cell for run in runs if not run.failed and len(run.numbers()) < run.cell.make_task().count()]


def checked(how: str, workers: int | None, options: Sequence[str], wait: bool) -> int:
    """How many workers are asked for. Errors: ConfigError for options that do not go together."""
    if how not in ("", "local", "slurm"):
        raise ConfigError(f"--launch {how}; {nearest(how, ['local', 'slurm'])}")
    if workers is not None and not how:
        raise ConfigError(f"--workers {workers} alone starts none; write --launch local or --launch slurm beside it")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}; allowed: 1 and more")
    if (options or not wait) and how != "slurm":
        raise ConfigError("--slurm and --no-wait are for jobs; write --launch slurm beside them")
    return 2 if workers is None else workers


@dataclasses.dataclass
class Worker:
    """A process and where its words go; `told` once its end was spoken of."""

    name: str
    process: subprocess.Popen
    log: Path
    told: bool = False

    @property
    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def local(words: list[str], workers: int, cells: Sequence[Cell], place: Path) -> None:
    """Runs the command in so many processes until they end. Errors: ResultsError where they leave cells unfinished."""
    shares = cores(workers)
    print(f"{workers} workers in {place}, on cores {' | '.join(map(_list, shares))}, each: {shlex.join(words)}", file=sys.stderr)
    team: list[Worker] = []
    with _stopping(team), report.progress() as bar:
        for i, mine in enumerate(shares):  # one by one, so that those there are end where the next cannot be started
            team.append(_start(i, words, mine, workers, place / LOGS))
        seen = report.counter(bar, place.name, cells, place)
        while any(worker.ended is None for worker in team):
            time.sleep(WAIT)
            seen("")
            for worker in team:
                _tell(worker, cells, place, bar.console.print)
        seen("")
    if left := unfinished(cells, place):
        raise ResultsError(
            f"the workers ended and {len(left)} cells are not finished; the last one's words: {last_words(team[-1].log)!r} "
            f"(all in {place / LOGS}); what is finished is kept, run the same command to go on"
        )


def cores(workers: int) -> list[list[int]]:
    """The cores that this process may use, shared out; one each, several on the same, where there are more workers."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if workers >= len(mine):
        return [[core] for core in itertools.islice(itertools.cycle(mine), workers)]
    return [mine[i * len(mine) // workers : (i + 1) * len(mine) // workers] for i in range(workers)]


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _start(number: int, words: list[str], mine: list[int], workers: int, logs: Path) -> Worker:
    log = logs / f"{number}.log"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / workers:.3f}", **os.environ}  # of an accelerator's memory
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as words_go, _pinned(mine):
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=words_go, stderr=words_go, start_new_session=True
            )
    except OSError as error:
        raise ResultsError(f"cannot start a worker in {logs}: {error.strerror or error}; choose another --out") from error
    return Worker(f"worker {number}", process, log)


@contextmanager
def _pinned(mine: list[int]) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores, and XLA makes as many threads; where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _tell(worker: Worker, cells: Sequence[Cell], place: Path, say) -> None:
    """Says once that a worker died; one that ends with an error when everything is done only speaks of failed cells."""
    if worker.ended is None or worker.told:
        return
    worker.told = True
    if worker.process.returncode and unfinished(cells, place):
        say(f"{worker.name} {worker.ended}, the others take over what it had begun; its words: {worker.log}")


@contextmanager
def _stopping(team: list[Worker]) -> Iterator[None]:
    """Leaves no worker behind, whatever ends the block; a request to terminate is taken as Ctrl-C."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for worker in team:
            worker.process.terminate()
        for worker in team:
            try:
                worker.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        signal.signal(signal.SIGTERM, before)


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
