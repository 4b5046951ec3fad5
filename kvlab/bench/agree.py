"""Does the full cache answer as transformers does, on the same prompts and weights?"""

from pathlib import Path

from kvlab import parts
from kvlab.bench.peers import Peer, cropped
from kvlab.decode import Engine
from kvlab.errors import ConfigError
from kvlab.experiment import config
from kvlab.experiment.group import model_name
from kvlab.models import load
from kvlab.tasks import Needle


def main(file: Path, peers: bool) -> dict:
    """Counts questions on which kvlab's full cache and transformers generate the same text."""
    cells = config.expand(config.read(file)[1])
    found = [c for c in cells if isinstance(c.make_task(), Needle)]
    if not found:
        raise ConfigError(f"{file} has no needle task; name an experiment that has one")
    task, seed, name = found[0].make_task(), found[0].seed, model_name(found[0].model)
    assert isinstance(task, Needle)
    engine = Engine(load(name))
    peer = Peer(name) if peers else None
    tokenizer, totals = engine.model.tokenizer, {"same_answers": 0, "kvlab_correct": 0, "transformers_correct": 0, "questions": 0}
    for index in range(task.count()):
        batch = task.batch(index, seed, tokenizer)
        session = engine.start(engine.prefill(batch.prompts), parts.policy({}), batch.new_tokens, batch.rows, batch.forced)
        session.run(batch.new_tokens)
        ours = [ids[: task.new_tokens] for ids in session.answers()]
        theirs = _answers(peer, batch, task.new_tokens) if peer else ours
        for mine, other, target in zip(ours, theirs, batch.targets):
            totals["questions"] += 1
            totals["same_answers"] += mine == other
            totals["kvlab_correct"] += tokenizer.decode(mine).strip().startswith(target)
            totals["transformers_correct"] += tokenizer.decode(other).strip().startswith(target)
    if not peer:
        del totals["same_answers"], totals["transformers_correct"]
    for key, value in totals.items():
        print(f"{key:22} {value}")
    return totals


def _answers(peer: Peer, batch, new_tokens: int) -> list[list[int]]:
    answers, prompt, cache = [], -1, None
    for row, question in zip(batch.rows, batch.forced):
        if row != prompt:
            prompt = row
            first, cache, _ = peer.prefill([batch.prompts[row]])
        with cropped(cache, len(batch.prompts[row])):
            steps = max(len(question) - 1, 0) + new_tokens
            sampled, _ = peer.decode(cache, first.argmax(-1), steps, question)
            whole = [int(first.argmax(-1)[0]), *sampled[0].tolist()]
            answers.append(whole[len(question) :][:new_tokens])
    return answers
