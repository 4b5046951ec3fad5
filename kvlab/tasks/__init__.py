"""Tasks: one a file, each a pure function of its fields, a seed and a text."""

from kvlab.tasks.base import Batch, Task
from kvlab.tasks.likelihood import Likelihood
from kvlab.tasks.mqar import Mqar
from kvlab.tasks.needle import Needle

TASKS = {"needle": Needle, "likelihood": Likelihood, "mqar": Mqar}

__all__ = ["TASKS", "Batch", "Likelihood", "Mqar", "Needle", "Task"]
