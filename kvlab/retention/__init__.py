"""Which tokens stay stored: one method a file."""

from kvlab.retention.adakv import AdaKV
from kvlab.retention.chunkkv import ChunkKV
from kvlab.retention.criticalkv import CriticalKV
from kvlab.retention.dms import DMS
from kvlab.retention.duoattention import DuoAttention
from kvlab.retention.expected_attention import ExpectedAttention
from kvlab.retention.gated import Gated
from kvlab.retention.h2o import H2O
from kvlab.retention.head_budgets import HeadBudgets
from kvlab.retention.keep_all import KeepAll
from kvlab.retention.key_norm import KeyNorm
from kvlab.retention.keydiff import KeyDiff
from kvlab.retention.kvzip import KVzip
from kvlab.retention.lagkv import LagKV
from kvlab.retention.observed_attention import ObservedAttention
from kvlab.retention.protect import Protect
from kvlab.retention.pyramidkv import PyramidKV
from kvlab.retention.q_filters import QFilters
from kvlab.retention.random import Random
from kvlab.retention.snapkv import SnapKV
from kvlab.retention.tova import TOVA
from kvlab.retention.window import Window

RETENTIONS = {
    "keep_all": KeepAll, "window": Window, "random": Random, "key_norm": KeyNorm, "keydiff": KeyDiff, "lagkv": LagKV,
    "h2o": H2O, "tova": TOVA, "snapkv": SnapKV, "pyramidkv": PyramidKV, "observed_attention": ObservedAttention,
    "expected_attention": ExpectedAttention, "q_filters": QFilters, "kvzip": KVzip, "gated": Gated, "dms": DMS,
    "duoattention": DuoAttention, "protect": Protect, "adakv": AdaKV, "head_budgets": HeadBudgets,
    "chunkkv": ChunkKV, "criticalkv": CriticalKV,
}  # fmt: skip
