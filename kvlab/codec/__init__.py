"""What stored vectors look like: one codec a file."""

from kvlab.codec.int8 import Int8
from kvlab.codec.kv import KV
from kvlab.codec.raw import Raw

CODECS = {"raw": Raw, "int8": Int8, "kv": KV}
