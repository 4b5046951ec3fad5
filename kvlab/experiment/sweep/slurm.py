"""An experiment by jobs under Slurm over one results folder: each runs the command of a worker (see `launch`)."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError, ResultsError
from kvlab.experiment import report
from kvlab.experiment.config import Cell, parse_override
from kvlab.experiment.sweep import launch

WAIT = 3.0  # seconds between looks at the folder and the queue


def run(words: list[str], workers: int, cells: Sequence[Cell], place: Path, options: Sequence[str], wait: bool) -> bool:
    """Submits the command as so many jobs, and waits until they end; True if it waited.

    Args:
      options: "key=value", such as "partition=long" and "time=120" (minutes), as `submitit.SlurmExecutor` names them.
    Errors: ConfigError without submitit or Slurm, and for options that there are not; ResultsError as in `launch.local`.
    """
    jobs = _submit(words, workers, place, options)
    ids = [job.job_id for job in jobs]
    print(f"jobs {', '.join(ids)}, each: {shlex.join(words)}", file=sys.stderr)
    if not wait:
        return False
    try:
        _watch(ids, cells, place)
    except BaseException:
        _cancel(ids)
        raise
    if left := launch.unfinished(cells, place):
        raise ResultsError(
            f"jobs {', '.join(ids)} ended and {len(left)} cells are not finished; the last one's words: "
            f"{launch.last_words(Path(jobs[-1].paths.stderr))!r} ({jobs[-1].paths.folder}); run the same command to go on"
        )
    return True


def _submit(words: list[str], workers: int, place: Path, options: Sequence[str]) -> list:
    try:
        import submitit
    except ImportError as error:
        raise ConfigError("--launch slurm needs submitit; write pip install 'kvlab[slurm]', or pip install submitit") from error
    given = dict(map(parse_override, options))
    try:
        executor = submitit.SlurmExecutor(folder=(place / ".slurm").absolute())
        executor.update_parameters(**{"job_name": "kvlab", "use_srun": False, **given})
        return _all(lambda: executor.submit(submitit.helpers.CommandFunction(words)), workers)
    except ValueError as error:  # its message lists all that there is
        raise ConfigError(f"--slurm {' '.join(options)}: {' '.join(str(error).split())}") from error
    except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise ConfigError(f"--launch slurm: {error}; it needs sbatch and squeue, and options that the cluster takes") from error


def _all(submit: Callable[[], Any], workers: int) -> list:
    """So many jobs, or none: those there are go where the next cannot be submitted."""
    jobs: list[Any] = []
    try:
        for _ in range(workers):
            jobs.append(submit())
    except BaseException:
        if jobs:
            _cancel([job.job_id for job in jobs])
        raise
    return jobs


def _cancel(ids: Sequence[str]) -> None:
    subprocess.run(["scancel", *ids], check=False)


def _watch(ids: Sequence[str], cells: Sequence[Cell], place: Path) -> None:
    """Shows what lies on disk until Slurm has none of the jobs any more, or nothing is left to do."""
    with report.progress() as bar:
        seen = report.counter(bar, place.name, cells, place)
        while launch.unfinished(cells, place) and _queued(ids):
            time.sleep(WAIT)
            seen("")
        seen("")


def _queued(ids: Sequence[str]) -> bool:
    """Whether a job waits or runs; by the queue, since not every cluster keeps accounts."""
    done = subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=False)
    return done.returncode != 0 or bool(set(ids) & set(done.stdout.split()))
