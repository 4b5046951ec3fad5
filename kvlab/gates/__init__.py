"""Learned modules that score stored tokens for a query, and their files."""

from kvlab.gates.base import Gate, GateConfig, GateParam
from kvlab.gates.lightning import LightningIndexer
from kvlab.gates.spatial import SpatialGate
from kvlab.gates.store import GATES, find, load, make, save

__all__ = ["GATES", "Gate", "GateConfig", "GateParam", "LightningIndexer", "SpatialGate", "find", "load", "make", "save"]
