"""A plan as a table that explains every figure, and as one JSON object."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from kvlab import memory
from kvlab.core import PAGE
from kvlab.plan import LEVELS, SLACK, Layer, Plan
from kvlab.plan.inputs import INNER

ESTIMATE_NOTE = "workspace is an estimate; --exact takes it from XLA"


def groups(plan: Plan) -> list[tuple[str, int, Layer]]:
    """Neighbouring layers of equal figures: "0–29", how many, and one of them."""
    figures = lambda layer: dataclasses.replace(layer, policy=jax.tree.structure(layer.policy))
    alike = lambda a, b: figures(a) == figures(b)
    runs: list[list[int]] = []
    for i, layer in enumerate(plan.layers):
        if runs and alike(plan.layers[runs[-1][0]], layer):
            runs[-1].append(i)
        else:
            runs.append([i])
    name = lambda run: f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0])
    return [(name(run), len(run), plan.layers[run[0]]) for run in runs]


def explain(plan: Plan) -> list[tuple[str, int, str]]:
    """Every figure: its name, its bytes, and the formula with the numbers put in."""
    space = plan.workspace
    both = lambda f: " + ".join(f(count, layer) for _, count, layer in groups(plan))
    rows = [
        ("weights", plan.weights, _weights(plan)),
        ("cache", plan.total("cache"), both(lambda n, x: _codes(plan, n, x))),
        ("metadata", plan.total("metadata"), both(lambda n, x: _metadata(plan, n, x))),
        ("index", plan.total("index"), "arrays that the selection keeps beside the cache"),
        ("state", plan.total("state"), "arrays of the retention's own, and what the layout holds beside codes"),
        ("resident", plan.total("resident"), _resident(plan)),
        ("workspace", space.bytes, f"records {space.records:,} + the larger of prefill and decode ({space.source})"),
        ("  records", space.records, space.how["records"]),
        ("  prefill", space.prefill, space.how["prefill"]),
        ("  decode", space.decode, space.how["decode"]),
        ("needed", plan.need, "weights + resident + workspace"),
    ]
    if plan.memory is not None and plan.slack is not None:
        rows.append(("slack", plan.slack, f"{100 // SLACK} % of {plan.memory:,} B, kept free"))
        left = plan.memory - plan.slack - plan.need
        rows.append(("left", left, "memory − slack − needed: it " + ("fits" if plan.fits else "does not fit")))
    return rows


def _weights(plan: Plan) -> str:
    c = plan.dims.config
    if c is None:
        return f"unknown: give {', '.join(INNER)}"
    inner = f"({c.heads} + 2 × {c.kv_heads}) × {c.head_dim} + {c.heads} × {c.head_dim} + 3 × {c.ffn} + 2"
    return f"({c.layers} layers × {c.hidden} × ({inner}) + {c.hidden} × ({c.vocab:,} + 1)) × 4 B"


def _codes(plan: Plan, count: int, layer: Layer) -> str:
    keys, values = (x.page_bytes(plan.dims.head_dim) for x in (layer.policy.codec.keys, layer.policy.codec.values))
    return f"{count} layers × {_rows(plan)} × {_pages(layer):,} pages × (keys {keys:,} + values {values:,} B)"


def _metadata(plan: Plan, count: int, layer: Layer) -> str:
    waits = layer.policy.waits
    tail = f" + tail 2 × {waits * PAGE} × {plan.dims.head_dim} × 4" if layer.policy.tailed else ""
    return f"{count} layers × {_rows(plan)} × ({_pages(layer):,} pages × {PAGE} positions × 4 + {3 + waits} counters × 4{tail} B)"


def _rows(plan: Plan) -> str:
    return f"{plan.batch} rows × {plan.dims.kv_heads} heads"


def _pages(layer: Layer) -> int:
    return -(-layer.budget // PAGE)


def _resident(plan: Plan) -> str:
    """What the shapes add up to, beside the closed formula."""
    d = plan.dims
    closed = sum(memory.expected(x.policy, plan.batch, d.kv_heads, d.head_dim, x.budget) for x in plan.layers)
    own = plan.total("resident") - closed
    return "cache + metadata + index + state; the closed formula gives " + (
        "the same" if not own else f"{closed:,}, parts' own arrays {own:,}"
    )


def notes(plan: Plan) -> list[str]:
    found = []
    if plan.dims.config is None:
        found.append(f"weights and temporaries are unknown and count as 0: give {', '.join(INNER)} in --dims, or --model")
    elif plan.workspace.source == "estimate":
        found.append(ESTIMATE_NOTE)
    if plan.memory is None:
        found.append("give --memory 24GB to learn whether it fits, the largest batch and the longest context")
    return found


def as_json(plan: Plan, label: str) -> dict[str, Any]:
    """Bytes are of the whole batch; a figure that was not asked for is null."""
    layer = lambda i, x: (
        {"layer": i, "tokens": x.budget, "weights_bytes": x.weights, "resident_bytes": x.resident}
        | {f"{level}_bytes": getattr(x, level) for level in LEVELS}
    )
    return {
        "policy": label,
        "batch": plan.batch,
        "length": plan.length,
        "new_tokens": plan.new_tokens,
        "weights_bytes": plan.weights,
        **{f"{level}_bytes": plan.total(level) for level in (*LEVELS, "resident")},
        "workspace_bytes": plan.workspace.bytes,
        "workspace_source": plan.workspace.source,
        "needed_bytes": plan.need,
        "memory_bytes": plan.memory,
        "slack_bytes": plan.slack,
        "fits": plan.fits,
        "largest_batch": plan.largest_batch,
        "longest_context": plan.longest_context,
        "layers": [layer(i, x) for i, x in enumerate(plan.layers)],
        "formulas": {name.strip(): how for name, _, how in explain(plan)},
        "notes": notes(plan),
    }


def human(number: int) -> str:
    """Bytes with three or four digits: "206.2 GB"."""
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def show(plan: Plan, label: str) -> None:
    """Prints the explanation, the layers and the answers."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 180)
    for table in _tables(plan, label):
        console.print(table)
    if plan.memory is not None:
        console.print(
            f"{human(plan.memory)}, {100 // SLACK} % kept free: {plan.batch} × {plan.length:,} tokens "
            f"{'fits' if plan.fits else 'does not fit'}; largest batch at this length {plan.largest_batch:,}; "
            f"longest context at this batch {plan.longest_context:,}",
            soft_wrap=True,
        )
    for note in notes(plan):
        console.print(f"note: {note}", soft_wrap=True)


def _tables(plan: Plan, label: str) -> Iterator[Any]:
    from rich.table import Table

    size = f"{plan.batch} × {plan.length:,} tokens" + (f" and {plan.new_tokens:,} new ones" if plan.new_tokens else "")
    table = Table("level", title=f"{label}: {size}", caption="bytes of the whole batch")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("how")
    for name, number, how in explain(plan):
        table.add_row(name, f"{number:,}", human(number), how)
    yield table
    table = Table("layers", caption="bytes of one layer")
    for name in ("tokens", "weights", *LEVELS):
        table.add_column(name, justify="right")
    for name, _, layer in groups(plan):
        table.add_row(name, *(f"{x:,}" for x in (layer.budget, layer.weights, *(getattr(layer, level) for level in LEVELS))))
    yield table
