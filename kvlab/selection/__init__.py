"""What one query reads: a selection a file, controls in one."""

from kvlab.selection.controls import KeyNorm, Oracle, Random, Recency
from kvlab.selection.double_sparsity import DoubleSparsity
from kvlab.selection.gated import HySparse, Lightning
from kvlab.selection.oracle_share import OracleShare
from kvlab.selection.quest import Quest
from kvlab.selection.read_all import ReadAll
from kvlab.selection.top_p import TopP

SELECTIONS = {
    "read_all": ReadAll,
    "hysparse": HySparse,
    "lightning": Lightning,
    "quest": Quest,
    "double_sparsity": DoubleSparsity,
    "oracle": Oracle,
    "oracle_share": OracleShare,
    "top_p": TopP,
    "random": Random,
    "recency": Recency,
    "key_norm": KeyNorm,
}
