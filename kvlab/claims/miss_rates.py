"""Can a pair of miss rates that somebody reports be reached at all, and by which reads? A simulation, no model runs."""

import dataclasses
import itertools
import math

import msgspec

from kvlab.claims.base import FAILS, HOLDS, Finding
from kvlab.claims.locality import LOADS, Simulated, figures
from kvlab.claims.samples import Table
from kvlab.locality.reads import Reads


@dataclasses.dataclass(frozen=True)
class Case:
    """Reads of a layout with a width of loads, and how often they miss the first cache."""

    reads: Reads
    layout: str
    load: int
    misses: int
    accesses: int

    @property
    def rate(self) -> float:
        return self.misses / self.accesses

    @property
    def walk(self) -> tuple[str, int]:
        return self.reads.walk, self.reads.block

    @property
    def question(self) -> tuple:
        """What two cases must share to be compared: everything but layout and walk."""
        return msgspec.structs.replace(self.reads, walk="stored", block=1), self.load

    @property
    def words(self) -> str:
        return f"{self.layout} {100 * self.rate:.1f} % ({self.reads.words}, loads of {self.load} bytes)"


class MissRates(Simulated, frozen=True, kw_only=True):
    """Whether some reads miss at `says[0]` in a plain layout and at `says[1]` in a tiled one, both walked alike.

    Searched are all of `reads` (their walk and block aside) × `walks` × layouts × widths of loads. What comes out where only the
    walks differ is told, and does not count: then it is the walk that was changed.

    Attributes:
      walks: [walk, tokens of a block], see `kvlab.locality.reads.Reads`; a block of 0 is all that is read.
      near: share by which a rate may be off.
    """

    says: tuple[float, float]
    plain: list[str]
    tiled: list[str]
    reads: list[Reads]
    walks: list[tuple[str, int]]
    near: float = 0.1

    def find(self, table: Table, alpha: float) -> Finding:
        plain, tiled = self._cases(self.plain), self._cases(self.tiled)
        pairs = [(a, b) for a, b in itertools.product(plain, tiled) if a.question == b.question]
        alike = [pair for pair in pairs if pair[0].walk == pair[1].walk]
        hits, others = self._hits(alike), self._hits([pair for pair in pairs if pair[0].walk != pair[1].walk])
        best = min(alike, key=self._distance)
        one, other = (f"{100 * rate:.1f} %" for rate in self.says)
        found = (
            f"{len(hits):,} of {len(alike):,} pairs that are walked alike"
            if hits
            else f"none of {len(alike):,} that are walked alike"
        )
        text = f"{one} in a plain layout and {other} in tiles, each within {self.near:.0%}: {found}"
        text += f", such as {_both(hits[0])}" if hits else f", the nearest {_both(best)}"
        text += f"; {len(others):,} of {len(pairs) - len(alike):,} pairs whose walks differ"
        text += f", such as {_both(others[0])}" if others else ""
        text += f"; {self._reached(plain, 0)}; {self._reached(tiled, 1)}; {streaming(plain)}"
        series = {"plain": [a.rate for a, _ in alike], "tiled": [b.rate for _, b in alike]}
        result = HOLDS if hits else FAILS
        count = float(len(hits))
        return Finding(
            "miss_rates", self.name, self.decides, result, text, count, count, count, 0.0, "pairs", series=series
        )  # fmt: skip

    def _cases(self, layouts: list[str]) -> list[Case]:
        of = lambda reads, walk, block: msgspec.structs.replace(reads, walk=walk, block=block or reads.count)
        asked = [of(reads, walk, block) for reads in self.reads for walk, block in self.walks]
        return [
            Case(reads, layout, load, found.first, found.loads[load])
            for reads, layout in itertools.product(asked, layouts)
            for found in [figures(reads, layout, self.machine)]
            for load in LOADS
            if load >= reads.element
        ]

    def _hits(self, pairs):
        return sorted((pair for pair in pairs if self._distance(pair) <= 1), key=self._distance)

    def _distance(self, pair) -> float:
        """Of the pair's rates from what is said, the farther one; 1 is as far as is near."""
        return max(abs(case.rate - said) / said for case, said in zip(pair, self.says)) / self.near

    def _reached(self, cases: list[Case], which: int) -> str:
        """In which walks and layouts a rate that is said comes out, if anywhere."""
        said = self.says[which]
        near = sorted((c for c in cases if abs(c.rate - said) <= self.near * said), key=lambda c: abs(c.rate - said))
        if not near:
            return f"{100 * said:.1f} % comes out in none of {len(cases):,} cases"
        return f"{100 * said:.1f} % comes out in {len(near)} of {len(cases):,} cases, nearest {near[0].words}"

    def draw(self, axis, found: Finding) -> None:
        axis.plot([100 * x for x in found.series["plain"]], [100 * x for x in found.series["tiled"]], "o", color="tab:blue", ms=3)
        axis.plot([100 * self.says[0]], [100 * self.says[1]], "x", color="tab:red", ms=10, label="what was said")
        axis.axline((1, 1), slope=1, color="0.8", lw=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("misses in a plain layout, %")
        axis.set_ylabel("in a tiled one, walked alike, %")
        axis.legend(frameon=False, fontsize="small")


def _both(pair: tuple[Case, Case]) -> str:
    """Two cases, and whether it is lines or accesses that differ between them."""
    plain, tiled = pair
    return (
        f"{plain.words} → {tiled.words}, where the tiles fetch {tiled.misses / plain.misses:.2f} times the lines with "
        f"{tiled.accesses / plain.accesses:.3g} times the accesses"
    )


def streaming(cases: list[Case]) -> str:
    """What the width of a load alone makes of one and the same stream of lines."""
    own = [c for c in cases if c.walk[0] == "stored" and c.layout == cases[0].layout and c.reads == cases[0].reads]
    if not own:
        return "nothing is read as stored"
    rates = ", ".join(f"{100 * c.rate:.1f} % with {c.load} bytes" for c in own)
    same = math.isclose(max(c.rate / c.load for c in own), min(c.rate / c.load for c in own), rel_tol=0.01)
    why = "load over line, so a rate alone says nothing" if same else "not load over line alone"
    return f"the same stream, read as stored, misses {rates}: {why}"
