"""Which tokens stay stored: one method a file."""

from kvlab.retention.chunkkv import ChunkKV
from kvlab.retention.criticalkv import CriticalKV
from kvlab.retention.expected_attention import ExpectedAttention
from kvlab.retention.gated import Gated
from kvlab.retention.keep_all import KeepAll
from kvlab.retention.key_norm import KeyNorm
from kvlab.retention.keydiff import KeyDiff
from kvlab.retention.kvzip import KVzip
from kvlab.retention.lagkv import LagKV
from kvlab.retention.protect import Protect
from kvlab.retention.q_filters import QFilters
from kvlab.retention.random import Random
from kvlab.retention.window import Window

RETENTIONS = {
    "keep_all": KeepAll,
    "window": Window,
    "protect": Protect,
    "gated": Gated,
    "kvzip": KVzip,
    "key_norm": KeyNorm,
    "keydiff": KeyDiff,
    "lagkv": LagKV,
    "chunkkv": ChunkKV,
    "q_filters": QFilters,
    "expected_attention": ExpectedAttention,
    "criticalkv": CriticalKV,
    "random": Random,
}
