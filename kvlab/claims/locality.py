"""How many lines of memory two layouts fetch for the same reads: a simulation, no model runs and no clock."""

import functools

from kvlab.claims import base
from kvlab.claims.base import FAILS, HOLDS, Finding
from kvlab.claims.samples import Table
from kvlab.locality.lru import Cache, Figures, Machine, simulate
from kvlab.locality.reads import Reads

LOADS = (2, 4, 8, 16, 32, 64)  # bytes


class Simulated(base.Test, frozen=True, kw_only=True):
    """A test on simulated caches, which starts them cold.

    Attributes:
      first, second, pages: [bytes, ways, bytes of a line] of both caches and the TLB; by default those of a Zen 3 core.
    """

    first: tuple[int, int, int] = (32 << 10, 8, 64)
    second: tuple[int, int, int] = (512 << 10, 8, 64)
    pages: tuple[int, int, int] = (64 << 12, 64, 1 << 12)

    @property
    def bounds(self) -> int:
        return 0

    @property
    def machine(self) -> Machine:
        return Machine(Cache(*self.first), Cache(*self.second), Cache(*self.pages))


class Locality(Simulated, frozen=True, kw_only=True):
    """By which factor `layout` misses the first cache less often than `against`, reading the same numbers, `more_than` how much.

    Attributes:
      reads: what is read and in which order, see `kvlab.locality.reads.Reads`.
      beside: layouts whose figures are shown too.
    """

    layout: str
    against: str
    beside: list[str] = []
    reads: Reads = Reads()

    def find(self, table: Table, alpha: float) -> Finding:
        names = [self.against, self.layout, *self.beside]
        seen = [figures(self.reads, name, self.machine) for name in names]
        theirs, own = seen[:2]
        ratio = theirs.first / own.first
        text = (
            f"{self.reads.words}: {self.against} misses the first cache {theirs.first:,} times and {self.layout} {own.first:,} "
            f"times, {ratio:.3g} to 1; bytes fetched for each useful one {theirs.moved:.2f} and {own.moved:.2f}, TLB misses "
            f"{theirs.pages:,} and {own.pages:,}"
        )
        series = {"labels": names, "value": [found.moved for found in seen]}
        return Finding(
            "locality", self.name, self.decides, HOLDS if ratio > self.more_than else FAILS, text, ratio, ratio, ratio,
            self.more_than, "times", series=series, table=[_row(name, found) for name, found in zip(names, seen)],
        )  # fmt: skip

    def draw(self, axis, found: Finding) -> None:
        labels, value = found.series["labels"], found.series["value"]
        axis.barh(range(len(labels)), value, color=["0.4", "tab:blue", *["0.8"] * (len(labels) - 2)])
        axis.set_yticks(range(len(labels)), labels, fontsize="small")
        if found.more_than > 0:
            axis.axvline(value[0] / found.more_than, color="tab:red", label=f"what {self.layout} was said to fetch")
            axis.legend(frameon=False, fontsize="small")
        axis.set_xlabel("bytes fetched for each useful one")


@functools.lru_cache(maxsize=1024)
def figures(reads: Reads, layout: str, machine: Machine) -> Figures:
    """What the reads do in a layout; kept, because several tests ask for the same."""
    return simulate(reads.addresses(layout), reads.useful, LOADS, machine)


def _row(name: str, found: Figures) -> dict[str, str]:
    """Miss rates by access as wide as a load may be, and what does not depend on that."""
    return {
        "layout": name,
        f"misses of the first cache, %, with loads of {', '.join(map(str, LOADS))} bytes": " / ".join(
            f"{100 * found.rate(load):.1f}" for load in LOADS
        ),
        "and of the second": " / ".join(f"{100 * found.second / found.loads[load]:.1f}" for load in LOADS),
        "bytes fetched for each useful one": f"{found.moved:.2f}",
        "from beyond the second cache": f"{found.beyond:.2f}",
        "lines": f"{found.lines:,}",
        "TLB misses": f"{found.pages:,}",
    }
