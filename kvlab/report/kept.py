"""Which tokens of a text are still there once the cache is filled, and where the answers stand in it.

Every token has the share of (layer, KV head) that hold it, as one of `LEVELS`: the first is nobody, the last everybody, those
between them are rounded, so that neither end is ever said of a token that some hold and some do not.
"""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvlab import results as frames
from kvlab.errors import KvlabError
from kvlab.experiment import config
from kvlab.report.data import Results, seed_words, task_words

LEVELS = string.digits + string.ascii_uppercase + string.ascii_lowercase
PROMPTS, TOKENS, POLICIES = 8, 4096, 40  # at most: texts, tokens of each, policies; a page has to stay small

Place = tuple[str, int, int]  # group of the cells, batch, prompt


def texts(results: Results) -> dict[str, Any]:
    """What the page embeds: `policies`, `levels` and `prompts`, some of every task; `note` where the words are missing."""
    policies = list(results.rows)[:POLICIES]
    strings, prompts, note = frames._Strings(), [], ""
    for place in _chosen(results, policies):
        try:
            prompts.append(_prompt(results, place, policies, strings))
        except KvlabError as error:
            note = f"The words cannot be shown: {error}"
            break
    return {"policies": policies, "levels": LEVELS, "prompts": prompts, "note": note}


def _chosen(results: Results, policies: list[str]) -> list[Place]:
    """The first prompts of each group of cells that has one of the policies, the groups in turn."""
    groups = {cell.group: results.folder / cell.run_id for cell in results.cells if cell.label in policies}
    queues = [_places(group, run) for group, run in groups.items()]
    chosen: list[Place] = []
    while queues and len(chosen) < PROMPTS:
        queue = queues.pop(0)
        if (place := next(queue, None)) is not None:
            chosen.append(place)
            queues.append(queue)
    return chosen


def _places(group: str, run: Path) -> Iterator[Place]:
    for path in sorted((run / "samples").glob("*.npz")):
        with np.load(path) as arrays:
            prompts = len(arrays["kept"])
        yield from ((group, int(path.stem), prompt) for prompt in range(prompts))


def _prompt(results: Results, place: Place, policies: list[str], strings) -> dict[str, Any]:
    """One text: its tokens, each policy's levels and mean share, and the places of the answers."""
    group, batch, prompt = place
    cells = {cell.label: cell for cell in reversed(results.cells) if cell.group == group and cell.label in policies}
    made: dict[str, Any] = {"shade": {}, "mean": {}}
    for label, cell in cells.items():
        path = results.folder / cell.run_id / "samples" / f"{batch:05d}.npz"
        if not path.exists():
            continue
        with np.load(path) as arrays:
            ids, rows = arrays[f"prompt_{prompt}"], arrays["rows"]
            share = shares(arrays["kept"][prompt], len(ids))
        made["shade"][policies.index(label)] = levels(share[:TOKENS])
        made["mean"][policies.index(label)] = round(float(share.mean()), 4)
    words = [str(word) for word in strings.of(_model(next(iter(cells.values()))), ids[:TOKENS])]
    evidence = _evidence(results, place, policies, np.flatnonzero(rows == prompt))
    # words of a vocabulary without spaces, such as tiny-recall's, would run together
    apart = not any(word[:1].isspace() or word[-1:].isspace() for word in words)
    return {**made, "title": _title(results, place), "tokens": words, "length": len(ids), "apart": apart, "evidence": evidence}


def _model(cell: config.Cell) -> str:
    return cell.model["name"]


def shares(kept: np.ndarray, length: int) -> np.ndarray:
    """Of each token `[length]` the share of (layer, KV head) that hold it; `kept` `[L, H, S]` are positions, −1 for none."""
    counts = np.bincount(kept[(kept >= 0) & (kept < length)], minlength=length)
    return counts / np.prod(kept.shape[:2])


def levels(share: np.ndarray) -> str:
    last = len(LEVELS) - 1
    inner = np.clip(np.rint(share * last), 1, last - 1)
    return "".join(LEVELS[int(i)] for i in np.where(share <= 0, 0, np.where(share >= 1, last, inner)))


def _evidence(results: Results, place: Place, policies: list[str], samples: np.ndarray) -> list[dict[str, Any]]:
    """Where each sample's answer stands, what was asked, and who was right; of rows that know their span."""
    found = []
    for sample in samples.tolist():
        key = (*place[:2], sample)
        rows = {i: results.rows[label][key] for i, label in enumerate(policies) if key in results.rows[label]}
        known = [row for row in rows.values() if row.get("span")]
        if known:
            right = {i: bool(row["correct"]) for i, row in rows.items() if "correct" in row}
            found.append({"span": known[0]["span"], "target": str(known[0].get("target", "")), "right": right})
    return found


def _title(results: Results, place: Place) -> str:
    group, batch, prompt = place
    cell = next(cell for cell in results.cells if cell.group == group)
    models = len({_model(cell) for cell in results.cells}) > 1
    before = f"{_model(cell)}: " if models else ""
    words = task_words(results.cells)[group] + seed_words(results.cells)[group]
    return f"{before}{words}, batch {batch}, text {prompt}"
