"""Measurements. Times are medians over interleaved repetitions; a speed-up names its baseline and is a ratio of pairs."""
