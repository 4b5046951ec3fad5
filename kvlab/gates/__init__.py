"""Learned modules that score stored tokens, for a query or before any is known, and their files."""

from kvlab.gates.base import Gate, GateConfig, GateParam
from kvlab.gates.importance import ImportanceConfig, ImportanceGate
from kvlab.gates.lightning import LightningIndexer
from kvlab.gates.spatial import SpatialGate
from kvlab.gates.store import GATES, find, load, make, save

__all__ = [
    "GATES", "Gate", "GateConfig", "GateParam", "ImportanceConfig", "ImportanceGate", "LightningIndexer", "SpatialGate",
    "find", "load", "make", "save",
]  # fmt: skip
