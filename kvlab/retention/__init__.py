"""Which tokens stay stored: one method a file."""

from kvlab.retention.adakv import AdaKV
from kvlab.retention.gated import Gated
from kvlab.retention.keep_all import KeepAll
from kvlab.retention.kvzip import KVzip
from kvlab.retention.protect import Protect
from kvlab.retention.window import Window

RETENTIONS = {"keep_all": KeepAll, "window": Window, "protect": Protect, "gated": Gated, "adakv": AdaKV, "kvzip": KVzip}
