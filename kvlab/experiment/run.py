"""Runs the cells of an experiment.

Cells that see the same prompts form a group: for each batch the prompts are prefilled once, and every policy of the group
fills its own cache from that record, answers, is scored and is written down. Finished batches are never computed again,
and a batch is computed by one process only (see `sharing`). A cell that fails does not stop the others (see `failures`).
"""

import time
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.experiment import config, failures, report, sharing, store, summary
from kvlab.experiment.group import WAIT, Group, group_name


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
    cells = asked(name, experiment, overrides, smoke)
    origin = config.origin("run", source, overrides, smoke)
    return execute(name, experiment, cells, Path(out), smoke, accept_stale, fresh, retry, origin)


def asked(name: str, experiment: config.Experiment, overrides: Sequence[str], smoke: bool) -> list[config.Cell]:
    """An experiment's cells. Errors: ConfigError, also for a file that asks for a search."""
    if experiment.search is not None:
        raise ConfigError(f"{name}: has a [search] table; write kvlab run FILE --search")
    return config.expand(experiment, overrides, smoke)


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
        summary.finish(cell, place)
    frame = report.finish(name, experiment, done, place) if done else None
    failures.conclude(failed, len(cells), frame)
    return frame
