"""kvlab: a laboratory for KV-cache policies in JAX.

    import kvlab

    frame = kvlab.run("experiments/quickstart.toml")       # a table with a row per policy
    samples = kvlab.results.load("results/quickstart")     # everything behind it

Importing this is light; jax, pandas and the rest are loaded when something needs them.
"""

import importlib

__version__ = "0.1.0"


def run(*args, **kwargs):
    """See `kvlab.experiment.run.run`."""
    from kvlab.experiment.run import run as run_

    return run_(*args, **kwargs)


def __getattr__(name: str):
    if name == "results":
        return importlib.import_module("kvlab.results")
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
