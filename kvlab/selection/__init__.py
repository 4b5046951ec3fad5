"""What one query reads: a selection a file, controls in one."""

from kvlab.selection.controls import KeyNorm, Oracle, Random, Recency
from kvlab.selection.gated import HySparse, Lightning
from kvlab.selection.oracle_share import OracleShare
from kvlab.selection.quest import Quest
from kvlab.selection.read_all import ReadAll

SELECTIONS = {
    "read_all": ReadAll,
    "hysparse": HySparse,
    "lightning": Lightning,
    "quest": Quest,
    "oracle": Oracle,
    "oracle_share": OracleShare,
    "random": Random,
    "recency": Recency,
    "key_norm": KeyNorm,
}
