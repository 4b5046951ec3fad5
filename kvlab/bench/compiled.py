"""How often XLA compiles, and what a run costs where nothing has been compiled before."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator

import jax


class Compilations:
    """Counts XLA's compilations from now on, by the name of what was traced."""

    def __init__(self):
        self.by_name: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._see)

    @property
    def count(self) -> int:
        return self.by_name.total()

    def _see(self, event: str, duration_secs: float, fun_name: str | int = "", **more: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.by_name[str(fun_name)] += 1


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Whatever earlier runs compiled is not looked at, so that cold is cold."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    before = jax.config.values["jax_compilation_cache_dir"]
    with tempfile.TemporaryDirectory() as scratch:
        jax.config.update("jax_compilation_cache_dir", scratch)
        reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
            reset_cache()
