"""What jax itself has for decode attention over bfloat16 numbers, each over the memory that it takes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import memory
from kvlab.bench.kernels.cases import Case, Ready
from kvlab.bench.kernels.setting import Setting
from kvlab.core import PAGE, Record

PEERS = (
    "jax dot_product_attention",
    "jax dot_product_attention cudnn",
    "jax pallas decode_attention",
    "jax pallas paged_attention",
)
DTYPE = "bfloat16"


def cases(length: int, batch: int) -> list[list[Case]]:
    return [[Case(name, "dense", DTYPE, length, batch)] for name in PEERS]


def ready(setting: Setting, case: Case, record: Record, fill: Callable) -> Ready:
    """Memory and call of a peer. Every row must hold all tokens. Errors: whatever jax says where it cannot be built."""
    store, call = _kinds(setting, case)[case.layout]
    made = fill(store, record)

    def run(held, query_BHGD, pages):
        B, H, G, D = query_BHGD.shape
        out = call(held, query_BHGD.reshape(B, H * G, D).astype(DTYPE))
        return out.reshape(B, H, G, D).astype(jnp.float32)

    return Ready(made, run, memory.resident(made), lambda row, head: np.arange(case.length))


def _kinds(setting: Setting, case: Case) -> dict[str, tuple[Callable, Callable]]:
    """From a record to memory, and from memory and queries `[B, heads, D]` to outputs of the same shape."""
    from jax.experimental.pallas.ops.gpu.decode_attention import gqa
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    full = jnp.full(case.batch, case.length, jnp.int32)
    pages = case.length // PAGE
    splits = max(k for k in (16, 8, 4, 2, 1) if pages % k == 0)
    block = max(k for k in (8, 4, 2, 1) if pages // splits % k == 0)

    def dot_product(implementation):
        return lambda kv, query: jax.nn.dot_product_attention(query[:, None], *kv, implementation=implementation)[:, 0]

    def decode(kv, query):
        step = 128 if case.length // splits % 128 == 0 else PAGE
        return gqa(query, *kv, kv_seq_len=full, k_splits=splits, block_k=step, interpret=setting.interpret)

    def paged(kv, query):  # takes queries that are scaled
        key, value, table = kv
        query = (query.astype(jnp.float32) * setting.dim**-0.5).astype(DTYPE)
        return paged_attention(
            query, key, value, table, full, k_splits=splits, pages_per_compute_block=block, interpret=setting.interpret
        )

    calls = [(_tokens, dot_product(None)), (_tokens, dot_product("cudnn")), (_tokens, decode), (_pages, paged)]
    return dict(zip(PEERS, calls))


def _tokens(record: Record):
    """Keys and values `[B, T, H, D]`."""
    return tuple(jnp.swapaxes(x, 1, 2).astype(DTYPE) for x in (record.key_BHTD, record.value_BHTD))


def _pages(record: Record):
    """Keys and values `[H, B·N, p, D]`, and a table `[B, N]`."""
    B, H, T, D = record.key_BHTD.shape
    paged = lambda x: jnp.swapaxes(x.astype(DTYPE).reshape(B, H, T // PAGE, PAGE, D), 0, 1).reshape(H, -1, PAGE, D)
    table = jnp.arange(B * T // PAGE, dtype=jnp.int32).reshape(B, -1)
    return paged(record.key_BHTD), paged(record.value_BHTD), table
