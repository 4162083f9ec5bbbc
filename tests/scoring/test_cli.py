"""The command line: what it prints, where, and with which exit code."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from support.rollout_files import rollout_rows, write_rollouts
from treepack import __version__
from treepack.scoring import commands, score_job
from treepack.scoring.commands import app


@pytest.fixture(autouse=True)
def _leave_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What silences libraries for a process would silence them for the tests that follow."""
    monkeypatch.setattr(commands, "_quiet_libraries", lambda: None)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def error_lines(result: Result) -> list[str]:
    assert "Traceback" not in result.stderr
    return [line for line in result.stderr.splitlines() if not line.startswith("[")]  # without the progress lines


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0], [0.5, 0.5, 0.5]]))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_help_documents_the_exit_codes():
    text = run("score", "--help").stdout
    for code in ("0    done", "1    failed", "2    options", "3    every group", "130  interrupted"):
        assert code in text
    assert "doctor" in run("--help").stdout


def test_version():
    assert run("--version").stdout == f"treepack {__version__}\n"


def test_summary(rollouts, out):
    result = run("score", rollouts, "--scorer", "none", "--out", out)
    assert result.exit_code == 0
    assert error_lines(result) == []
    for text in ("groups, samples", "2, 5", "packing ratio", "zero_advantage 3", "2 samples, 24 tokens", "seconds"):
        assert text in result.stdout
    names = ["report.json", "rows.png", "scored.parquet", "tokens.png", "tree.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert ", ".join(names) in result.stdout


def test_json_is_all_there_is_on_stdout(rollouts, out):
    result = run("score", rollouts, "--scorer", "none", "--json", "--out", out, "--limit-groups", 1)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["samples"] == 2
    assert report["options"]["limit_groups"] == 1
    assert report == json.loads((out / "report.json").read_text())


def test_progress_lines_begin_before_anything_is_loaded(rollouts, out):
    lines = run("score", rollouts, "--scorer", "none", "--out", out).stderr.splitlines()
    assert "loading libraries" in lines[0]
    assert all(line.startswith("[") for line in lines)
    assert "writing the report and the plots" in lines[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.npz"], "none.npz: no such file"),
        (["rollouts.csv"], "rollouts.csv: rollouts must be a .npz, .parquet, .jsonl file, got suffix '.csv'"),
        (["--scorer", "none", "--compare"], "--compare and --model need a scorer's model, got --scorer none"),
        (["--model", "none"], "none: no such model"),
        (["--out", "rollouts.jsonl/out"], "--out rollouts.jsonl/out: cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(rollouts, monkeypatch, args, message):
    monkeypatch.chdir(rollouts.parent)
    result = run("score", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert error_lines(result) == [f"error: {message}"]


def test_the_rollouts_are_not_written_over(tmp_path):
    path = write_rollouts(tmp_path / "scored.parquet", rollout_rows([[1.0, 0.0]]))
    content = path.read_bytes()
    result = run("score", path, "--scorer", "none", "--out", tmp_path)
    assert result.exit_code == 2
    assert error_lines(result) == [f"error: --out {tmp_path}: the job would write over the rollouts, {path}"]
    assert path.read_bytes() == content


def test_the_output_folder_is_tried_before_any_work(rollouts):
    result = run("score", "none.npz", "--out", rollouts / "out")
    assert result.exit_code == 2
    assert "cannot be written" in error_lines(result)[0]


@pytest.mark.parametrize("args", [["--ranks", 0], ["--token-budget", -1], ["--scorer", "best"], ["--bogus"]])
def test_wrong_options(args):
    result = run("score", *args)
    assert result.exit_code == 2
    assert args[0] in result.stderr


def test_everything_dropped_has_an_exit_code(rollouts, out):
    result = run("score", rollouts, "--scorer", "none", "--token-budget", 19, "--out", out)
    assert result.exit_code == 3
    assert error_lines(result) == ["error: every group was dropped, by reason and samples: oversize 5"]
    assert pq.read_table(out / "scored.parquet").column("reason").to_pylist() == ["oversize"] * 5


def test_an_unexpected_error_is_one_line_unless_asked_for(rollouts, out, monkeypatch):
    def fail(*args: Any) -> None:
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(score_job, "score_rollouts", fail)
    result = run("score", rollouts, "--out", out)
    assert result.exit_code == 1
    assert error_lines(result) == ["error: RuntimeError: no luck (--traceback shows where)"]
    assert "Traceback" in run("score", rollouts, "--out", out, "--traceback").stderr


def test_interrupted_while_loading(rollouts, out, monkeypatch):
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(score_job, "read_rollouts", interrupt)
    result = run("score", rollouts, "--out", out)
    assert result.exit_code == 130
    assert error_lines(result) == ["error: interrupted"]


def test_ctrl_c_leaves_what_was_finished(tmp_path, out):
    oversize = [{**row, "group_id": 9999} for row in rollout_rows([[1.0, 0.0]], length=101)]
    rows = oversize + rollout_rows([[1.0, 0.0]] * 4000)
    path = write_rollouts(tmp_path / "rollouts.npz", rows)
    args = ["score", path, "--scorer", "none", "--ranks", 1, "--steps", 1, "--token-budget", 100, "--out", out]
    # A shell's background jobs, of which this may be one, ignore the signal, and so do their children.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{listen}; from treepack.scoring.cli import main; main()", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not has_bytes(out / "scored.parquet", 20_000):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"]
    assert 0 < report["samples"] < len(rows)
    scored = pq.read_table(out / "scored.parquet")
    assert scored.num_rows == report["samples"] + len(oversize)
    steps = report["optimizer_steps"]
    assert set(scored.column("step").to_pylist()) == {None, *range(steps)}
    *progress, last = stderr.splitlines()
    assert last == f"error: interrupted after {steps} optimizer steps, which are written"
    assert all(line.startswith("[") for line in progress)  # and no warning of the group that was dropped
    assert "packing ratio" in stdout


def has_bytes(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size > size


def test_importing_the_commands_loads_nothing_heavy():
    code = "import sys, treepack.scoring.commands; print(*{'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_without_the_score_extra():
    code = "import sys; sys.modules['typer'] = None; from treepack.scoring.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: the treepack command needs typer: pip install 'treepack[score]'\n"
