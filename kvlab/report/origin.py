"""Where a page's figures come from: the environment that they were made in, and what to type to make them again."""

import shlex
from pathlib import Path
from typing import Any

from kvlab.experiment import config, store
from kvlab.report.data import Results

AGAIN = "reproduced"  # the folder that the commands write to: where results lie already, nothing is computed


def environment(results: Results) -> dict[str, list[str]]:
    """What env.json of the cells says: every value that occurs, once; of the start the first and the last."""
    seen: dict[str, dict[str, None]] = {}
    for _, run in results.runs():
        for key, value in (store.read_json(run / "env.json") if (run / "env.json").exists() else {}).items():
            if value != "":
                seen.setdefault(key, {})[str(value)] = None
    made = {key: list(values) for key, values in seen.items()}
    if started := sorted(made.pop("started", [])):
        made["started"] = [started[0], started[-1]] if len(started) > 1 else started
    return made


def commands(results: Results) -> dict[str, Any]:
    """What to type for the whole (`None` for an older folder) and, by cell, for one of them alone."""
    origin = results.experiment.origin
    cells = [(cell, _command("run", run / "config.toml")) for cell, run in results.runs()]
    if origin is None:
        return {"whole": None, "stored": None, "cells": cells}
    stored = _command(origin.command, results.folder / store.EXPERIMENT, origin)
    whole = _command(origin.command, origin.source, origin) if origin.source else stored
    return {"whole": whole, "stored": stored if origin.source else None, "cells": cells}


def _command(command: str, file: str | Path, origin: config.Origin | None = None) -> str:
    how = [part for override in origin.overrides for part in ("--set", override)] if origin else []
    how += ["--smoke"] if origin and origin.smoke else []
    return shlex.join(["kvlab", command, str(file), *how, "--out", AGAIN])
