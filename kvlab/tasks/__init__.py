"""Tasks: one a file, each a pure function of its fields, a seed and a text."""

from kvlab.tasks.base import Answers, Batch, Task
from kvlab.tasks.cloze import Cloze
from kvlab.tasks.common_words import CommonWords
from kvlab.tasks.continuation import Continuation
from kvlab.tasks.dialogue import Dialogue
from kvlab.tasks.facts_and_figures import FactsAndFigures
from kvlab.tasks.frequent_words import FrequentWords
from kvlab.tasks.jsonl import Jsonl
from kvlab.tasks.key_value import KeyValue
from kvlab.tasks.likelihood import Likelihood
from kvlab.tasks.majority import Majority
from kvlab.tasks.mqar import Mqar
from kvlab.tasks.needle import Needle
from kvlab.tasks.next_identifier import NextIdentifier
from kvlab.tasks.next_line import NextLine
from kvlab.tasks.passkey import Passkey
from kvlab.tasks.repeated_copy import RepeatedCopy
from kvlab.tasks.variable_tracking import VariableTracking

TASKS = {
    "needle": Needle,
    "passkey": Passkey,
    "key_value": KeyValue,
    "mqar": Mqar,
    "variable_tracking": VariableTracking,
    "majority": Majority,
    "common_words": CommonWords,
    "frequent_words": FrequentWords,
    "repeated_copy": RepeatedCopy,
    "cloze": Cloze,
    "next_identifier": NextIdentifier,
    "next_line": NextLine,
    "dialogue": Dialogue,
    "facts_and_figures": FactsAndFigures,
    "continuation": Continuation,
    "likelihood": Likelihood,
    "jsonl": Jsonl,
}

__all__ = ["TASKS", "Answers", "Batch", "Task", *sorted(task.__name__ for task in TASKS.values())]
