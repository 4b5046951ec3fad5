"""Cases: a layout, what is read of it, and in which numbers. How the memory of one is filled and read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import attention, kernels, memory
from kvlab.attention import AttentionSpec
from kvlab.bench.kernels import token_major
from kvlab.bench.kernels.setting import READS, Setting
from kvlab.codec import Int8, Raw
from kvlab.core import EMPTY, PAGE, Codec, Layout, Pages, Record
from kvlab.kernels import decode
from kvlab.layout import Bicl, Contiguous, Paged
from kvlab.policy import Policy
from kvlab.retention import KeepAll
from kvlab.selection import ReadAll

CODECS: dict[str, Codec] = {"float32": Raw(), "bfloat16": Raw("bfloat16"), "int8": Int8()}
BASELINE = "token_major"
LAYOUTS: dict[str, Layout] = {
    BASELINE: token_major.TokenMajor(),
    "head_major": Contiguous(),
    "bicl_32": Bicl(32),
    "bicl_64": Bicl(64),
    "paged": Paged(),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What one line of the table is about; `layout` is a peer's name where the case is a peer's."""

    layout: str
    read: str
    dtype: str
    length: int
    batch: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.read}, {self.dtype}, {self.length:,} tokens, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Ready:
    """What a case reads and how: `attend(memory, queries [B, H, G, D], pages [B, H, R] or None)` gives float32 outputs."""

    memory: Any
    attend: Callable
    stored: int  # bytes of keys and values, scales and tables
    visible: Callable  # from a row and a head to the positions of the tokens that it reads, [S], EMPTY where it reads none


def cases(length: int, batch: int, dtypes: tuple[str, ...]) -> list[list[Case]]:
    """Lists of cases that share a memory."""
    return [[Case(layout, read, dtype, length, batch) for read in READS] for dtype in dtypes for layout in LAYOUTS]


def draw(setting: Setting, length: int, batch: int, held: tuple[int, ...] = ()) -> Record:
    """Normal keys and values; rows that hold fewer tokens than `length` say so in `held`. In 16 bits where they are timed, which
    is where they are many."""
    shape, dtype = (batch, setting.heads, length, setting.dim), jnp.bfloat16 if setting.rounds else jnp.float32
    made = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype))
    here = np.arange(length) < np.array(held or (length,) * batch)[:, None]
    return Record(made(0), made(1), jnp.asarray(np.where(here, np.arange(length), EMPTY), jnp.int32))


def lists(setting: Setting, length: int, batch: int, seed: int = 0) -> np.ndarray:
    """Lists of pages `[L, B, H, R]`, int32: each head's pages in random order, cut into lists, each in order of position."""
    count, R = length // PAGE, setting.pages(length)
    order = np.broadcast_to(np.arange(count), (batch, setting.heads, count))
    order = np.random.default_rng(seed).permuted(order, axis=-1)[..., : count // R * R]
    return np.ascontiguousarray(np.moveaxis(np.sort(order.reshape(*order.shape[:2], -1, R), -1), 2, 0), np.int32)


def policy(setting: Setting, case: Case) -> Policy:
    """As it is filled; the baseline's names no kernel, because only this measurement has one."""
    layout = LAYOUTS[case.layout]
    if isinstance(layout, Bicl):
        layout = dataclasses.replace(layout, head_dim=setting.dim)
    named = {} if case.layout == BASELINE else {"implementation": setting.implementation}
    return Policy(KeepAll(), CODECS[case.dtype], layout, ReadAll(), **named)


def ready(setting: Setting, case: Case, record: Record, fill: Callable) -> Ready:
    """A filled cache and its kernel. `fill(function, record)` runs or, without a device, only shapes."""
    made = policy(setting, case)
    cache = fill(lambda record: made.fill(_wide(record), case.length), record)
    return Ready(cache, attend(setting, case, made), memory.resident(cache.memory), lambda b, h: _coded(cache, b, h))


def attend(setting: Setting, case: Case, made: Policy) -> Callable:
    spec, baseline = AttentionSpec(setting.dim**-0.5), case.layout == BASELINE

    def run(cache, query_BHGD, pages):
        query = made.codec.keys.query(query_BHGD * spec.scale)
        now = jnp.full(case.batch, case.length - 1)
        if baseline:
            told = decode.facts(cache, now, made.unit, made.retention.visibility(), spec, made.tailed, pages)
            backend = kernels.BACKENDS[setting.implementation]
            read = token_major.kernel(made.codec)
            done, _ = read(backend, made.layout, cache.memory, query, cache.pos, told, spec, pages)
        else:
            done, _ = kernels.read(made, cache, query, now, spec, Pages(pages))
        return made.codec.values.output(attention.finish(done)[0])

    return run


def _wide(record: Record) -> Record:
    return Record(record.key_BHTD.astype(jnp.float32), record.value_BHTD.astype(jnp.float32), record.pos_BT)


def _coded(cache, row: int, head: int) -> np.ndarray:
    """Positions of the tokens whose codes are in memory, by slot: those of pages that wait in the tail are not."""
    pos, waiting = np.array(cache.pos[row, head]), np.array(cache.waiting[row, head])
    pos[waiting[waiting >= 0]] = EMPTY
    return pos.reshape(-1)
