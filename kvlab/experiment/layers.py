"""Layers with a policy of their own: what may stand under `layers` in a cell.

layers = [{ range = [0, 2], policy = { codec = "int8" } }]       other parts for some layers: a list of `LayerOverride`
layers = { range = [10, 28] }                                    where the cell's `policy.selection` applies: a `Choice`;
layers = { only = 3 }                                            all other layers read everything
layers = { from = "results/layer_sensitivity/ranking.json", keep_full = 8 }
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from kvlab import memory, parts
from kvlab.decode import per_layer
from kvlab.errors import ConfigError, nearest
from kvlab.models.config import ModelConfig
from kvlab.policy import Policy
from kvlab.selection.top import Top


class LayerOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another policy for layers first … last (both included); parts that it leaves out stay as in the cell's policy."""

    range: tuple[int, int]
    policy: dict[str, Any]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The layers in which the cell's selection applies; the others read everything. Exactly one of the first three is given.

    Layers with a local window keep it and read it all, whatever is chosen, and are not counted.

    Attributes:
      range: layers first … last, both included.
      only: one layer, or a list of them; an empty list is none.
      ranking: a file that an experiment over `layers.only` wrote, as `from`; the selection applies in all layers but the
        `keep_full` most sensitive ones. Layers that the file does not name count as insensitive.
      read: share of the dense bytes that all layers together read: the selection gets the `read` at which the chosen layers
        make up for the others, so that choices are compared at equal bytes.
      alike: the other layers have the selection as well, with nothing left out, so that all choices are one compiled program.
        They give the same outputs, but read their index and look tokens up one by one: not for bytes or times.
    """

    range: tuple[int, int] | None = None
    only: int | tuple[int, ...] | None = None
    ranking: str | None = msgspec.field(default=None, name="from")
    keep_full: int | None = None
    read: float | None = None
    alike: bool = False

    def __post_init__(self):
        given = [x for x in (self.range, self.only, self.ranking) if x is not None]
        if len(given) != 1:
            raise ConfigError('layers: exactly one of range = [first, last], only = 3 and from = "ranking.json" is to be given')
        if (self.ranking is None) != (self.keep_full is None):
            raise ConfigError('layers: from and keep_full go together; write { from = "ranking.json", keep_full = 8 }')
        if self.keep_full is not None and self.keep_full < 0:
            raise ConfigError(f"layers: keep_full = {self.keep_full}; allowed: 0 and more")
        if self.read is not None and not 0 < self.read <= 1:
            raise ConfigError(f"layers: read = {self.read}; allowed: above 0, up to 1")

    @property
    def nowhere(self) -> bool:
        return self.only == ()

    @property
    def single(self) -> int | None:
        """The layer, where there is one alone."""
        return self.only if isinstance(self.only, int) else self.only[0] if self.only and len(self.only) == 1 else None

    @property
    def label(self) -> str:
        read = "" if self.read is None else f", read {self.read:g}"
        if self.range is not None:
            return f"{self.range[0]}–{self.range[1]}{read}"
        if self.ranking is not None:
            return f"all but the {self.keep_full} most sensitive{read}"
        named = [self.only] if isinstance(self.only, int) else self.only or ()
        return f"only {', '.join(map(str, named)) or 'none'}{read}"

    def pick(self, model: ModelConfig) -> list[int]:
        """The chosen layers among those without a local window. Errors: ConfigError."""
        everywhere = [layer for layer in range(model.layers) if model.window(layer) is None]
        if self.ranking is not None:
            full = most_sensitive(self.ranking, self.keep_full or 0, model.layers)
            return [layer for layer in everywhere if layer not in full]
        if self.range is not None:
            first, last = checked(self.range, model.layers)
            return [layer for layer in everywhere if first <= layer <= last]
        named = (self.only,) if isinstance(self.only, int) else self.only or ()
        if wrong := [layer for layer in named if layer not in everywhere]:
            raise ConfigError(f"layers: only = {wrong}; allowed: layers without a local window, {_runs(everywhere)}")
        return sorted(set(named))

    def policies(self, table: dict[str, Any], model: ModelConfig) -> tuple[Policy, ...]:
        """A policy for each layer of the model. Errors: ConfigError, RefusedPolicy."""
        chosen, table = self.pick(model), self.with_read(table, model)
        sparse = per_layer(parts.policy(table), model)
        alike = self.alike and not self.nowhere
        full = tuple(map(reads_everything, sparse)) if alike else per_layer(parts.policy(without_selection(table)), model)
        return tuple(sparse[layer] if layer in chosen else full[layer] for layer in range(model.layers))

    def with_read(self, table: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
        """The cell's policy, its selection told what share to read."""
        if self.read is None or self.nowhere:
            return table
        everywhere = sum(model.window(layer) is None for layer in range(model.layers))
        share = memory.gated_share(self.read, everywhere, len(self.pick(model)))
        select = table["selection"]
        select = {"name": select} if isinstance(select, str) else {k: v for k, v in select.items() if k != "sparsity"}
        return {**table, "selection": {**select, "read": share}}

    def check(self, table: dict[str, Any]) -> None:
        """Errors: ConfigError where the cell's policy has nothing that could apply here and there."""
        if parts.policy(table).selection.reads_all:
            raise ConfigError(
                f"layers = {{ {self.label} }} says where policy.selection applies, but the policy reads everything; "
                'write policy = { selection = { name = "quest" } }, or leave layers out'
            )
        if self.read is not None and "read" in (table["selection"] if isinstance(table["selection"], dict) else {}):
            raise ConfigError("layers.read and policy.selection.read are both given; the first sets the second, leave that out")


def without_selection(table: dict[str, Any]) -> dict[str, Any]:
    """The same policy where everything is read; its label goes too, for it names the selection."""
    return {kind: part for kind, part in table.items() if kind not in ("selection", "label")}


def reads_everything(policy: Policy) -> Policy:
    """The same policy with a selection that leaves nothing out. Errors: ConfigError for one that is not told how much."""
    if policy.selection.reads_all:
        return policy
    selection = policy.selection
    if not isinstance(selection, Top) or selection.max_k is not None or getattr(selection, "mode", "top_k") != "top_k":
        raise ConfigError(
            f"layers.alike: {type(selection).__name__} is bound by more than a sparsity (max_k, mode); leave alike out"
        )
    return dataclasses.replace(policy, selection=dataclasses.replace(selection, sparsity=0.0))


def checked(span: tuple[int, int], layers: int) -> tuple[int, int]:
    """Errors: ConfigError for a range that the model does not have."""
    first, last = span
    if not 0 <= first <= last < layers:
        raise ConfigError(f"layers: range = [{first}, {last}]; allowed: 0 ≤ first ≤ last ≤ {layers - 1}")
    return first, last


def known_keys(table: Any) -> None:
    """Errors: ConfigError for an unknown key of a `Choice`, beside its nearest neighbour."""
    names = ("range", "only", "from", "keep_full", "read", "alike")
    if isinstance(table, dict) and (unknown := sorted(set(table) - set(names))):
        raise ConfigError(f"layers: unknown key {unknown[0]!r}; {nearest(unknown[0], names)}")


def most_sensitive(path: str | Path, number: int, layers: int) -> list[int]:
    """The first `number` layers of a ranking for a model of `layers` layers. Errors: ConfigError."""
    try:
        order = [int(row["layer"]) for row in json.loads(Path(path).expanduser().read_text(encoding="utf-8"))["layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"layers: from = {str(path)!r} is no ranking ({error}); run experiments/layer_sensitivity.toml, which writes one"
        ) from error
    if len(set(order)) != len(order) or not all(0 <= layer < layers for layer in order):
        raise ConfigError(f"layers: from = {str(path)!r} ranks {order}; allowed: each once, of 0 … {layers - 1}")
    if number > len(order):
        raise ConfigError(f"layers: keep_full = {number}, but {path} ranks {len(order)} layers; allowed: 0 … {len(order)}")
    return order[:number]


def _runs(layers: list[int]) -> str:
    return f"0 … {len(layers) - 1}" if layers == list(range(len(layers))) else ", ".join(map(str, layers))
