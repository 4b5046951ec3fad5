"""What `diff` found, for people."""

from typing import Any

from kvlab.experiment.config import Margins
from kvlab.experiment.sweep.diff import MARGINS

FORMATS = {"resident_bytes": "{:,.0f}", "tokens_per_s": "{:.1f}", "ms_per_token_p50": "{:.2f}"}
SHOWN = 12  # characters of a digest


def show(made: dict[str, Any], margins: Margins = MARGINS) -> None:
    """Cells, config, digests, then a line per figure of each policy."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 200, highlight=False, markup=False)
    for side in ("first", "second"):
        for name in made[f"only_{side}"]:
            console.print(f"only in the {side}: {name}", soft_wrap=True)
    for name, changed in made["config"].items():
        for key, (one, two) in changed.items():
            console.print(f"{name}: {key}: {one!r} → {two!r}", soft_wrap=True)
    for key, values in made["made_with"].items():
        for one, two in values:
            console.print(f"made with other {key}: {str(one)[:SHOWN]} → {str(two)[:SHOWN]}", soft_wrap=True)
    if not any(made[key] for key in ("only_first", "only_second", "config", "made_with")):
        console.print("the same cells, configs, code, weights, texts and versions")
    if made["policies"]:
        console.print(table(made["policies"], margins))


def table(policies: dict[str, Any], margins: Margins):
    """A row per policy and figure; for a console without markup, since labels and intervals have brackets."""
    from rich.table import Table

    drawn = Table(
        title="first against second",
        caption=f"pass: the second loses less than {margins.accuracy_margin:g} of accuracy, {margins.nll_margin:g} nats a token "
        f"(one-sided {margins.alpha:g}), on the samples that both have",
    )
    for i, column in enumerate(("policy", "figure", "first", "second", "second − first, on the samples of both")):
        drawn.add_column(column, justify="left" if i in (0, 1, 4) else "right")
    for label, each in policies.items():
        for name, values in each["figures"].items():
            shown = ("–" if v is None else FORMATS.get(name, "{:.4f}").format(v) for v in values)
            drawn.add_row(label, name, *shown, _verdict(each, name))
            label = ""
        drawn.add_row(label, "samples of both", "", "", f"{each['samples']}, outcome identical in {each['identical']}")
    return drawn


def _verdict(each: dict[str, Any], figure: str) -> str:
    found = each.get({"accuracy": "accuracy", "delta_nll": "nll"}.get(figure, ""))
    if found is None:
        return ""
    low, high = (f"{sign}∞" if found[end] is None else f"{found[end]:+.4f}" for end, sign in (("low", "-"), ("high", "+")))
    return f"{found['difference']:+.4f} [{low}, {high}] {found['outcome']}"
