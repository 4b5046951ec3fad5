"""A results folder as one page: what `kvlab report` writes. Nothing here changes a figure."""
