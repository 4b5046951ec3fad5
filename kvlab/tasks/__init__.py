"""Tasks: one a file, each a pure function of its fields, a seed and a text."""

from kvlab.tasks.base import Batch, Task
from kvlab.tasks.likelihood import Likelihood
from kvlab.tasks.majority import Majority
from kvlab.tasks.mqar import Mqar
from kvlab.tasks.needle import Needle
from kvlab.tasks.variable_tracking import VariableTracking

TASKS = {
    "needle": Needle,
    "likelihood": Likelihood,
    "mqar": Mqar,
    "variable_tracking": VariableTracking,
    "majority": Majority,
}

__all__ = ["TASKS", "Batch", "Likelihood", "Majority", "Mqar", "Needle", "Task", "VariableTracking"]
