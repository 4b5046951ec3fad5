"""What a search found, for people and for programs: a table, a sentence, JSON."""

import dataclasses
import math
from typing import Any

from kvlab.evaluate.sequential import FAIL, FUTILE, OPEN, PASS, Seen
from kvlab.experiment import store
from kvlab.experiment.search.points import ANSWERS
from kvlab.experiment.search.search import Found, Visited

COLOURS = {PASS: "green", FAIL: "red", FUTILE: "yellow", OPEN: "yellow"}


def as_json(found: Found) -> dict[str, Any]:
    """Everything; what is infinite is null."""
    visited = [store.plain(dataclasses.asdict(each)) for each in _in_order(found)]
    return {
        "path": found.search.path,
        "values": found.search.values,
        "outcome": found.outcome,
        "value": found.search.values[found.passed] if found.passed >= 0 else None,
        "sentence": sentence(found),
        "margins": {name: getattr(found.margins, name) for name in found.margins.__struct_fields__},
        "programs": sum(each.programs for each in found.visited.values()),
        "batches_spent": sum(each.batches for each in found.visited.values()),
        "batches_of_all": found.batches * len(found.names),
        "visited": visited,
    }


def _in_order(found: Found) -> list[Visited]:
    """From the mildest to the most aggressive."""
    return [found.visited[index] for index in sorted(found.visited)]


# ------------------------------------------------------------------------------------------------------------ in words


def sentence(found: Found) -> str:
    """The answer, with what it rests on and what lies beyond it."""
    after = found.visited.get(found.passed + 1)
    if found.passed < 0:
        assert after is not None  # the mildest value is visited where none passes
        if after.state == FAIL:
            return f"None of these passes: {after.name}, the mildest, {_loses(after)}, where {_margin(found)} may be lost."
        return f"Nothing is settled: {after.name}, the mildest, may cost less than {_margin(found)} or more, {_shown(after)}."
    best = found.visited[found.passed]
    text = f"{best.name} is the most aggressive of these that costs less than {_margin(found)}, shown with {_evidence(best)}"
    if after is None:
        return f"{text}; it is the last of the values, so more may be possible."
    if after.state == FAIL:
        return f"{text}; {after.name} {_loses(after)}."
    failed = [each.name for each in _in_order(found) if each.state == FAIL]
    beyond = f", {failed[0]} fails, and between {best.name} and {failed[0]} nothing is settled" if failed else ""
    return f"{text}; {after.name} stays open, {_shown(after)}{beyond}."


def _margin(found: Found) -> str:
    kinds = found.visited[max(found.passed, 0)].seen
    units = {ANSWERS: _points(found.margins.accuracy_margin), "likelihood": f"{found.margins.nll_margin:g} nats a token"}
    return " and ".join(units[kind] for kind in kinds)


def _points(share: float) -> str:
    return f"{share * 100:.3g} point" + "s" * (round(share * 100, 6) != 1)


def _evidence(each: Visited) -> str:
    units = {ANSWERS: "questions in {} contexts", "likelihood": "tokens of {} documents"}
    return " and ".join(f"{seen.items:,} {units[kind].format(seen.clusters)}" for kind, seen in each.seen.items())


def _loses(each: Visited) -> str:
    """Of a point that fails."""
    kind, seen = next((kind, seen) for kind, seen in each.seen.items() if seen.state == FAIL)
    loss, low, high = losses(kind, seen)
    if kind == ANSWERS:
        return f"loses {loss:.1f} points [{low:.1f}, {high:.1f}]"
    return f"loses {loss:.3f} nats a token [{low:.3f}, {high:.3f}]"


def _shown(each: Visited) -> str:
    """Of a point that stays open: what was seen, and what would settle it."""
    kind, seen = next((kind, seen) for kind, seen in each.seen.items() if seen.state in (OPEN, FUTILE))
    unit = "questions" if kind == ANSWERS else "tokens"
    text = f"{figures(kind, seen)} with {seen.items:,} {unit}"
    if seen.state == FUTILE:
        return f"{text} (given up: the rest would hardly have made it pass)"
    if seen.needed > seen.items and math.isfinite(seen.needed):
        return f"{text} (about {seen.needed:,.0f} would settle it if nothing is lost)"
    return text


def figures(kind: str, seen: Seen) -> str:
    """The difference from the full cache and its interval."""
    if kind == ANSWERS:
        return f"{seen.difference * 100:+.1f} points [{seen.low * 100:+.1f}, {seen.high * 100:+.1f}]"
    return f"ΔNLL {seen.difference:+.4f} [{seen.low:+.4f}, {seen.high:+.4f}]"


def losses(kind: str, seen: Seen) -> tuple[float, float, float]:
    """The loss and its ends, in points or nats."""
    if kind == ANSWERS:
        return -seen.difference * 100, -seen.high * 100, -seen.low * 100
    return seen.difference, seen.low, seen.high


def show(found: Found) -> None:
    """Prints the table and the sentence."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    kinds = next(iter(found.visited.values())).seen
    table = Table(title=escape(f"{found.search.path}: {', '.join(map(_short, found.names))}"))
    for column in ("value", "state", "looks", "batches", "samples", *kinds):
        table.add_column(column, justify="left" if column in ("value", "state") else "right")
    for each in _in_order(found):
        counts = (f"{n:,}" for n in (each.looks, each.batches, each.samples))
        shown = (escape(figures(kind, each.seen[kind])) for kind in kinds)
        table.add_row(escape(each.name), f"[{COLOURS[each.state]}]{each.state}[/]", *counts, *shown)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    console.print(_caption(found), style="dim", highlight=False)
    console.print(sentence(found), style="bold", highlight=False, markup=False)
    for name in ("search.json", "search.png"):
        console.print(f"wrote {found.folder / name}", soft_wrap=True, markup=False)


def _short(name: str) -> str:
    return name.partition(" ")[2]


def _caption(found: Found) -> str:
    spent, programs = (sum(getattr(each, name) for each in found.visited.values()) for name in ("batches", "programs"))
    return (
        f"{spent:,} of {found.batches * len(found.names):,} batches spent; decode programs compiled: {programs}, the full cache "
        "needs its own;\nintervals hold over all looks, and if losses only grow along the values, one that loses the margin "
        f"or more is named\nwith a probability of {found.margins.alpha:g} at most"
    )
