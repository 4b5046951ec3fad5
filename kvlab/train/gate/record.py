"""Queries and keys of a frozen base, on disk: a shard per context, recorded once and used by every gate of that base.

<out>/records/<digest of model and [data]>/about.json
                                           00000.safetensors …   query [L, Q, H, G, D], key [L, H, T, D], both post-RoPE;
                                                                 pos [Q], tokens [T], weight [T], prompt [], length []
"""

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from kvlab import attention, parts
from kvlab.core import PAGE
from kvlab.errors import ConfigError, ResultsError
from kvlab.experiment import report
from kvlab.experiment.store import check_writable, write_text, writing
from kvlab.models import Model
from kvlab.models.transformer import bind
from kvlab.session import bucket
from kvlab.tasks import TASKS
from kvlab.tasks import text as text_source
from kvlab.train.gate.config import Data


class Context(NamedTuple):
    """Token ids; how much each counts as an answer; how many are prefilled; positions whose queries are recorded."""

    tokens: np.ndarray
    weight: np.ndarray
    prompt: int
    pos: np.ndarray


class Batch(NamedTuple):
    """Contexts of a step, padded on the right: before `[B, S]`, tokens `[B, T]`.

    The model reads `before` densely, as prefill does, and `tokens` as decoding does. `target`, `ok` and `weight` `[B, T]`:
    the token that comes next, whether there is one, and how much it counts as an answer.
    """

    before: Any
    tokens: Any
    target: Any
    ok: Any
    weight: Any


PARTS = 16  # of a context's length: where `before` may end, so that few shapes are compiled


def source(data: Data, index: int) -> Any:
    """What the index-th context is made of: a text's name or a task's table."""
    return (*data.texts, *data.tasks)[index % (len(data.texts) + len(data.tasks))]


def prompt(data: Data, tokenizer, index: int) -> list[int]:
    """The index-th context without questions."""
    made = source(data, index)
    if isinstance(made, dict):
        return list(parts.build(made, TASKS, "data.tasks").batch(index, data.seed, tokenizer).prompts[0])
    return _text(data, made, tokenizer, np.random.default_rng([data.seed, index]))


def _text(data: Data, name: str, tokenizer, rng) -> list[int]:
    return (list(tokenizer.begin) + text_source.token_stream(name, tokenizer, rng, data.length))[: data.length]


def context(data: Data, tokenizer, index: int) -> Context:
    """The index-th context, a pure function of the data's table. Errors: ConfigError for one that is too short."""
    rng = np.random.default_rng([data.seed, index])
    made = source(data, index)
    if isinstance(made, dict):
        return _from_task(data, made, tokenizer, index, rng)
    ids = np.array(_text(data, made, tokenizer, rng))
    half = np.arange(len(ids) // 2, len(ids) - 1)
    return Context(ids, np.ones(len(ids)), max(len(ids) - data.decoded, 1), _queries(data, half, rng))


def _from_task(data: Data, table: dict[str, Any], tokenizer, index: int, rng) -> Context:
    """The prompt of a task's batch, with every question and its answer after it; recorded queries are first those of answers."""
    task = parts.build(table, TASKS, "data.tasks")
    batch = task.batch(index, data.seed, tokenizer)
    ids, counts = list(batch.prompts[0]), [0.0] * len(batch.prompts[0])
    prompt = len(ids)
    for row, question, target in zip(batch.rows, batch.forced, batch.targets):
        if row == 0:
            answer = tokenizer.encode(f" {task.written(target)}")
            ids, counts = ids + question + answer, counts + [0.0] * len(question) + [1.0] * len(answer)
    answers = np.array([*counts[1:], 0.0]) > 0  # a query matters where the next token is an answer's
    asked = np.arange(prompt - 1, len(ids) - 1)
    order = asked[answers[asked]], asked[~answers[asked]], np.arange((prompt - 1) // 2, prompt - 1)
    return Context(np.array(ids), np.array(counts), prompt, _queries(data, np.concatenate([rng.permutation(x) for x in order])))


def _queries(data: Data, candidates: np.ndarray, rng=None) -> np.ndarray:
    """Positions, ascending: the first candidates or, with a generator, any."""
    if len(candidates) < data.queries:
        raise ConfigError(f"data: {len(candidates)} positions for queries={data.queries}; ask for fewer or for longer contexts")
    return np.sort(candidates[: data.queries] if rng is None else rng.choice(candidates, data.queries, replace=False))


class Records:
    """The recorded contexts of a base: `Records.of` makes what is missing."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count

    @classmethod
    def of(cls, model: Model, data: Data, out: str | Path) -> "Records":
        """Records what is missing; says beforehand how much it will be. Errors: ConfigError, ResultsError."""
        about = {"model": model.digest, "data": msgspec.to_builtins(data), "text": [text_source.digest(t) for t in data.texts]}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        folder = Path(out) / "records" / key
        made = cls(folder, data.contexts)
        missing = [i for i in range(data.contexts) if not made.shard(i).exists()]
        if missing:
            made._record(model, data, about, missing)
        return made

    def shard(self, index: int) -> Path:
        return self.folder / f"{index:05}.safetensors"

    def load(self, index: int) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        return load_file(self.shard(index))

    def batch(self, indices) -> Batch:
        """Tokens only, without queries and keys, cut where the shortest prompt ends or a little before."""
        from safetensors import safe_open

        rows = []
        for index in indices:
            with safe_open(self.shard(index), "np") as file:
                rows.append([file.get_tensor(name) for name in ("tokens", "weight", "prompt", "length")])
        tokens, weight, prompt, length = (np.stack(column) for column in zip(*rows))
        T = tokens.shape[1]
        step = -(-T // PARTS)
        begin = (int(prompt.min()) - 1) // step * step
        after = lambda x: np.pad(x[:, begin + 1 :], ((0, 0), (0, 1)))
        ok = np.arange(begin, T) < length[:, None] - 1
        return Batch(tokens[:, :begin], tokens[:, begin:], after(tokens), ok, after(weight))

    def _record(self, model: Model, data: Data, about: dict[str, Any], missing: list[int]) -> None:
        check_writable(self.folder)
        contexts = [context(data, model.tokenizer, i) for i in range(data.contexts)]
        width = -(-max(len(c.tokens) for c in contexts) // PAGE) * PAGE
        need = len(missing) * size(model, data, width)
        free = shutil.disk_usage(self.folder.parent if not self.folder.exists() else self.folder).free
        if need > 0.9 * free:
            raise ResultsError(f"{self.folder} needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; record fewer contexts")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "about.json", json.dumps(about, indent=1))
        with report.progress() as bar:
            task = bar.add_task(f"recording {need / 1e6:,.0f} MB", total=len(missing))
            for index in missing:
                self._write(index, arrays(model, data, contexts[index], width))
                bar.update(task, advance=1)

    def _write(self, index: int, found: dict[str, np.ndarray]) -> None:
        from safetensors.numpy import save

        with writing(self.shard(index)) as part:
            part.write_bytes(save(found))


def layers(model: Model, data: Data) -> tuple[int, ...]:
    """Which layers are recorded. Errors: ConfigError."""
    picked = data.layers or tuple(i for i in range(model.config.layers) if model.config.window(i) is None)
    if not set(picked) <= set(range(model.config.layers)):
        raise ConfigError(f"data.layers = {list(picked)}; allowed: 0 … {model.config.layers - 1}")
    return picked


def size(model: Model, data: Data, width: int) -> int:
    """Bytes of a shard with contexts of `width` tokens, less its header."""
    c, count = model.config, len(layers(model, data))
    numbers = count * c.head_dim * (data.queries * c.heads + width * c.kv_heads)
    return numbers * np.dtype(data.dtype).itemsize + 4 * (2 * width + data.queries + 2)


def arrays(model: Model, data: Data, context: Context, width: int) -> dict[str, np.ndarray]:
    """What a shard holds of a context, its tokens padded to `width`."""
    tokens, weight = np.zeros((1, bucket(width)), np.int32), np.zeros(width, np.float32)
    tokens[0, : len(context.tokens)], weight[: len(context.tokens)] = context.tokens, context.weight
    query, key = capture(model.config, model.params, tokens, context.pos, layers(model, data))
    small = lambda x: np.ascontiguousarray(np.asarray(x), data.dtype)
    return {
        "query": small(query),
        "key": small(key[:, :, :width]),
        "tokens": tokens[0, :width],
        "weight": weight,
        "prompt": np.array(context.prompt, np.int32),
        "length": np.array(len(context.tokens), np.int32),
        "pos": context.pos.astype(np.int32),
    }


@functools.partial(jax.jit, static_argnames=("config", "layers"))
def capture(config, params, tokens_1T, pos_Q, layers):
    """Queries `[L, Q, H, G, D]` at the positions and keys `[L, H, T, D]` of one context, from the named layers."""
    queries, keys = [], []

    def attend(layer, query, key, value, _):
        queries.append(query[0, pos_Q])
        keys.append(jnp.swapaxes(key[0], 0, 1))
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        return attention.prefill(query, key, value, config.attention(layer))

    bind(config, params)(tokens_1T, jnp.arange(tokens_1T.shape[1])[None], attend)
    pick = jnp.array(layers)
    return jnp.stack(queries)[pick], jnp.stack(keys)[pick]
