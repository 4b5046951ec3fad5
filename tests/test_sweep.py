"""Sweeps that survive: killed, shared, with cells that fail, merged by copying; what a run would take, and what differs."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tomli_w

import kvlab
from kvlab import cli, loop
from kvlab.errors import ConfigError, FailedCells, ResultsError
from kvlab.experiment import config, environment, group, report, sharing, store
from kvlab.experiment import run as runner
from kvlab.experiment.report import TIME_COLUMNS
from kvlab.experiment.sweep import diff, diff_table, dry, launch, slurm

ROOT = Path(__file__).resolve().parents[1]
POLICIES = [{"label": "full"}, {"retention": {"name": "window", "size": 64, "sinks": 4}}, {"codec": {"name": "int8"}}]
SWEEP = {
    "name": "sweep",
    "question": "does it survive?",
    "base": {
        "model": {"name": "tiny-recall"},
        "task": {"name": "mqar", "length": 128, "contexts": 3, "pairs": 8, "queries": 4},
    },
    "grid": {"seed": [0, 1], "policy": POLICIES},
}
BATCHES = 18
TIMES = [*TIME_COLUMNS, "started"]


def without_times(frame):
    return frame.drop(columns=[c for c in TIMES if c in frame])


def same(one, two):
    pd.testing.assert_frame_equal(without_times(one), without_times(two))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed sweep: its folder and its frame."""
    out = tmp_path_factory.mktemp("whole")
    return out / "sweep", kvlab.run(SWEEP, out=out)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Where processes of this module keep what they compiled, so that a restart is quick."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture
def start(tmp_path, programs):
    """Starts `kvlab run` on the sweep in a process of its own; leaves none behind."""
    started = []

    def begin(*options, sweep=SWEEP, command="run"):
        file = tmp_path / "sweep.toml"
        file.write_text(tomli_w.dumps({k: v for k, v in sweep.items() if k != "name"}))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        words = [sys.executable, "-m", "kvlab", command, str(file), f"--out={tmp_path / 'out'}", *options]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may not hear Ctrl-C
        try:
            process = subprocess.Popen(
                words, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        finally:
            signal.signal(signal.SIGINT, before)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def frame_of(out):
    """What `kvlab.run` returns of a finished folder, without computing anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "decode", lambda *args, **kwargs: pytest.fail("a batch was computed again"))
        return kvlab.run(SWEEP, out=out)


def finished(folder):
    return sorted(folder.glob("*/samples/*.json"))


def lines(folder):
    """How often each batch of each cell was logged."""
    found = [(path.parent.name, line["batch"]) for path in folder.glob("*/metrics.jsonl") for line in store.read_lines(path)]
    return sorted(found)


# --------------------------------------------------------------------------------------------------------------- kills


def killed(start, folder, kills, seed):
    """kill −9 at so many random moments, starting again each time; how many batches were there after each."""
    draw, seen = random.Random(seed), []
    for _ in range(kills):
        process = start()
        before = len(finished(folder))
        while process.poll() is None and len(finished(folder)) == before and len(seen) % 2:
            time.sleep(0.01)  # every second kill comes after something was done, so that the sweep gets on
        moment = time.monotonic() + draw.uniform(0, 0.5 if len(seen) % 2 else 4)
        while process.poll() is None and time.monotonic() < moment:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen.append(len(finished(folder)))
    return seen


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(start, tmp_path, whole, kills):
    contexts = {4: 3, 20: 12}[kills]
    sweep = {**SWEEP, "base": {**SWEEP["base"], "task": {**SWEEP["base"]["task"], "contexts": contexts}}}
    folder, expected = tmp_path / "out/sweep", whole[1] if kills == 4 else kvlab.run(sweep, out=tmp_path / "whole")
    seen = killed(lambda: start(sweep=sweep), folder, kills, seed=kills)
    assert 0 < seen[-1], "nothing was ever finished"
    kept = {path: path.stat().st_mtime_ns for path in finished(folder)}
    process = start(sweep=sweep)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items()), "a finished batch was computed again"
    same(expected, kvlab.run(sweep, out=tmp_path / "out"))
    assert lines(folder) == sorted((path.parents[1].name, int(path.stem)) for path in finished(folder))
    assert not list(folder.glob("**/samples/.*.part")), "what a killed process was writing is cleared away"


def test_a_torn_log_is_mended(tmp_path, whole):
    shutil.copytree(whole[0], tmp_path / "sweep")
    log = next((tmp_path / "sweep").glob("*/metrics.jsonl"))
    log.write_text(log.read_text()[:-10])
    frame_of(tmp_path)
    assert lines(tmp_path / "sweep") == lines(whole[0])


# -------------------------------------------------------------------------------------------------------------- sharing


def test_two_processes_share_a_folder(start, tmp_path, whole):
    team = [start(), start("--no-table")]
    ended = [(process.communicate()[1], process.returncode) for process in team]
    assert [code for _, code in ended] == [0, 0], ended
    assert lines(tmp_path / "out/sweep") == lines(whole[0]) and len(lines(whole[0])) == BATCHES
    same(whole[1], frame_of(tmp_path / "out"))


def test_a_batch_is_waited_for_and_taken_over(start, tmp_path, whole):
    """A process that is killed while it holds a batch lets go of it; another one that waited computes it."""
    folder, cells = tmp_path / "sweep", config.expand(config.read(SWEEP)[1])
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, time, pathlib\nfrom kvlab.experiment import sharing\n"
         f"with sharing.batch(pathlib.Path({str(folder)!r}), {group.group_name(cells[0])!r}, 1):\n"
         "    print('held', flush=True)\n    time.sleep(1000)"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        assert sharing.busy(folder, group.group_name(cells[0]), 1)
        looks = []

        def kill_once_it_waits(*_):
            looks.append(len(finished(folder)))
            holder.kill()
            holder.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner.time, "sleep", kill_once_it_waits)
            frame = kvlab.run(SWEEP, out=tmp_path)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert looks[0] == BATCHES - len(POLICIES), "everything else was done meanwhile"
    same(whole[1], frame)


def test_what_others_work_on_is_not_discarded(tmp_path):
    store.check_writable(tmp_path / "sweep")
    with sharing.at_work(tmp_path / "sweep"):
        with pytest.raises(ResultsError, match="another process works.*--fresh"):
            kvlab.run(SWEEP, out=tmp_path, fresh=True)


def test_folders_merge_by_copying(start, tmp_path, whole):
    """Half of the batches made here, half there: after `cp -r` a run only completes what is missing."""
    halves = tmp_path / "a/sweep", tmp_path / "b/sweep"
    for i, half in enumerate(halves):
        shutil.copytree(whole[0], half)
        for path in half.glob("*/samples/*"):
            if int(path.stem) % 3 != i:
                path.unlink()
    subprocess.run(["cp", "-r", f"{halves[1]}/.", halves[0]], check=True)
    assert len(finished(halves[0])) == 2 * BATCHES // 3
    made, real = [], group.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "decode", lambda *args, **kwargs: made.append(1) or real(*args, **kwargs))
        frame = kvlab.run(SWEEP, out=tmp_path / "a")
    assert len(made) == BATCHES // 3
    same(whole[1], frame)


def test_what_cannot_be_removed_is_not_taken_for_fresh(tmp_path, monkeypatch):
    def stays(path):
        raise OSError(errno.EBUSY, "busy")

    cells = config.expand(config.read(SWEEP)[1])
    store.discard(tmp_path, cells)
    (tmp_path / cells[1].run_id).mkdir()
    monkeypatch.setattr(shutil, "rmtree", stays)
    with pytest.raises(ResultsError, match=f"cannot remove .*{cells[1].run_id}: busy"):
        store.discard(tmp_path, cells)


def test_batches_of_other_code_are_refused_without_their_folders_env(tmp_path):
    run = store.Run(tmp_path, config.expand(config.read(SWEEP)[1])[0])
    run.open({"code": "a"})
    run.write(0, [], {}, {})
    (run.folder / "env.json").unlink()
    with pytest.raises(ResultsError, match="other code, weights, text or files than its folder says"):
        run.open({"code": "b"})
    run.open({"code": "a"})


def test_a_merge_of_other_code_is_refused(tmp_path, whole):
    shutil.copytree(whole[0], tmp_path / "sweep")
    path = finished(tmp_path / "sweep")[2]
    path.write_text(json.dumps({**json.loads(path.read_text()), "made": "elsewhere"}))
    with pytest.raises(ResultsError, match="other code, weights, text or files than its folder says"):
        kvlab.run(SWEEP, out=tmp_path)
    kvlab.run(SWEEP, out=tmp_path, accept_stale=True)


# ------------------------------------------------------------------------------------------------------------- failures


def failing(error, when):
    """`group.decode`, but for policies of which `when` holds."""
    real = group.decode

    def decode(engine, prompt, policies, *args, **kwargs):
        if when(policies):
            raise error
        return real(engine, prompt, policies, *args, **kwargs)

    return decode


def is_window(policies):
    return policies is not group.FULL and type(policies[0].retention).__name__ == "Window"


@pytest.mark.parametrize("error,code", [(RuntimeError("the codec\nbroke"), 1), (ConfigError("too small"), 2)])
def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, whole, capsys, error, code):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "decode", failing(error, is_window))
        with pytest.raises(FailedCells, match="2 of 6 cells failed, first: .*--retry") as stop:
            kvlab.run(SWEEP, out=tmp_path)
    assert stop.value.code == code
    good = whole[1][whole[1].policy != "window size 64 sinks 4"].reset_index(drop=True)
    same(good, stop.value.frame)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    traces = sorted((tmp_path / "sweep").glob("*/error.txt"))
    assert len(said) == len(traces) == 2 and all("window size 64 sinks 4, mqar, seed" in line for line in said)
    assert all(any(str(path) in line for line in said) for path in traces)
    assert "in decode" in traces[0].read_text() and " ".join(str(error).split()) in said[0]
    skipped = pytest.raises(FailedCells, frame_of, tmp_path)
    assert skipped.value.code == code and "skipping 2 cells that failed before; --retry" in capsys.readouterr().err
    same(whole[1], kvlab.run(SWEEP, out=tmp_path, retry=True))
    assert not list((tmp_path / "sweep").glob("*/error.txt"))


def test_a_cell_may_fail_before_it_has_a_batch(tmp_path, monkeypatch):
    """One whose gate is missing, and one whose needs the prompt's pass cannot meet, beside a good one."""
    policies = [
        {"label": "full"},
        {"retention": {"name": "gated", "gate": str(tmp_path / "missing.safetensors"), "ratio": 0.5}},
        {"retention": {"name": "kvzip", "ratio": 0.5}},
    ]
    with pytest.raises(FailedCells, match="2 of 3 cells failed") as stop:
        kvlab.run({**SWEEP, "grid": {"policy": policies}}, out=tmp_path)
    assert list(stop.value.frame["policy"]) == ["full"] and stop.value.code == 2
    assert len(list((tmp_path / "sweep").glob("*/error.txt"))) == 2


def test_other_code_may_try_a_failed_cell_again(tmp_path, monkeypatch):
    small = {**SWEEP, "grid": {"policy": POLICIES[1:2]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "decode", failing(RuntimeError("a bug"), is_window))
        pytest.raises(FailedCells, kvlab.run, small, out=tmp_path)
    monkeypatch.setattr(environment, "code_digest", lambda: "f" * 64)
    assert list(kvlab.run(small, out=tmp_path, retry=True)["policy"]) == ["window size 64 sinks 4"]


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, ResultsError("cannot write: No space left")])
def test_what_concerns_everybody_stops_at_once(tmp_path, fatal):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "decode", failing(fatal, is_window))
        with pytest.raises(KeyboardInterrupt if fatal is KeyboardInterrupt else ResultsError):
            kvlab.run(SWEEP, out=tmp_path)
    assert not list((tmp_path / "sweep").glob("*/error.txt"))


def test_one_cell_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    file = tmp_path / "one.toml"
    file.write_text(tomli_w.dumps({"question": "?", "base": {**SWEEP["base"], "seed": 0}}))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["kvlab", "run", "one.toml", "--set", "task.length=2000"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error: ", "failed: "))]
        assert stop.value.code == 2 and len(told) == 1 and "2000 tokens" in told[0] and "error.txt; --retry" in told[0]


# --------------------------------------------------------------------------------------------------------------- workers


def workers_of(process):
    """The ids of a process's children."""
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_workers_do_the_work_of_one_that_dies(start, tmp_path, whole):
    process = start("--launch", "local", "--workers", "2", f"--json={tmp_path / 'made.json'}")
    wait_for(lambda: len(workers_of(process)) == 2 and finished(tmp_path / "out/sweep"), process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    said, errors = process.communicate()
    assert process.returncode == 0 and "does it survive?" in said, errors
    assert "2 workers in" in errors and "--no-table" in errors and "worker 0 was killed by SIGKILL" in errors
    assert lines(tmp_path / "out/sweep") == lines(whole[0])
    same(whole[1], frame_of(tmp_path / "out"))
    assert len(json.loads((tmp_path / "made.json").read_text())["policies"]) == 3


def test_ctrl_c_stops_all_workers_and_says_how_to_go_on(start, tmp_path, whole):
    process = start("--launch", "local", "--workers", "2")
    wait_for(lambda: len(workers_of(process)) == 2 and finished(tmp_path / "out/sweep"), process)
    team = workers_of(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "run the same command to go on" in errors, errors
    assert not any(Path(f"/proc/{worker}").exists() for worker in team)


def test_workers_that_all_die_are_an_error(tmp_path):
    store.check_writable(tmp_path)
    cells = config.expand(config.read(SWEEP)[1])
    with pytest.raises(ResultsError, match="6 cells are not finished.*'alas'.*run the same command"):
        launch.local([sys.executable, "-c", "print('alas'); raise SystemExit(3)"], 2, cells, tmp_path)


def test_no_worker_is_left_where_the_next_cannot_be_started(tmp_path, monkeypatch):
    started, real = [], launch._start

    def second_fails(number, *more):
        if number == 1:
            raise ResultsError("no room")
        started.append(real(number, *more))
        return started[-1]

    monkeypatch.setattr(launch, "_start", second_fails)
    with pytest.raises(ResultsError, match="no room"):
        launch.local([sys.executable, "-c", "import time; time.sleep(1000)"], 2, [], tmp_path)
    assert len(started) == 1 and started[0].process.returncode == -signal.SIGTERM


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6, 8})
    assert launch.cores(2) == [[0, 2], [4, 6, 8]] and launch.cores(1) == [[0, 2, 4, 6, 8]]
    assert launch.cores(7) == [[0], [2], [4], [6], [8], [0], [2]]


@pytest.mark.parametrize(
    "options,message",
    [
        (["--launch", "locally"], "did you mean 'local'"),
        (["--launch", "local", "--workers", "0"], "--workers 0; allowed: 1 and more"),
        (["--workers", "3"], "write --launch local"),
        (["--slurm", "partition=x"], "write --launch slurm"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, monkeypatch, capsys, options, message):
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps({k: v for k, v in SWEEP.items() if k != "name"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvlab", "run", "sweep.toml", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- slurm

SLURM = {  # stands in for a cluster: jobs are processes, and the queue says which of them live
    "sbatch": """
        script = pathlib.Path(sys.argv[-1]).read_text()
        number = str(len(list(here.glob("*.job"))) + 1)
        (here / f"{number}.job").write_text(script)
        environment = {**os.environ, "SLURM_JOB_ID": number, "SLURM_NODELIST": "here", "SLURM_JOB_NODELIST": "here"}
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        job = subprocess.Popen(["bash", here / f"{number}.job"], env=environment, start_new_session=True, **silent)
        (here / f"{number}.pid").write_text(str(job.pid))
        print("Submitted batch job", number)
    """,
    "squeue": """
        for pid in here.glob("*.pid"):
            stat = pathlib.Path("/proc") / pid.read_text() / "stat"
            if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
                print(pid.stem)
    """,
    "scancel": """
        for number in sys.argv[1:]:
            os.killpg(int((here / f"{number}.pid").read_text()), 9)
    """,
    "srun": "",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Slurm's commands on the path; afterwards no job is left."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, body in SLURM.items():
        header = f"#!{sys.executable}\nimport os, pathlib, subprocess, sys\nhere = pathlib.Path({str(folder)!r})\n"
        (folder / name).write_text(header + textwrap.dedent(body))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    yield folder
    for pid in folder.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)


def test_jobs_over_one_folder(start, tmp_path, whole, cluster):
    process = start("--launch", "slurm", "--workers=2", "--slurm", "partition=long", "--slurm", "time=30")
    said, errors = process.communicate()
    assert process.returncode == 0 and "jobs 1, 2, each: " in errors and "does it survive?" in said, errors
    jobs = [path.read_text() for path in cluster.glob("*.job")]
    assert len(jobs) == 2 and all("--partition=long" in job and "--time=30" in job for job in jobs)
    assert lines(tmp_path / "out/sweep") == lines(whole[0])
    same(whole[1], frame_of(tmp_path / "out"))


def test_jobs_that_are_not_waited_for_go_on(start, tmp_path, cluster):
    process = start("--launch", "slurm", "--workers=1", "--no-wait")
    said, errors = process.communicate()
    assert process.returncode == 0 and "the same command without --launch" in said and "does it survive?" not in said, errors
    deadline = time.monotonic() + 300
    while len(finished(tmp_path / "out/sweep")) < BATCHES:
        assert time.monotonic() < deadline, [path.read_text() for path in tmp_path.glob("out/sweep/.slurm/*log*")]
        time.sleep(0.1)


def test_ctrl_c_cancels_the_jobs_that_are_waited_for(start, tmp_path, cluster):
    process = start("--launch", "slurm", "--workers=1")
    wait_for(lambda: finished(tmp_path / "out/sweep"), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and "run the same command to go on" in errors
    assert not subprocess.run(["squeue"], capture_output=True, text=True).stdout.split()


def test_no_job_is_left_where_the_next_cannot_be_submitted(monkeypatch):
    jobs, cancelled = iter([SimpleNamespace(job_id="1"), SimpleNamespace(job_id="2")]), []
    monkeypatch.setattr(slurm, "_cancel", cancelled.extend)
    with pytest.raises(StopIteration):
        slurm._all(lambda: next(jobs), 3)
    assert cancelled == ["1", "2"]


def test_what_slurm_lacks_is_said(tmp_path, cluster, monkeypatch):
    with pytest.raises(ConfigError, match="--slurm queue=long: .*queue.*partition"):
        slurm.run(["true"], 1, [], tmp_path, ["queue=long"], True)
    for name in SLURM:
        (cluster / name).unlink()
    monkeypatch.setenv("PATH", str(cluster))
    with pytest.raises(ConfigError, match="needs sbatch and squeue"):
        slurm.run(["true"], 1, [], tmp_path, [], True)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match="pip install 'kvlab\\[slurm\\]'"):
        slurm.run(["true"], 1, [], tmp_path, [], True)


# ----------------------------------------------------------------------------------------- one cell, a dry run, differences


def arrays(folder, index=1):
    """All that is stored of a batch, but for its times."""
    with np.load(folder / f"samples/{index:05d}.npz") as stored:
        found = {name: stored[name].tolist() for name in stored}
    return found, json.loads((folder / f"samples/{index:05d}.json").read_text())["rows"]


def test_a_cell_from_its_config_alone(tmp_path, whole, start, programs):
    """In a process of its own: the same tokens and rows as in the sweep."""
    origin = next(path.parent for path in whole[0].glob("*/config.toml") if "window" in path.read_text())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "kvlab", "run", str(origin / "config.toml"), f"--out={tmp_path}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "one cell: window size 64 sinks 4, mqar" in done.stdout, done.stderr
    alone = tmp_path / origin.name / origin.name
    assert (alone / "config.toml").read_text() == (origin / "config.toml").read_text()
    assert [arrays(alone, i) for i in range(3)] == [arrays(origin, i) for i in range(3)]


def test_the_answers_tokens_are_stored(whole):
    tokenizer = dry.described("tiny-recall")[1]
    for folder in (path.parent for path in whole[0].glob("*/config.toml")):
        stored, rows = arrays(folder)
        assert [tokenizer.decode([t for t in ids if t >= 0]) for ids in stored["answers"]] == [row["answer"] for row in rows]


def test_samples_lie_beside_the_table(whole):
    table, samples = (pd.read_parquet(whole[0] / f"{name}.parquet") for name in ("table", "samples"))
    assert len(table) == 6 and len(samples) == BATCHES * 4
    loaded = kvlab.results.load(whole[0])
    keys = ["run_id", "batch", "sample"]
    pd.testing.assert_frame_equal(
        samples.sort_values(keys, ignore_index=True)[[*keys, "answer", "correct", "read_ratio"]],
        loaded.sort_values(keys, ignore_index=True)[[*keys, "answer", "correct", "read_ratio"]],
    )
    assert not {"kept_positions", "entropy"} & set(samples)


def test_samples_of_unlike_tasks_are_one_table(tmp_path):
    """A column that holds numbers in one task and words in another."""
    for i, value in enumerate((3, "three")):
        run = store.Run(tmp_path, config.Cell({"name": "m"}, {"name": "needle"}, {}, seed=i))
        run.open({})
        run.write(0, [{"target": value, "steps": [1, 2], "cause": None}], {}, {})
    cells = [config.Cell({"name": "m"}, {"name": "needle"}, {}, seed=i) for i in range(2)]
    frame = report.samples(cells, tmp_path)
    assert list(frame["target"]) == ["3", "three"] and "steps" not in frame
    frame.to_parquet(tmp_path / "x.parquet")


def test_a_dry_run_says_what_a_run_takes(on_tiny, tiny, tmp_path, monkeypatch):
    """Programs and disk, beside what a run of tasks of both kinds compiled and wrote."""
    monkeypatch.setattr(dry, "described", lambda name: (tiny.config, tiny.tokenizer))
    tasks = [
        {"name": "needle", "length": 300, "contexts": 3, "needles": 2, "new_tokens": 6, "text": "stdlib"},
        {"name": "likelihood", "length": 128, "contexts": 2, "continuation": 8, "text": "stdlib"},
    ]
    policies = [*POLICIES[1:], {"retention": {"name": "snapkv", "ratio": 0.5}}]
    sweep = {**SWEEP, "base": {"model": {"name": "tiny"}}, "grid": {"task": tasks, "policy": policies}}
    cells = config.expand(config.read(sweep)[1])
    said = dry.estimate(cells, tmp_path / "sweep")
    assert said.batches == 12 and said.finished == 0 and said.basis.startswith("a guess") and 0 < said.minutes < 10
    for each in (loop.prefill, loop.fill, loop.decode):
        each.clear_cache()
    kvlab.run(sweep, out=tmp_path)
    made = {name: getattr(loop, name)._cache_size() for name in said.traces}
    assert said.traces == pytest.approx(made, rel=0.1), "within a tenth"
    files = [path for cell in cells for path in (tmp_path / "sweep" / cell.run_id).rglob("*") if path.is_file()]
    written = sum(path.stat().st_size for path in files)
    assert written / 1.5 < said.disk < written * 1.5
    again = dry.estimate(cells, tmp_path / "sweep")
    assert (again.finished, again.minutes, again.disk) == (12, 0, 0)
    other = dry.estimate(cells, tmp_path / "other")
    assert other.basis == "times of 12 finished batches" and 0 < other.minutes < 10


def test_a_dry_run_says_which_cells_would_fail(tmp_path, capsys):
    policies = [{"label": "full"}, {"retention": {"name": "gated", "gate": str(tmp_path / "none.safetensors"), "ratio": 0.5}}]
    cells = config.expand(config.read({**SWEEP, "grid": {"policy": policies}})[1])
    made = dry.estimate(cells, tmp_path / "sweep")
    dry.show("sweep", cells, made)
    assert made.traces == {"prefill": 1, "fill": 1, "decode": 1} and "would fail: gated" in capsys.readouterr().out


def test_a_dry_run_does_not_fetch(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    for name in ("smollm2-135m", "hf:nobody/nothing"):
        cells = config.expand(config.read({**SWEEP, "base": {**SWEEP["base"], "model": {"name": name}}})[1])
        made = dry.estimate(cells, tmp_path / "sweep")
        assert made.traces is None and made.missing == (name,) and made.batches == BATCHES
        dry.show("sweep", cells, made)
        assert f"kvlab fetch {name}" in capsys.readouterr().out


def test_two_results_beside_each_other(tmp_path, whole, monkeypatch, capsys):
    """Another window under the same label, one policy less and other code."""
    policies = [{"label": "full"}, {"label": "window size 64 sinks 4", "retention": {"name": "window", "size": 8}}]
    monkeypatch.setattr(environment, "code_digest", lambda: "f" * 64)
    kvlab.run({**SWEEP, "grid": {**SWEEP["grid"], "policy": policies}}, out=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvlab", "diff", str(whole[0]), "sweep", "--json", "d.json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    made, said = json.loads(Path("d.json").read_text()), capsys.readouterr().out
    assert not stop.value.code and made["only_second"] == []
    assert sorted(made["only_first"]) == ["int8, mqar, seed 0", "int8, mqar, seed 1"]
    changed = made["config"]["window size 64 sinks 4, mqar, seed 0"]
    assert changed["policy.retention.size"] == [64, 8] and changed["policy.retention.sinks"] == [4, None]
    assert list(made["made_with"]) == ["code"] and made["made_with"]["code"][0][1] == "f" * 64
    full, window = made["policies"]["full"], made["policies"]["window size 64 sinks 4"]
    assert full["samples"] == full["identical"] == window["samples"] == 24 > window["identical"]
    rows = [kvlab.results.load(folder).query("policy == 'window size 64 sinks 4'") for folder in (whole[0], "sweep")]
    difference = rows[1]["correct"].mean() - rows[0]["correct"].mean()
    assert window["accuracy"]["difference"] == pytest.approx(difference) and difference < 0
    assert window["figures"]["accuracy"] == pytest.approx([each["correct"].mean() for each in rows])
    assert "policy.retention.size: 64 → 8" in said and "made with other code" in said and "only in the first: int8" in said
    alone = diff.diff(whole[0], whole[0])
    assert not alone["config"] and alone["policies"]["int8"]["identical"] == 24


def test_brackets_in_labels_are_no_markup(capsys):
    label = "gate [int8] [/x]"
    frame = pd.DataFrame({"policy": [label], "resident_bytes": [1e6]})
    report.show(config.Experiment("what [/is] it?"), frame, [], [])
    verdict = {"difference": 0.0, "low": None, "high": None, "outcome": "underpowered"}
    policy = {"figures": {"accuracy": [0.5, None]}, "samples": 1, "identical": 1, "accuracy": verdict}
    diff_table.show({"only_first": [], "only_second": [], "config": {}, "made_with": {}, "policies": {label: policy}})
    with report.progress() as bar:
        bar.add_task(label)
    said = capsys.readouterr()
    assert said.out.count(label) == 2 and "what [/is] it?" in said.out and label in said.err
    assert "+0.0000 [-∞, +∞] underpowered" in said.out


def test_two_cells_beside_each_other(whole):
    full, window = (
        next(path.parent for path in whole[0].glob("*/config.toml") if word in path.read_text()) for word in ("full", "window")
    )
    made = diff.diff(full, window)
    assert list(made["policies"]) == ["full"] and "policy.retention.name" in next(iter(made["config"].values()))
    with pytest.raises(ResultsError, match="holds no runs"):
        diff.diff(whole[0], whole[0] / "nothing")
