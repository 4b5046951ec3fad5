"""Tests by this machine's clock: programs run in turn, and ratios of the rounds with an interval around their median."""

import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from kvlab.claims import base
from kvlab.claims.base import OPEN, Finding
from kvlab.claims.samples import Table
from kvlab.evaluate.statistics import Estimate
from kvlab.locality.copies import interleaved


class Program(NamedTuple):
    """Something to run: what it is called, a function that runs it once and returns seconds, and the bytes it is asked for.

    `useful` is None where that depends on the numbers, as with a selection.
    """

    label: str
    once: Callable[[], float]
    useful: int | None


class Timed(base.Test, frozen=True, kw_only=True):
    """By which factor one program is faster than another, `more_than` how much: true of this machine.

    A round runs every program once. Rounds count as independent samples, and the interval around the median of their ratios is
    by order statistics, which asks nothing of how times are spread.

    Attributes:
      repeats: rounds.
    """

    repeats: int = 31

    def programs(self) -> list[tuple[Program, Program]]:
        """Pairs (slower, faster) as the claim has it; of several, a round's ratio is their geometric mean."""
        raise NotImplementedError

    def beside(self) -> list[Program]:
        """Programs that are only shown."""
        return []

    def said(self) -> str:
        """Words before the figures."""
        return ""

    def find(self, table: Table, alpha: float) -> Finding:
        pairs, others = self.programs(), self.beside()
        every = [program for pair in pairs for program in pair] + others
        seconds = interleaved([program.once for program in every], self.repeats)
        ratios = seconds[:, 0 : 2 * len(pairs) : 2] / seconds[:, 1 : 2 * len(pairs) : 2]
        estimate = median(np.exp(np.log(ratios).mean(1)), alpha)
        result = base.decide(estimate, self.more_than)
        text = f"{self.said()}{estimate.value:.3g} times as fast [{estimate.low:.3g}, {estimate.high:.3g}]"
        text += f" in {self.repeats} rounds on {machine()}"
        text += "; these rounds leave it open" if result == OPEN else ""
        rows = [_row(program, taken) for program, taken in zip(every, np.median(seconds, 0))]
        labels = [f"{slow.label}\n→ {fast.label}" for slow, fast in pairs]
        series = {"labels": labels, "value": np.median(ratios, 0).tolist()}
        return Finding(
            "timed", self.name, self.decides, result, text, estimate.value, estimate.low, estimate.high, self.more_than, "times",
            self.repeats, self.repeats, series=series, table=rows,
        )  # fmt: skip

    def draw(self, axis, found: Finding) -> None:
        labels, value = found.series["labels"], found.series["value"]
        several = len(value) > 1
        if several:
            axis.plot(value, range(1, len(value) + 1), "o", color="0.6")
        ends = base.whiskers(found.value, found.low, found.high)
        axis.errorbar([found.value], [0], xerr=ends, fmt="o", color="tab:blue", capsize=4)
        rows = ["all", *labels] if several else labels
        axis.set_yticks(range(len(rows)), rows, fontsize="small")
        axis.set_ylim(-0.6, len(rows) - 0.4)
        axis.axvline(found.more_than, color="tab:red", label="more than this")
        axis.axvline(1, color="0.8", lw=1, zorder=0)
        axis.set_xlabel("times as fast")
        axis.legend(frameon=False, fontsize="small")


class TwoLayouts(Timed, frozen=True, kw_only=True):
    """By which factor something is faster over `layout` than over `against`.

    Attributes:
      others: layouts whose times are printed too.
    """

    layout: str
    against: str
    others: list[str] = []

    def over(self, layout: str) -> Program:
        """What is timed over a layout."""
        raise NotImplementedError

    def programs(self) -> list[tuple[Program, Program]]:
        return [(self.over(self.against), self.over(self.layout))]

    def beside(self) -> list[Program]:
        return [self.over(name) for name in self.others]


def machine() -> str:
    """What the clock is of: cores that this process may use, and the processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} × {name}"


def median(values, alpha: float) -> Estimate:
    """The median with its interval at 1 − 2·alpha by order statistics; infinite where there are too few values for one."""
    values = np.asarray(values, float)
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(1 - 2 * alpha)
    low, high = (-math.inf if math.isnan(low) else float(low)), (math.inf if math.isnan(high) else float(high))
    return Estimate(float(np.median(values)), low, high, len(values), len(values), False, float(values.var()))


def _row(program: Program, seconds: float) -> dict[str, str]:
    speed = "" if program.useful is None else f"{program.useful / seconds / 1e9:.3g}"
    return {"program": program.label, "median ms": f"{1e3 * seconds:.3g}", "useful GB/s": speed}
