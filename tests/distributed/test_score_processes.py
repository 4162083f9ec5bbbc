"""`treepack score` under torchrun: the same files as one process, clear errors, and an end when a process dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.traces import trace_paths

COMMAND = [sys.executable, "-c", "from treepack.scoring.cli import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums are split alike on both sides

pytestmark = pytest.mark.slow


SCORERS = ("reward-model", "ebft", "log-prob")

# Every scorer on every trace in one start: importing takes longer than scoring. The first argument is the folder, the
# others are the traces.
JOBS = """
import sys
from pathlib import Path
from treepack.scoring import score_job
from treepack.scoring.display import make_display
from treepack.scoring.processes import joined_processes
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions

for plot in ("plot_tokens", "plot_rows", "plot_tree"):  # a second each
    setattr(score_job, plot, lambda path, *args: None)
out, *traces = map(Path, sys.argv[1:])
with joined_processes() as accelerator:
    for trace in traces:
        for scorer in ("reward-model", "ebft", "log-prob"):
            options = dict(ranks=4, steps=1, token_budget=4096, limit_groups=2, limit_rows=6, compare=True, record=True)
            options = ScoreOptions(rollouts=trace, scorer=scorer, out=out / trace.stem / scorer, **options)
            score_rollouts(options, make_display(quiet=True), accelerator)
"""


def run(*command, processes):
    launcher = TORCHRUN if processes == 2 else []
    command = [*launcher, *map(str, command)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def assert_same_files(one, two):
    assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())
    tables = [pq.read_table(folder / "scored.parquet") for folder in (one, two)]
    assert tables[0].num_rows > 0
    assert tables[1].equals(tables[0])
    reports = [json.loads((folder / "report.json").read_text()) for folder in (one, two)]
    for report in reports:
        compare = report.pop("compare")
        assert compare is None or compare["max_score_difference"] <= 1e-4
        del report["seconds"], report["options"]["out"]
    assert reports[1] == reports[0]


def test_two_processes_write_what_one_writes(tmp_path):
    traces = [path for path in trace_paths() if path.stem in ("rollouts", "game24_samples", "airline_turns")]
    for processes in (1, 2):
        result = run(sys.executable, "-c", JOBS, tmp_path / str(processes), *traces, processes=processes)
        assert result.returncode == 0, result.stderr[-3000:]
    for job in (f"{trace.stem}/{scorer}" for trace in traces for scorer in SCORERS):
        assert_same_files(tmp_path / "1" / job, tmp_path / "2" / job)
        records = [sorted((tmp_path / name / job / "record").iterdir()) for name in ("1", "2")]
        assert len(records[0]) > 0
        for one, two in zip(*records, strict=True):
            assert pq.read_table(two).equals(pq.read_table(one))


def test_the_command_under_torchrun(tmp_path):
    options = ["score", "--scorer", "none", "--limit-groups", 5, "--json"]
    results = [run(*COMMAND, *options, "--out", tmp_path / str(n), processes=n) for n in (1, 2)]
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]
        assert json.loads(result.stdout)["samples"] > 0  # the main process alone prints
    assert_same_files(tmp_path / "1", tmp_path / "2")


def test_ranks_that_the_processes_cannot_share(tmp_path):
    result = run(*COMMAND, "score", "--ranks", 3, "--scorer", "none", "--out", tmp_path, processes=2)
    assert result.returncode != 0
    assert "error: --ranks must be a multiple of the 2 processes, got 3" in result.stderr


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_process_that_dies_ends_the_job(tmp_path):
    command = [*TORCHRUN, *COMMAND, "score", "--steps", "1", "--token-budget", "2048", "--out", str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as launcher:
        scored = tmp_path / "scored.parquet"
        while launcher.poll() is None and not (scored.exists() and scored.stat().st_size > 1000):
            time.sleep(0.05)
        os.kill(max(children(launcher.pid)), signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert time.monotonic() - killed < 60
    assert "SIGKILL" in stderr  # torchrun says which process died, of what
