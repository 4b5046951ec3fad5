"""Does each retention keep the tokens that kvpress's counterpart keeps, on the same prompts and weights (extra "peers")?

A difference counts as explained where it is a tie, tokens whose scores differ by at most 1e-5 of the score at the cut; where a
rule in which the two differ on purpose, computed here, gives exactly what both sides kept; or where it goes away once kvlab gets
the keys and values of transformers' pass, which rounds otherwise. Of a model with local layers the others are compared: what a
local layer keeps is its window, whatever the policy. Left out: `random`, because the two draw other numbers.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvlab import models, parts
from kvlab.bench import kvzip, presses
from kvlab.bench.reasons import SINKS, Case, Pair, chunks, constant, halves, replays, tie
from kvlab.codec import Raw
from kvlab.core import kept
from kvlab.decode import Engine, budgets, needs, per_layer
from kvlab.experiment.store import write_text
from kvlab.layout import Contiguous
from kvlab.models import Model
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import RETENTIONS
from kvlab.selection import ReadAll
from kvlab.tasks import text

RATIOS = (0.25, 0.5, 0.75)
ROUNDING = 1e-4  # of the largest number: what float32 leaves of it after some dozens of layers
TINY = {"tiny-llama": "Llama", "tiny-qwen2": "Qwen2", "tiny-gemma3": "Gemma3"}
EAGER = ("observed_attention", "h2o")  # presses that are given the attention of the pass


def retention(method: str, ratio: float, length: int, file: str) -> dict[str, Any]:
    """The config table of a method, token by token; "outer(inner)" is a method around another."""
    outer, _, inner = method.rstrip(")").partition("(")
    if inner:
        return {"name": outer, "inner": retention(inner, ratio, length, file)}
    special: dict[str, dict[str, Any]] = {
        "window": {"size": kept(length, ratio) - SINKS, "sinks": SINKS},
        "q_filters": {"ratio": ratio, "unit": 1, "filters": file},
        "h2o": {"ratio": ratio, "unit": 1, "recent": 0.0},
    }
    return {"name": outer, **special.get(outer, {"ratio": ratio, "unit": 1})}


@functools.partial(jax.jit, static_argnums=2)
def _positions(policy: Policy, record, budget: int):
    return policy.fill(record, budget).pos


def whole(config: ModelConfig) -> list[int]:
    """The layers without a local window, which are those that get compared."""
    return [layer for layer in range(config.layers) if config.window(layer) is None]


def ours(method: str, ratio: float, case: Case) -> np.ndarray:
    """The mask of what kvlab's cache holds after filling it from the prompt."""
    length, config = len(case.theirs.ids), case.model.config
    layers = whole(config)
    part = parts.build(retention(method, ratio, length, case.file), RETENTIONS, "retention")
    policies = per_layer(Policy(part, Raw(), Contiguous(), ReadAll()), config)
    chosen = [policies[layer] for layer in layers]
    mask = np.zeros((len(layers), config.kv_heads, length), bool)
    for layer, (policy, budget) in enumerate(zip(chosen, budgets(chosen, length, 0))):
        pos = np.asarray(_positions(policy, case.ours.records[layer], budget))[0]
        for head, held in enumerate(pos.reshape(len(pos), -1)):
            mask[layer, head, held[held >= 0]] = True
    return mask


Rule = Callable[[Pair], str]
METHODS: dict[str, Rule | None] = {
    "window": None, "key_norm": None, "keydiff": None, "lagkv": lambda pair: constant(pair) or rounding("lagkv", pair),
    "chunkkv(key_norm)": chunks, "q_filters": None, "expected_attention": None, "criticalkv(key_norm)": halves,
    "criticalkv(snapkv)": None, "snapkv": None, "tova": None, "observed_attention": None, "h2o": None, "kvzip": replays,
    "pyramidkv": None,
}  # fmt: skip


def rounding(method: str, pair: Pair) -> str:
    """On the very keys and values that kvpress was given, kvlab keeps the same, or a tie; and they differ by rounding alone."""
    case, most, records = pair.case, 0.0, []
    for record, (_, _, key, value, _, _) in zip(case.ours.records, case.theirs.layers):
        made = {}
        for name, theirs in (("key_BHTD", key.numpy()), ("value_BHTD", value.numpy())):
            mine = getattr(record, name)
            most = max(most, float(np.abs(theirs - mine[:, :, : pair.length]).max() / np.abs(theirs).max()))
            made[name] = mine.at[:, :, : pair.length].set(theirs)
        records.append(dataclasses.replace(record, **made))
    again = ours(method, pair.ratio, case._replace(ours=case.ours._replace(records=tuple(records))))
    if most > ROUNDING or not ((again == pair.theirs).all() or tie(again, pair.theirs, pair.scores)):
        return ""
    heads = (pair.ours != pair.theirs).any(-1).sum()
    return f"rounding in {heads} heads: keys and values differ by {most:.0e} of the largest; on kvpress's, kvlab keeps the same"


def known(method: str) -> bool:
    return set(method.rstrip(")").split("(")) <= set(RETENTIONS)


def fits(method: str, config: ModelConfig) -> bool:
    """kvpress's KVzip shares one budget among all layers, so it refuses models that have local ones."""
    return method != "kvzip" or len(whole(config)) == config.layers


def compare(method: str, ratio: float, case: Case) -> dict[str, Any]:
    """One row of the table; `reason` is empty where the two agree, or where nothing explains how they differ."""
    press, rule = presses.press(method, ratio, case.filters), METHODS[method]
    if method == "kvzip":
        theirs, scores = kvzip.replayed(press, case.theirs, case.model.tokenizer)
    else:
        theirs, scores = presses.kept(press, case.theirs, method in EAGER)
    pair = Pair(case, ratio, ours(method, ratio, case), theirs, scores)
    agree = bool((pair.ours == pair.theirs).all())
    reason = "" if agree else tie(pair.ours, pair.theirs, pair.scores) or (rule(pair) if rule else rounding(method, pair))
    row = {"method": method, "model": case.name, "ratio": ratio, "agree": agree, "reason": reason}
    differ = (pair.ours != pair.theirs).any(-1)
    print(f"{case.name:14} {method:22} {ratio:.2f}  {'agree' if agree else reason or f'UNEXPLAINED, {differ.sum()} heads'}")
    return row


def prepare(name: str, folder: str, ids: Callable[[Model], list[int]], methods: list[str], file: Path) -> Case:
    """Both sides after the prompt. `file` is where the filters go."""
    from safetensors.numpy import save_file

    model = models.load(folder)
    config, prompt, layers = model.config, ids(model), whole(model.config)
    filters = np.random.default_rng(0).standard_normal((config.layers, config.kv_heads, config.head_dim)).astype(np.float32)
    save_file({"filters": filters}, file)
    retentions = [
        parts.build(retention(m, 0.5, len(prompt), str(file)), RETENTIONS, "retention") for m in methods if fits(m, config)
    ]
    asked = needs([Policy(x, Raw(), Contiguous(), ReadAll()) for x in retentions])
    made = Engine(model).prefill([prompt], asked)
    made = made._replace(records=tuple(made.records[layer] for layer in layers))
    theirs = presses.prefill(folder, prompt, "eager" if set(methods) & set(EAGER) else "sdpa")
    return Case(name, model, made, theirs, filters[layers], str(file))


def licences(model: Model) -> list[int]:
    """600 tokens of text, as the model wants a prompt to begin."""
    begin, stream = model.tokenizer.begin, text.token_stream("licences", model.tokenizer, np.random.default_rng(0), 600)
    return [*begin, *stream][:600]


def cases(names: list[str], methods: list[str]) -> Iterator[Case]:
    """One after another, so that one model is held at a time."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            file = Path(scratch) / f"{name}.safetensors"
            if name in TINY:
                folder = Path(scratch) / name
                presses.tiny(TINY[name], folder)
                random = lambda model: np.random.default_rng(0).integers(0, 256, 300).tolist()
                yield prepare(name, str(folder), random, methods, file)
            else:
                yield prepare(name, name, licences, methods, file)


def main(names: list[str], methods: list[str], table: Path | None) -> dict[str, Any]:
    """Rows by model, method and ratio, and how many differences nothing explains."""
    chosen = [m for m in methods or METHODS if known(m)]
    rows = [
        compare(method, ratio, case)
        for case in cases(names, chosen)
        for method in chosen
        for ratio in RATIOS
        if fits(method, case.model.config)
    ]
    unexplained = sum(not (row["agree"] or row["reason"]) for row in rows)
    print(f"{len(rows)} comparisons, {sum(row['agree'] for row in rows)} agree, {unexplained} unexplained")
    if table is not None:
        write_text(table, as_markdown(rows))
    return {"rows": rows, "unexplained": unexplained}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """A row per method: how often the two agree, and why not where they do not."""
    lines = ["| method | agrees | differs because |", "|---|---|---|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        why = dict.fromkeys(row["reason"] or "not explained" for row in own if not row["agree"])
        lines.append(f"| {method} | {sum(row['agree'] for row in own)} of {len(own)} | {'; '.join(why)} |")
    return "\n".join([*lines, ""])
