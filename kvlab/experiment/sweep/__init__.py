"""Sweeps: over several processes, estimated beforehand, compared afterwards."""
