"""Which tokens stay stored: one method a file."""

from kvlab.retention.adakv import AdaKV
from kvlab.retention.gated import Gated
from kvlab.retention.h2o import H2O
from kvlab.retention.keep_all import KeepAll
from kvlab.retention.kvzip import KVzip
from kvlab.retention.observed_attention import ObservedAttention
from kvlab.retention.protect import Protect
from kvlab.retention.pyramidkv import PyramidKV
from kvlab.retention.snapkv import SnapKV
from kvlab.retention.tova import TOVA
from kvlab.retention.window import Window

RETENTIONS = {
    "keep_all": KeepAll, "window": Window, "protect": Protect, "adakv": AdaKV, "gated": Gated, "kvzip": KVzip, "h2o": H2O,
    "tova": TOVA, "snapkv": SnapKV, "pyramidkv": PyramidKV, "observed_attention": ObservedAttention,
}  # fmt: skip
