"""One policy over one batch: filled from the record, decoded step by step, and what was seen on the way."""

import dataclasses
from typing import Any

import numpy as np

from kvlab import memory
from kvlab.decode import Engine, Prefilled, Session, needs
from kvlab.experiment import causes, reads
from kvlab.needs import REPLAYED
from kvlab.tasks import Answers, Batch

ENTROPY_STEPS = 4  # steps of a sample whose entropy and reads are kept, evenly spaced
FULL = reads.FULL


@dataclasses.dataclass
class Decoded:
    """One policy over one batch: answers, what was watched, and what each row of the results gets."""

    answers: Answers
    outputs: np.ndarray | None  # of attention [steps, L, B, H · G · D], where logits are there too
    kept: np.ndarray  # [prompt, L, H, S] positions after the fill, −1 where none
    entropy: np.ndarray  # [steps kept, L, B, H, G]
    entropy_steps: np.ndarray
    row: dict[str, Any]
    reads: list[dict[str, float]]  # of each row of the results (see `reads.Reads.rows`, `causes.Followed.rows`)
    timing: dict[str, Any]

    def drift(self, reference: "Decoded") -> np.ndarray | None:
        """How far attention's output is from the full cache's, relative to it: `[steps, L, B]`, by layer and step; where both
        were fed the same tokens. A layer's figure holds what came down from the layers before it."""
        if self.outputs is None or reference.outputs is None:
            return None
        apart = np.linalg.norm(self.outputs - reference.outputs, axis=-1)
        return apart / np.maximum(np.linalg.norm(reference.outputs, axis=-1), 1e-12)


def decode(engine: Engine, prompt: Prefilled, policies, batch: Batch, logits: bool) -> Decoded:
    """Fills from the record, feeds the forced tokens, and samples the rest, one step a call so that each is timed."""
    seeds = batch.seeds if batch.sampling else 0
    session = engine.start(
        prompt, policies, batch.new_tokens, batch.rows, batch.forced, engine.model.stops, batch.sampling, seeds
    )
    kept, footprint = snapshot(session, batch)
    watch = ("entropy", *reads.WATCH, *(("logits", "outputs") if logits else ()))
    seen_reads = reads.Reads(session, reads.planned(batch.new_tokens, ENTROPY_STEPS))
    answer = causes.Followed(engine.config, batch)
    seen_logits: list[np.ndarray] = []
    seen_outputs: list[np.ndarray] = []
    seen_entropy: list[np.ndarray] = []
    while len(seen_entropy) < batch.new_tokens and not (session.done and seen_entropy):
        steps = session.run(1, watch, answer.positions)
        answer.see(len(seen_entropy), steps)
        seen_reads.see(len(seen_entropy), steps)
        seen_entropy.append(np.asarray(steps.entropy[0]))
        if logits:
            seen_logits.append(np.asarray(steps.logits[0]))
            seen_outputs.append(np.asarray(steps.outputs[0]).reshape(*steps.outputs.shape[1:3], -1))
    chosen = np.unique(np.linspace(0, len(seen_entropy) - 1, ENTROPY_STEPS).round().astype(int))
    tokens = session.answers()
    texts = [engine.model.tokenizer.decode(ids) for ids in tokens]
    return Decoded(
        Answers(texts, tokens, np.stack(seen_logits) if logits else None),
        np.stack(seen_outputs) if logits else None,
        kept,
        np.stack([seen_entropy[i] for i in chosen]).astype(np.float32),
        chosen,
        footprint,
        [{**read, **share} for read, share in zip(seen_reads.rows(), answer.rows())],
        timing(session, prompt, len(batch.rows)),
    )


def snapshot(session: Session, batch: Batch) -> tuple[np.ndarray, dict[str, Any]]:
    """Positions visible after the fill, a row per prompt, and the memory figures of one sequence."""
    caches, policies = session.state.caches, session.policies
    first = np.array([list(batch.rows).index(i) for i in range(len(batch.prompts))])
    kept = []
    for policy, cache in zip(policies, caches):
        pos = np.asarray(memory.positions(policy, cache))[first]
        kept.append(np.sort(pos.reshape(*pos.shape[:2], -1), -1))
    width = max(k.shape[-1] for k in kept)
    kept = [np.pad(k, ((0, 0), (0, 0), (width - k.shape[-1], 0)), constant_values=-1) for k in kept]
    longest = max(map(len, batch.prompts))
    figures = memory.footprint(policies, caches, FULL, longest + batch.new_tokens)
    return np.stack(kept, 1), {**dataclasses.asdict(figures), "resident_ratio": figures.resident_ratio}


def timing(session: Session, prompt: Prefilled, rows: int) -> dict[str, Any]:
    """Times of one batch. The first step is left out of the rates: it may have compiled."""
    first, *rest = [seconds / max(n, 1) for seconds, n in session.step_seconds]
    prefill = prompt.seconds + (prompt.replay_seconds if needs(session.policies) & REPLAYED else 0.0)
    return {
        "rows": rows,
        "prefill_seconds": prefill,
        "fill_seconds": session.fill_seconds,
        "first_step_seconds": first,
        "step_seconds": rest or [first],
        "time_to_first_token": prefill + session.fill_seconds,
    }
