"""What stored vectors look like: one codec a file."""

from kvlab.codec.fp8 import Fp8
from kvlab.codec.grouped import Int2, Int4
from kvlab.codec.hadamard import Hadamard
from kvlab.codec.int8 import Int8
from kvlab.codec.kivi import Kivi
from kvlab.codec.kv import KV
from kvlab.codec.nf4 import NF4
from kvlab.codec.outliers import Outliers
from kvlab.codec.pre_rope import PreRope
from kvlab.codec.raw import Raw

CODECS = {
    "raw": Raw,
    "int8": Int8,
    "fp8": Fp8,
    "int4": Int4,
    "int2": Int2,
    "nf4": NF4,
    "kivi": Kivi,
    "hadamard": Hadamard,
    "outliers": Outliers,
    "pre_rope": PreRope,
    "kv": KV,
}
