"""The order of things: the plan, a small check of every case, then lengths and batches one after another."""

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import kvlab
from kvlab.bench.kernels import cases, figures, peers, picture
from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.group import Group
from kvlab.bench.kernels.setting import EXACT, SETTINGS, Setting, device, order
from kvlab.errors import ConfigError, nearest

NOTE = {
    "gpu": "medians of interleaved rounds; useful bytes are keys and values, scales and tables, not positions; token_major is a "
    "baseline: kvlab's kernel over another address map",
    "cpu": "step by step on the CPU: this says right or wrong, and nothing of speed or bandwidth",
}


def main(device_name: str, limit: float, dtype: Sequence[str] = (), out: Path | None = None) -> dict:
    """All figures, which `out` has after every length and batch; `wrong` names the case that was, after which nothing is run.

    Errors: ConfigError for a device or a kind of numbers that there is not.
    """
    begin, dtypes = time.perf_counter(), tuple(dtype) or EXACT
    if unknown := [x for x in dtypes if x not in EXACT]:
        raise ConfigError(f"--dtype {unknown[0]}; {nearest(unknown[0], EXACT)}")
    here = device(device_name)
    setting = SETTINGS[device_name]
    plan(setting, limit, dtypes)
    rows: list[dict] = []
    seconds: list[dict] = []
    passed = lambda: time.perf_counter() - begin
    with jax.default_device(here):
        for sizes in order(setting, dtypes):
            group = Group(sizes, lambda: passed() > limit)
            wrong = group.run()
            more = figures.rows(group)
            rows, seconds = rows + more, [*seconds, group.seconds]
            show(more)
            result = {
                "device": device_name,
                "note": NOTE[device_name],
                "environment": environment(here),
                **figures.roofs(seconds),
                "cases": rows,
                **figures.summary(rows),
                "wrong": None if wrong is None else str(wrong),
                "stopped_by_time_limit": passed() > limit,
                "seconds": passed(),
            }
            if out is not None:
                write(result, out)
            if wrong:
                break
    conclude(result)
    return result


def plan(setting: Setting, limit: float, dtypes: tuple[str, ...]) -> None:
    """Says what will be compiled and run, and about how long it takes."""
    programs = timed = 0
    for sizes, length, batch, some, _ in order(setting, dtypes):
        own, theirs = cases.cases(length, batch, some), peers.cases(length, batch)
        programs += sum(1 + len(same) for same in (*own, *theirs)) + 3
        timed += sizes.rounds * sum(map(len, (*own, *theirs)))
    seconds = programs * (2 / setting.workers + 0.3) + timed * 0.02
    about = f"{timed:,} timed calls: about {seconds:.0f} s; limit {limit:.0f} s"
    print(f"{programs} programs, {setting.workers} compiled at a time, {about}")


def environment(here: jax.Device) -> dict[str, Any]:
    from kvlab.experiment.environment import code_digest

    return {
        "device": here.device_kind,
        "platform": f"{platform.machine()} {here.platform} {here.client.platform_version}",
        "jax": jax.__version__,
        "kvlab": kvlab.__version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def show(rows: list[dict]) -> None:
    for row in rows:
        name = Case(*(row[key] for key in ("layout", "read", "dtype", "length", "batch")))
        parts = [f"{name!s:70}", "error –      " if row["error"] is None else f"error {row['error']:.1e}"]
        if row["ms"] is not None:
            parts.append(f"{row['ms']:9.3f} ms {row['gb_s']:6.0f} GB/s, {row['fraction_of_copy']:.2f} of the copy")
        print(*parts, row["reason"] or "")


def conclude(result: dict) -> None:
    print(result["note"])
    if result["copy_gb_s"]:
        print(f"copy {result['copy_gb_s']:.0f} GB/s, read {result['read_gb_s']:.0f} GB/s")
    for target in result["targets"]:
        told = {None: "not measured", True: f"met, {target['value']}", False: f"not met, {target['value']}"}[target["met"]]
        print(f"{told}: {target['words']}")
    if result["stopped_by_time_limit"]:
        print("the time limit was reached: cases that were not run say so")


def write(result: dict, out: Path) -> None:
    """`kernels.json`, `env.json`, and `kernels.png` where anything was timed."""
    import json

    from kvlab.experiment import store

    store.write_text(out / "kernels.json", json.dumps(result, indent=1))
    store.write_text(out / "env.json", json.dumps(result["environment"], indent=1))
    if any(row["gb_s"] is not None for row in result["cases"]):
        picture.draw(result, out / "kernels.png")
