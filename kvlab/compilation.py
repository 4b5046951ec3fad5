"""How programs are compiled, and the persistent cache: compiled programs are code, so they lie where only the user can write."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import jax


def memory_first() -> dict[str, str] | None:
    """Compiler options for programs over whole prompts: by default XLA's CPU backend keeps every layer's vectors to the end."""
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if jax.default_backend() == "cpu" else None


MAPS = 40_000  # of the 65,530 memory maps that Linux gives a process: a compiled program takes ten and more


def relieve(most: int = MAPS) -> bool:
    """Drops compiled programs where the process has more than `most` memory maps: XLA crashes when there are no more.

    What is needed again is compiled again, or comes from the persistent cache. Returns whether it had to; call it between
    pieces of long work.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            if sum(1 for _ in maps) <= most:
                return False
    except OSError:
        return False  # no Linux, no such limit
    jax.clear_caches()
    return True


@contextmanager
def counting(name: str) -> Iterator[list[float]]:
    """Seconds that each program of the jitted function `name` takes XLA within the block, or the persistent cache to bring."""
    seen: list[float] = []

    def see(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and kwargs.get("fun_name") == f"jit({name})":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(see)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(see)


def use_private_cache() -> None:
    """Keeps compiled programs between runs in a folder of mode 0700; does nothing if jax already has one set up.

    A folder that others can write to is not used: whoever writes there could run code as this user.
    """
    from kvlab.models.fetch import cache_folder

    if jax.config.values["jax_compilation_cache_dir"] or os.environ.get("KVLAB_NO_COMPILATION_CACHE"):
        return
    folder = cache_folder() / "xla"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return  # a read-only home only costs compile time
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o022:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
