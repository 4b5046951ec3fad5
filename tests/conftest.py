"""Shared small models, parts and records. A skip that is not declared here fails the suite."""

import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from jaxtyping import install_import_hook

install_import_hook("kvlab.attention", "beartype.beartype")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kvlab import compilation  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "allow")

EXPECTED_SKIPS = ("refused:", "terms:")  # a product that cannot work; a model whose terms nobody here has accepted


TESTS = itertools.count()
unexpected_skips = []


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(EXPECTED_SKIPS):
            unexpected_skips.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session, exitstatus):
    if unexpected_skips and exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for line in unexpected_skips:
        terminalreporter.write_line(f"UNEXPECTED SKIP {line}", red=True)


@pytest.fixture(autouse=True)
def programs_that_fit():
    """A worker compiles thousands of programs; every sixteenth test looks whether they are too many for the process."""
    yield
    if next(TESTS) % 16 == 0:
        compilation.relieve()


@pytest.fixture(autouse=True)
def compiled_quickly(request):
    """Tests marked so leave LLVM's optimisation out: most of their time is compiling programs that run a few times."""
    quickly = request.node.get_closest_marker("compiled_quickly") is not None
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny():
    """A random two-layer model with a tokenizer that reads bytes; nothing to download."""
    from tests.tools import tiny_model

    return tiny_model()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def on_tiny(monkeypatch, tiny):
    """Experiments with model "tiny" run on the random model of the tests, and token strings come from its tokenizer."""
    from kvlab import results
    from kvlab.experiment import group

    group.engine.cache_clear()
    monkeypatch.setattr(group, "load", lambda name: tiny)
    monkeypatch.setattr(results._Strings, "of", lambda self, model, ids: np.array(tiny.tokenizer.strings(ids), object))
    yield
    group.engine.cache_clear()
