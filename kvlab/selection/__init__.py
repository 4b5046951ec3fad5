"""What one query reads: one selection a file."""

from kvlab.selection.read_all import ReadAll

SELECTIONS = {"read_all": ReadAll}
