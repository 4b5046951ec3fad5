"""The command line, `kvlab COMMAND …`. Exit codes: 0 fine, 2 bad input in one clear line, 130 stopped, 1 anything else;
`kvlab check` and `kvlab run --search` have 0 pass, 1 fail, 3 underpowered."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvlab.errors import ConfigError, FailedCells, KvlabError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Measurements that a claim rests on.")
app.add_typer(bench, name="bench")

ON_BOTH_SIDES = ["tiny-llama", "tiny-qwen2", "tiny-gemma3", "smollm2-135m"]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file, as one JSON object.")]
Set = Annotated[list[str], typer.Option("--set", help="Override: dotted.path=value. May be repeated.")]
Smoke = Annotated[bool, typer.Option(help="Use the file's [smoke] overrides.")]
Out = Annotated[Path, typer.Option(help="Folder of results.")]
Stale = Annotated[bool, typer.Option(help="Build on results of other code, weights or text.")]
Fresh = Annotated[bool, typer.Option(help="Discard what these cells have so far.")]
Retry = Annotated[bool, typer.Option("--retry", help="Try cells again that failed before.")]
Peers = Annotated[bool, typer.Option("--peers", help="Compare with transformers (needs the extra 'peers').")]

Policies = Annotated[
    list[str], typer.Option("--policy", help="A .toml file, or codec=int8, retention.size=512 and so on. May be repeated.")
]


def _beside(files: list[str]) -> None:
    """Parts named by import path may lie beside the file that names them."""
    sys.path[:0] = [str(Path(file).resolve().parent) for file in files if file.endswith(".toml")]


@contextmanager
def _resumable():
    """For commands that go on where they were stopped."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; what is finished is kept, run the same command to go on", file=sys.stderr)
        raise typer.Exit(130) from None


def write_json(path: Path | None, figures: dict) -> None:
    from kvlab.experiment.store import write_text

    if path is not None:
        write_text(path, json.dumps(figures, indent=1))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="An experiment, such as experiments/quickstart.toml, or a cell's config.toml.")],
    set_: Set = [],  # noqa: B006
    smoke: Smoke = False,
    dry_run: Annotated[bool, typer.Option(help="Say what it would take, and stop.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Find the most aggressive value of [search] that passes.")] = False,
    out: Out = Path("results"),
    accept_stale: Stale = False,
    fresh: Fresh = False,
    retry: Retry = False,
    table: Annotated[
        bool, typer.Option(help="Make the table; without it, only compute beside others in the same folder.")
    ] = True,
    launch: Annotated[str, typer.Option(help="Run it in several processes: local, or slurm (needs the extra 'slurm').")] = "",
    workers: Annotated[int | None, typer.Option(help="With --launch: how many; 2 by default.")] = None,
    slurm: Annotated[list[str], typer.Option(help="Option of the jobs: partition=long, time=120 (minutes). Repeatable.")] = [],  # noqa: B006
    wait: Annotated[bool, typer.Option(help="With --launch slurm: wait for the jobs and make the table.")] = True,
    json_: Json = None,
) -> None:
    """Run an experiment: every cell, resumable, then a table and a picture."""
    from kvlab.experiment import config
    from kvlab.experiment import run as running

    _beside([str(file)])
    if search and (launch or workers is not None or slurm or not wait or not table):
        raise ConfigError("--search is for one process; leave out --launch, --workers, --slurm, --no-wait and --no-table")
    if search and not dry_run:
        _search(file, set_, smoke, out, accept_stale, fresh, retry, json_)
    name, experiment = config.read(file)
    cells = _searched(experiment, set_, smoke) if search else running.asked(name, experiment, set_, smoke)
    if dry_run:
        _dry_run(name, cells, out, smoke, json_)
        return
    from kvlab.experiment import failures, store
    from kvlab.experiment.sweep import launch as launching
    from kvlab.experiment.sweep import slurm as jobs

    count = launching.checked(launch, workers, slurm, wait)
    place = running.folder(name, out, smoke)
    with _resumable():
        running.prepare(cells, place, fresh, retry)
        store.write_experiment(place, name, experiment, config.origin("run", file, set_, smoke), cells)
        words = launching.command(file, set_, smoke, out, accept_stale)
        if not launch:
            running.compute(name, cells, place, accept_stale)
        elif launch == "local":
            launching.local(words, count, cells, place)
        elif not jobs.run(words, count, cells, place, slurm, wait):
            print("the same command without --launch and what follows it makes the table, and helps")
            return
        if not table:
            failures.raise_found(cells, place)
            return
        _conclude(name, experiment, cells, place, json_)


def _dry_run(name: str, cells: list, out: Path, smoke: bool, json_: Path | None) -> None:
    from kvlab.experiment import run as running
    from kvlab.experiment.sweep import dry

    made = dry.estimate(cells, running.folder(name, out, smoke))
    dry.show(name, cells, made)
    write_json(json_, made.as_json(cells))


def _conclude(name: str, experiment, cells: list, place: Path, json_: Path | None) -> None:
    """The table of what is done, in JSON too, also where cells failed. Errors: FailedCells."""
    from kvlab.experiment import report
    from kvlab.experiment import run as running

    try:
        frame = running.conclude(name, experiment, cells, place)
    except FailedCells as error:
        if error.frame is not None:
            write_json(json_, report.as_json(error.frame))
        raise
    write_json(json_, report.as_json(frame))


def _search(
    file: Path, set_: list[str], smoke: bool, out: Path, accept_stale: bool, fresh: bool, retry: bool, json_: Path | None
) -> NoReturn:
    """`kvlab run --search`. Exit code 0 if a value passes, 1 if even the mildest fails, 3 where nothing is settled."""
    from kvlab.experiment.search import answer
    from kvlab.experiment.search import search as module

    with _resumable():
        found = module.search(file, set_, smoke, out, accept_stale, fresh, retry)
    answer.show(found)
    write_json(json_, answer.as_json(found))
    raise typer.Exit(module.CODE[found.outcome])


def _searched(experiment, set_: list[str], smoke: bool) -> list:
    """Cells of all values; a search visits few of them."""
    from kvlab.experiment.search import points

    return [cell for point in points.read(experiment, set_, smoke)[1] for cell in point.cells]


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="An experiment with a [check] table, such as experiments/regression/int8.toml.")],
    set_: Set = [],  # noqa: B006
    smoke: Smoke = False,
    out: Out = Path("results"),
    accept_stale: Stale = False,
    fresh: Fresh = False,
    retry: Retry = False,
    junit: Annotated[Path | None, typer.Option(help="Also write the findings as JUnit XML.")] = None,
    json_: Json = None,
) -> None:
    """Did a policy hurt? Exit code 0 pass, 1 fail, 3 underpowered."""
    from kvlab.experiment.regression import check as module

    _beside([str(file)])
    with _resumable():
        made = module.check(file, set_, smoke, out, accept_stale, fresh, retry)
    module.show(made)
    write_json(json_, made.as_json())
    if junit is not None:
        module.write_junit(made, file.stem, junit)
    raise typer.Exit(module.CODE[made.outcome])


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Results of an experiment or of a cell, such as results/quickstart.")],
    second: Annotated[Path, typer.Argument(help="Those to hold against them.")],
    json_: Json = None,
) -> None:
    """What differs between two results: cells, configs, digests, figures, and a verdict on the samples of both."""
    from kvlab.experiment.sweep import diff as module
    from kvlab.experiment.sweep import diff_table

    made = module.diff(first, second)
    diff_table.show(made)
    write_json(json_, made)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A results folder, such as results/quickstart.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html in the folder by default.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write TensorBoard scalars to this folder.")] = None,
    json_: Json = None,
) -> None:
    """A results folder as one page: verdicts, pictures, the table, kept tokens, samples, and how to run it again."""
    from kvlab.experiment import store
    from kvlab.report import page
    from kvlab.report import tensorboard as board

    _beside([store.source(folder)])
    path, figures = page.write(folder, out)
    print(path)
    for run in board.write(folder, tensorboard) if tensorboard is not None else ():
        print(run)
    write_json(json_, {**figures, "page": str(path)})


@app.command()
def claim(
    file: Annotated[Path | None, typer.Argument(help="An experiment with a [claim] table, one of experiments/claims.")] = None,
    set_: Set = [],  # noqa: B006
    smoke: Smoke = False,
    out: Out = Path("results"),
    keep: Annotated[Path | None, typer.Option(help="Also write the verdict and its picture to this folder.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write one page on all claims beside it, from what was kept.")] = None,
    accept_stale: Stale = False,
    fresh: Fresh = False,
    retry: Retry = False,
    json_: Json = None,
) -> None:
    """Is it true what an article says? Runs a claim's experiment and judges it; any verdict has exit code 0."""
    from kvlab.claims import page as pages
    from kvlab.claims import run as module

    if (file is None) == (page is None):
        raise ConfigError("give a claim, such as experiments/claims/int4_sparse.toml, or --page experiments/claims/README.md")
    if page is not None:
        count = pages.write(page)
        print(f"wrote {page}, {count} claims")
        write_json(json_, {"page": str(page), "claims": count})
    else:
        _beside([str(file)])
        with _resumable():
            made = module.claim(str(file), set_, smoke, out, accept_stale, fresh, keep, retry)
        module.show(made)
        write_json(json_, made.as_json())


@app.command()
def train(
    file: Annotated[Path, typer.Argument(help="A training, such as experiments/tiny_recall.toml.")],
    set_: Set = [],  # noqa: B006
    smoke: Smoke = False,
    out: Out = Path("results"),
    record: Annotated[bool, typer.Option("--record", help="Only record the queries and keys that a gate learns from.")] = False,
    accept_stale: Annotated[bool, typer.Option(help="Go on with other code than the steps so far.")] = False,
    fresh: Annotated[bool, typer.Option(help="Discard what there is so far.")] = False,
    json_: Json = None,
) -> None:
    """Train a model or a gate: steps, resumable from the last checkpoint, then an export and held-out figures."""
    from kvlab.parts import read_toml
    from kvlab.train import evict
    from kvlab.train.gate import config, loop
    from kvlab.train.loop import train as train_

    tables = read_toml(file)
    with _resumable():
        if evict.is_eviction(tables) or not config.is_gate(tables):
            if record:
                raise ConfigError(f"--record: {file} trains no read gate; it is for files with [gate] and [data]")
            how = evict.train if evict.is_eviction(tables) else train_
            summary = how(file, set_, smoke, out, accept_stale, fresh)
        elif record:
            summary = {"records": [str(folder) for folder in loop.record(file, set_, smoke, out)]}
        else:
            summary = {"gates": loop.train(file, set_, smoke, out, accept_stale, fresh)}
    print(json.dumps(summary, indent=1))
    write_json(json_, summary)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A model, such as smollm2-135m.")],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    text: Annotated[str, typer.Option(help="What it reads: docstrings, stdlib, licences, or a path.")] = "docstrings",
    contexts: Annotated[int, typer.Option(help="How many pieces of the text.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 1024,
    json_: Json = None,
) -> None:
    """Measure a model's heads, for the retentions q_filters and duoattention."""
    from kvlab.train import calibrate as module

    about = module.calibrate(model, text, contexts, length, out)
    print(out)
    write_json(json_, {**about, "filters": str(out)})


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A model, such as smollm2-135m or hf:org/name.")],
    again: Annotated[bool, typer.Option(help="Fetch and convert even if it is there.")] = False,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Accept the terms of the model's licence.")] = False,
    json_: Json = None,
) -> None:
    """Fetch a model into the user's cache folder and convert it."""
    from kvlab.models import fetch as fetching

    folder = fetching.find(name, again, accept_terms)
    print(folder)
    write_json(json_, {"model": name, "folder": str(folder)})


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help="A model, such as smollm2-135m; or give --dims.")] = None,
    dims: Annotated[
        str | None, typer.Option(help="layers=48,kv_heads=8,head_dim=128[,heads=…,hidden=…,ffn=…,vocab=…][,context=…]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 8,
    length: Annotated[int | None, typer.Option(help="Prompt tokens; the model's context, or 131072.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to make room for after the prompt.")] = 0,
    policy: Policies = [],  # noqa: B006
    dtype: Annotated[str | None, typer.Option(help="Short for a raw codec: float32, float16 or bfloat16.")] = None,
    memory: Annotated[str | None, typer.Option(help="What there is: 24GB, 24GiB or bytes.")] = None,
    exact: Annotated[bool, typer.Option(help="Take the workspace from XLA (compiles the model).")] = False,
    json_: Json = None,
) -> None:
    """What a model takes in memory under a policy, by level and layer, and what would fit."""
    from kvlab.plan import inputs, table

    _beside(policy)
    label, figures = inputs.answer(model, dims, batch, length, new_tokens, policy, dtype, memory, exact)
    table.show(figures, label)
    write_json(json_, table.as_json(figures, label))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat what to say.")],
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    policy: Policies = [],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    chat: Annotated[bool, typer.Option(help="Through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="The system message, with --chat.")] = None,
    json_: Json = None,
) -> None:
    """Print a continuation as it comes, then its speed and the bytes of its cache."""
    from kvlab import generate as module
    from kvlab.decode import Engine
    from kvlab.experiment import config
    from kvlab.models import load
    from kvlab.sampling import Sampling

    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty).rows(1)
    loaded = load(model)
    _beside(policy)
    label, policies = config.read_policies(policy, None, loaded.config)
    ids = module.prompt_ids(loaded, prompt, chat, system)
    show = lambda text: print(text, end="", flush=True)
    figures = module.generate(Engine(loaded), policies, ids, new_tokens, how, seed, show)
    print(
        f"\n\n{label}: {figures['tokens']} tokens, {figures['tokens_per_s']:.1f} tokens/s, first after "
        f"{figures['time_to_first_token']:.2f} s; cache {figures['resident_bytes']:,} bytes, "
        f"{figures['resident_ratio']:.3f} of the full fp32 cache"
    )
    write_json(json_, {"policy": label, **figures})


@bench.command()
def decode(
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 4096,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    tokens: Annotated[int, typer.Option(help="New tokens per repetition.")] = 32,
    pairs: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 7,
    peers: Peers = False,
    json_: Json = None,
) -> None:
    """Prefill and decode speed of the full fp32 cache, beside what the memory gives."""
    from kvlab.bench import decode as module

    write_json(json_, module.main(model, prompt, batch, tokens, pairs, peers))


@bench.command()
def flat(json_: Json = None) -> None:
    """A decode step with 128 live tokens at capacity 1k and 32k."""
    from kvlab.bench import flat as module

    write_json(json_, module.main())


@bench.command()
def select(
    length: Annotated[int, typer.Option(help="Tokens in the cache, a multiple of 64.")] = 32_768,
    sparsity: Annotated[float, typer.Option(help="Share that is left out.")] = 0.9,
    dtype: Annotated[str, typer.Option(help="Of the index keys: float32, float16, bfloat16 or int8.")] = "float16",
    pairs: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 15,
    json_: Json = None,
) -> None:
    """One attention over all tokens, and over what a gate picks: scoring, picking, reading."""
    from kvlab.bench import select as module

    write_json(json_, module.main(length, sparsity, dtype, pairs))


@bench.command()
def reorder(
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    length: Annotated[list[int], typer.Option(help="Prompt tokens. May be repeated.")] = [2048, 4096],  # noqa: B006
    codec: Annotated[str, typer.Option(help="What is placed: raw, int8 and so on.")] = "raw",
    pairs: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 5,
    json_: Json = None,
) -> None:
    """The share of prefill that placing keys and values takes, by layout, and what a second pass would."""
    from kvlab.bench import reorder as module

    write_json(json_, module.main(model, length, codec, pairs))


@bench.command()
def layouts(
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens in the cache; may be repeated.  [default: 4096, 32768, 65536]")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 9,
    fused: Annotated[int, typer.Option(help="Tokens for the policy of a gate, INT8 and tiles.")] = 65_536,
    sparsity: Annotated[float, typer.Option(help="Share that this policy leaves out.")] = 0.9,
    json_: Json = None,
) -> None:
    """Attention over everything by layout, codec and length; and a gate, INT8 and tiles in one policy."""
    from kvlab.bench import layouts as module

    write_json(json_, module.main(length or list(module.LENGTHS), pairs, fused, sparsity))


@bench.command()
def kernels(
    device: Annotated[str, typer.Option(help="gpu: speed too; cpu: tiny, step by step, right or wrong only.")] = "gpu",
    lower: Annotated[bool, typer.Option("--lower", help="Only lower every case for an NVIDIA GPU; needs none.")] = False,
    dtype: Annotated[list[str], typer.Option(help="float32 (only checked), bfloat16 or int8; all by default. Repeatable.")] = [],  # noqa: B006
    time_limit: Annotated[float, typer.Option(help="Seconds after which it stops with what it has.")] = 280.0,
    out: Annotated[Path | None, typer.Option(help="Folder of results; results/kernels for a GPU.")] = None,
    json_: Json = None,
) -> None:
    """Decode attention by kernels in every layout, beside jax's own: right, then how near to the memory's copy. Exit code 1 if a
    case is wrong, or with --lower does not lower."""
    from kvlab.bench.kernels import lower as lowering
    from kvlab.bench.kernels import run as module
    from kvlab.bench.kernels.setting import EXACT

    if lower:
        figures = lowering.main(tuple(dtype) or EXACT)
        failed = figures["failed"]
    else:
        figures = module.main(device, time_limit, dtype, out or (Path("results/kernels") if device == "gpu" else None))
        failed = [figures["wrong"]] if figures["wrong"] else []
    write_json(json_, figures)
    if failed:
        print(f"error: {'does not lower' if lower else 'wrong'}: {'; '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


@bench.command()
def agree(
    file: Annotated[Path, typer.Option(help="The experiment whose needle prompts are used.")] = Path(
        "experiments/quickstart.toml"
    ),
    peers: Peers = True,
    json_: Json = None,
) -> None:
    """Answers of the full cache against transformers on the same prompts and weights."""
    from kvlab.bench import agree as module

    write_json(json_, module.main(file, peers))


@bench.command()
def recall(
    gate: Annotated[str, typer.Option(help="A gate that ships, by name, or a .safetensors file.")],
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    text: Annotated[str, typer.Option(help="Held-out text: licences, docstrings, stdlib, or a path.")] = "licences",
    length: Annotated[int, typer.Option(help="Tokens of a context.")] = 2048,
    contexts: Annotated[int, typer.Option()] = 12,
    queries: Annotated[int, typer.Option(help="Positions per context, in its second half.")] = 64,
    sparsity: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.65, 0.9],  # noqa: B006
    picture: Annotated[Path | None, typer.Option(help="Where to draw it, as PNG.")] = None,
    json_: Json = None,
) -> None:
    """Share of attention that a gate and its alternatives read at equal numbers of tokens."""
    from kvlab.bench import recall as module

    write_json(json_, module.main(gate, model, text, length, contexts, queries, sparsity, picture))


@bench.command()
def parity(
    model: Annotated[list[str], typer.Option(help="May be repeated.")] = ON_BOTH_SIDES,
    method: Annotated[list[str], typer.Option(help="A retention, such as snapkv; all by default. May be repeated.")] = [],  # noqa: B006
    table: Annotated[Path | None, typer.Option(help="Where to write a table per method, as Markdown.")] = None,
    json_: Json = None,
) -> None:
    """Tokens that each retention keeps, against kvpress's (needs the extra 'peers')."""
    from kvlab.bench import parity as module

    write_json(json_, module.main(model, method, table))


@bench.command()
def sweep(
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    length: Annotated[int, typer.Option(help="Tokens of a context or document.")] = 2048,
    contexts: Annotated[int, typer.Option(help="Contexts, and documents.")] = 2,
    needles: Annotated[int, typer.Option(help="Needles of each context.")] = 10,
    continuation: Annotated[int, typer.Option(help="Tokens of a document that are fed through the cache.")] = 64,
    pairs: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 3,
    json_: Json = None,
) -> None:
    """Eight policies on the same prompts beside one alone, warm."""
    from kvlab.bench import sweep as module

    write_json(json_, module.main(model, length, contexts, needles, continuation, pairs))


@bench.command()
def beside(
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    method: Annotated[list[str], typer.Option(help="A retention, such as snapkv; all by default. May be repeated.")] = [],  # noqa: B006
    ratio: Annotated[list[float], typer.Option(help="Share of the context that is removed. May be repeated.")] = [0.5],  # noqa: B006
    length: Annotated[int, typer.Option(help="Tokens of a context.")] = 2048,
    contexts: Annotated[int, typer.Option(help="Contexts with needles.")] = 4,
    needles: Annotated[int, typer.Option(help="Needles, and so questions, of each context.")] = 10,
    documents: Annotated[int, typer.Option(help="Documents whose likelihood is compared; 0 for none.")] = 2,
    known: Annotated[int, typer.Option(help="Contexts whose questions tova and snapkv know beforehand; 0 for none.")] = 1,
    pairs: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 1,
    table: Annotated[Path | None, typer.Option(help="Where to write the rows, as Markdown.")] = None,
    json_: Json = None,
) -> None:
    """Answers, likelihood and time beside kvpress's own pipeline on the same prompts (needs the extra 'peers')."""
    from kvlab.bench import beside as module
    from kvlab.tasks import Needle

    task = Needle(length=length, contexts=contexts, needles=needles)
    write_json(json_, module.main(model, method, ratio, task, documents, known, pairs, table))


def main() -> None:
    try:
        app()
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code if isinstance(error, FailedCells) else 2)
