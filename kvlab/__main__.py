"""`python -m kvlab`, as `kvlab`: for processes that start others like themselves."""

from kvlab.cli import main

main()
