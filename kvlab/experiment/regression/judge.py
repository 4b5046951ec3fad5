"""The rules by which a policy passes, fails or stays open, each a finding with its evidence.

    answers         no fewer right than the full cache's, by more than a margin, on the same questions
    likelihood      no higher, by more than a margin of nats a token, on the same documents
    worst case      the same of the weakest cell of length and depth, in contexts above half of the model's maximum
    continuations   no more repetition, where texts are drawn with the same random numbers
    noise floor     the full cache after a prefill in other blocks passes answers and likelihood itself

Answers and likelihood are both asked for, because either alone hides losses. Everything is paired and clustered as in
`kvlab.experiment.compare`.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvlab import parts
from kvlab.evaluate import statistics, verdict
from kvlab.evaluate.verdict import Verdict
from kvlab.experiment import compare, config
from kvlab.experiment.compare import Samples
from kvlab.tasks import TASKS

PASS, FAIL, OPEN = "pass", "fail", "underpowered"
ORDER = (FAIL, OPEN, PASS)  # the first of these that occurs is the outcome of several findings
DEPTHS = 4  # equal parts of a context


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one rule says of one policy: the outcome, a sentence for people, and the figures behind it."""

    rule: str
    policy: str
    outcome: str
    text: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


def outcome(findings: Iterable[Finding]) -> str:
    """Of all findings together: fail if any fails, else underpowered if any is, else pass."""
    found = {finding.outcome for finding in findings}
    return next(each for each in ORDER if each in found)


def of_policy(
    policy: str, rows: Samples, reference: Samples, margins: config.Margins, rules: config.Rules, context: int
) -> list[Finding]:
    """The findings on one policy. `context` is the model's maximum of tokens."""
    made = [answers(policy, rows, reference, margins), likelihood(policy, rows, margins)]
    made += [worst(policy, rows, reference, margins, rules, context), continuations(policy, rows, margins, rules)]
    return [finding for finding in made if finding is not None]


def answers(policy: str, rows: Samples, reference: Samples, margins: config.Margins) -> Finding | None:
    found = compare.answers(rows, reference, margins.accuracy_margin, margins.alpha)
    return None if found is None else _finding("answers", policy, found, _points(found), "questions")


def likelihood(policy: str, rows: Samples, margins: config.Margins) -> Finding | None:
    found = compare.tokens(rows, margins.nll_margin, margins.alpha)
    if found is None:
        return None
    text = f"ΔNLL {found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}] nats a token, margin {found.margin:g}"
    return _finding("likelihood", policy, found, text, "tokens")


def worst(
    policy: str, rows: Samples, reference: Samples, margins: config.Margins, rules: config.Rules, context: int
) -> Finding | None:
    """The weakest cell of task, length and depth: of those with the worst verdict the one that loses most, so that no cell of few
    samples passes beside a larger one. The level is shared among the cells, since the worst of many is picked."""
    if not rules.long_contexts:
        return None
    cells = _cells(rows, context // 2)
    contexts = len(set(compare.clusters({key: row for cell in cells.values() for key, row in cell.items()}).values()))
    if contexts < rules.long_contexts:
        text = f"{contexts} contexts above {context // 2:,} tokens, half of the model's maximum; needs {rules.long_contexts}"
        return Finding("worst case", policy, OPEN, text, {"contexts": contexts})
    alpha = margins.alpha / len(cells)
    verdicts = {cell: compare.answers(own, reference, rules.worst_margin, alpha) for cell, own in cells.items()}
    weakness = lambda pair: (ORDER.index(pair[0].outcome), pair[0].difference)
    found, cell = min(((v, cell) for cell, v in verdicts.items() if v is not None), key=weakness)
    own, (name, length, depth) = cells[cell], cell
    share = statistics.proportion([row["correct"] for row in own.values()], list(compare.clusters(own).values()), margins.alpha)
    text = (
        f"{name} of {length:,} tokens, depth {depth / DEPTHS:g}–{(depth + 1) / DEPTHS:g}: {share.value:.3f} right "
        f"[{share.low:.3f}, {share.high:.3f}], {_points(found)}; the weakest of {len(cells)} cells"
    )
    return _finding("worst case", policy, found, text, "questions")


def _cells(rows: Samples, above: int) -> dict[tuple, Samples]:
    """Answers in contexts longer than `above` tokens, by task, length and depth."""
    made: dict[tuple, Samples] = {}
    tasks = {group: json.loads(group)[1] for group in {key[0] for key in rows}}
    lengths = {group: getattr(parts.build(table, TASKS, "task"), "length", 0) for group, table in tasks.items()}
    for key, row in rows.items():
        if "correct" in row and lengths[key[0]] > above:
            depth = min(int(row.get("depth", 0) * DEPTHS), DEPTHS - 1)
            made.setdefault((tasks[key[0]]["name"], lengths[key[0]], depth), {})[key] = row
    return made


def continuations(policy: str, rows: Samples, margins: config.Margins, rules: config.Rules) -> Finding | None:
    own = {key: row for key, row in rows.items() if "step_kl" in row}
    if not own:
        return None
    column = lambda name: [row[name] for row in own.values()]
    documents = [row.get("document", key) for key, row in own.items()]
    mine, theirs = column("repetition"), column("repetition_reference")
    found = verdict.continuous(mine, theirs, rules.repetition_margin, documents, margins.alpha)
    figures = {name: float(np.concatenate(column(name)).mean()) for name in ("step_kl", "step_top1")}
    figures |= {name: float(np.mean(column(name))) for name in ("agreed", "tokens", "tokens_reference")}
    text = (
        "a step's KL {step_kl:.4f}, same top-1 {step_top1:.3f}, the same text for {agreed:.2f} of it; {tokens:.0f} tokens "
        "against {tokens_reference:.0f}; repetition "
    ).format(**figures)
    text += f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}], margin {found.margin:g}"
    return _finding("continuations", policy, found, text, "texts", figures)


def noise(control: str, rows: Samples, reference: Samples, margins: config.Margins) -> Finding:
    """What the measurement itself does: nothing was changed but the order of sums, so this must pass."""
    made = [f for f in (answers(control, rows, reference, margins), likelihood(control, rows, margins)) if f is not None]
    return Finding("noise floor", control, outcome(made), "; ".join(f.text for f in made), {f.rule: f.figures for f in made})


def _points(found: Verdict) -> str:
    low, high = found.low * 100, found.high * 100
    return f"{found.difference * 100:+.1f} points [{low:+.1f}, {high:+.1f}], margin {found.margin * 100:g}"


def _finding(rule: str, policy: str, found: Verdict, text: str, unit: str, more: dict[str, Any] | None = None) -> Finding:
    if found.outcome == OPEN:
        needed = f"{found.items_needed:,.0f} {unit}" if math.isfinite(found.items_needed) else "more than one cluster"
        effect = found.minimum_detectable_effect
        points = unit == "questions"  # whose effects are shares, so none is above 1
        settled = "no margin" if effect >= (1 if points else math.inf) else f"a margin of {effect * (100 if points else 1):.3g}"
        text += f"; these {found.items:,} {unit} settle {settled}, this one takes {needed}"
    return Finding(rule, policy, found.outcome, text, {**dataclasses.asdict(found), **(more or {})})
