"""Metrics that compare a policy with the full cache."""
