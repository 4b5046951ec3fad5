"""Whether every program that is timed on a GPU can be lowered for one; runs nothing and needs none."""

import time

import jax

from kvlab.bench.kernels import cases, group, peers, program
from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.setting import EXACT, SETTINGS, Setting, order

MARK = "__gpu$xla.gpu.triton"  # how a Pallas kernel for an NVIDIA GPU shows in a lowered program
PLAIN = tuple(name for name in peers.PEERS if "pallas" not in name)  # peers that XLA builds


def main(dtypes: tuple[str, ...] = EXACT, largest: int | None = None) -> dict:
    """`lowered`: a row for each case up to the length `largest`, with the reason where it does not lower; `failed`: kvlab's own
    among those."""
    found = []
    for setting, length, batch, some, _ in order(SETTINGS["gpu"], dtypes):
        if largest is None or length <= largest:
            for case in (case for same in (*cases.cases(length, batch, some), *peers.cases(length, batch)) for case in same):
                found.append(row := _one(setting, case))
                print(f"{'lowers' if row['lowers'] else 'does not':9} {case} {row['reason'] or ''}", flush=True)
    failed = [row["case"] for row in found if not row["lowers"] and not row["peer"]]
    print(f"{sum(row['lowers'] for row in found)} of {len(found)} cases lower for an NVIDIA GPU")
    return {"jax": jax.__version__, "lowered": found, "failed": failed}


def _one(setting: Setting, case: Case) -> dict:
    begin, why = time.perf_counter(), None
    try:
        text = text_of(setting, case)
        if MARK not in text and case.layout not in PLAIN:
            why = "no kernel in the lowered program"
    except Exception as error:
        why = group.reason(error)
    seconds = time.perf_counter() - begin
    return {"case": str(case), "peer": case.layout in peers.PEERS, "lowers": why is None, "reason": why, "seconds": seconds}


def text_of(setting: Setting, case: Case) -> str:
    """The lowered program, from shapes alone."""
    record = jax.eval_shape(lambda: cases.draw(setting, case.length, case.batch))
    made = group.prepared(setting, case, record, jax.eval_shape)
    lists = jax.ShapeDtypeStruct(cases.lists(setting, case.length, case.batch).shape, "int32") if case.read == "pages" else None
    sets, repeats = program.sizes(setting, made.stored, lists.shape[0] if lists else 1)
    shape = (case.batch, setting.heads, setting.groups, setting.dim)
    run = jax.jit(program.program(made, repeats))
    traced = run.trace((made.memory,) * sets, jax.ShapeDtypeStruct(shape, "float32"), lists)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
