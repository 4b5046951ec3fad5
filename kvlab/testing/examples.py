"""One small instance of every part that kvlab registers, and which of them refuse each other."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvlab import gates
from kvlab.codec import CODECS, KV, NF4, Hadamard, Int4, Int8, Outliers, PreRope, Raw
from kvlab.core import PAGE
from kvlab.errors import RefusedPolicy
from kvlab.layout import LAYOUTS, Contiguous
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.retention import RETENTIONS, DuoAttention, HeadBudgets, KeepAll, Protect, QFilters, SnapKV, Window
from kvlab.retention.head_budgets import KEPT
from kvlab.selection import SELECTIONS, ReadAll
from kvlab.selection.gated import Gated

SIZE = 192  # as much as KIVI's exact newest pages take
PLAIN: dict[str, Any] = {"retention": KeepAll(), "codec": Raw(), "layout": Contiguous(), "selection": ReadAll()}


def examples(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """By kind and registered name, parts for the first layer of a model of this shape; what comes from files is random."""
    made = {
        "retention": {name: _retention(name, cls, model) for name, cls in RETENTIONS.items()},
        "codec": {name: _codec(name, cls, model) for name, cls in CODECS.items()},
        "layout": {name: cls().at(0, model) for name, cls in LAYOUTS.items()},
        "selection": {name: _selection(name, cls, model) for name, cls in SELECTIONS.items()},
    }
    made["retention"]["snapkv, single tokens"] = SnapKV(size=SIZE, unit=1).at(0, model)
    made["codec"]["int8, scale by channel"] = Int8("channel")
    made["codec"]["int8, scale by tensor"] = Int8("tensor")
    return made


def _retention(name: str, cls: type, model: ModelConfig) -> Any:
    rng = np.random.default_rng(0)
    if name in ("keep_all", "window"):
        return KeepAll() if name == "keep_all" else Window(70, 4)
    if name == "q_filters":
        return QFilters(size=SIZE, direction=jnp.asarray(rng.standard_normal((model.kv_heads, model.head_dim)), jnp.float32))
    if name == "duoattention":
        return DuoAttention(sinks=4, recent=70, full_H=jnp.arange(model.kv_heads) == 0)
    if name == "head_budgets":
        shares = np.sort(rng.random((len(KEPT), model.kv_heads)), 0)
        return HeadBudgets(SnapKV(size=SIZE), share_KH=jnp.asarray(shares, jnp.float32))
    if name in ("gated", "dms"):
        shape = gates.ImportanceConfig(model.layers, model.kv_heads, model.head_dim, model.hidden, width=0)
        return cls(size=SIZE, layer=gates.ImportanceGate(shape).layer(0))
    if "inner" in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        return (
            Protect(SnapKV(size=SIZE, window=16), 4, 16).at(0, model)
            if name == "protect"
            else cls(SnapKV(size=SIZE)).at(0, model)
        )
    return cls(size=SIZE).at(0, model)


def _codec(name: str, cls: type, model: ModelConfig) -> Any:
    inner = {"hadamard": Hadamard(Int4()), "outliers": Outliers(Int4()), "pre_rope": PreRope(Int8()), "nf4": NF4(group_size=32)}
    part = KV(Int8("channel"), Int8()) if name == "kv" else inner.get(name) or cls()
    return part.at(0, model)


def _selection(name: str, cls: type, model: ModelConfig) -> Any:
    if not issubclass(cls, Gated):
        return cls()
    gate = gates.make(cls.kind, gates.GateConfig(model.layers, model.kv_heads, model.head_dim, rank=8))
    return cls(gate="made", layer=gate.layer(0))


def refused(model: ModelConfig) -> list[tuple[str, str, str]]:
    """Pairs of parts that cannot work together, by name, and why; everything else in the policy is plain."""
    parts = examples(model)
    found: list[tuple[str, str, str]] = []
    for one, other in itertools.combinations(parts, 2):
        for (name, a), (with_, b) in itertools.product(parts[one].items(), parts[other].items()):
            try:
                Policy(**{**PLAIN, one: a, other: b})
            except RefusedPolicy as error:
                found.append((name, with_, str(error)))
    return found


def table(model: ModelConfig) -> str:
    """The refused pairs as Markdown, pairs with the same reason together."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for one, other, reason in refused(model):
        why = _reason(reason)
        reasons.setdefault(why, {}).setdefault(one, []).append(other)
    lines = ["| part | not with | because |", "|---|---|---|"]
    for why, pairs in reasons.items():
        by_others: dict[tuple[str, ...], list[str]] = {}
        for one, others in pairs.items():
            by_others.setdefault(tuple(others), []).append(one)
        quoted = lambda names: ", ".join(f"`{name}`" for name in names)
        lines += [f"| {quoted(ones)} | {quoted(others)} | {why} |" for others, ones in by_others.items()]
    return "\n".join(lines)


WHY = {
    "shares one scale": f"single tokens are replaced, but {PAGE} tokens share a scale",
    "newest exact": "single tokens are replaced, but whole pages of the newest tokens stay exact",
    "immutable": "single tokens are replaced, but pages never change once they are written",
    "passes slots": "slots are passed from layer to layer, but evictions differ by layer",
    "watches the attention": "the attention that every stored token gets is watched, but not all are read",
    "one pool": "heads have unequal budgets, so their pages lie in one pool that this selection cannot read from",
}


def _reason(message: str) -> str:
    return next(why for words, why in WHY.items() if words in message)
