"""`treepack bench` runs a checkout's suites and says what they missed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import treepack
from treepack.scoring import bench
from treepack.scoring.commands import app

HARNESS = Path(__file__).parents[2] / "benchmarks"

SUITE = """
from harness import Figure

def test_one(compare):
    def check():
        assert {equal}
    compare("a | b", ours=lambda: sum(range(1000)), peers={{"peer": lambda: sum(range(100000))}}, check=check,
            target={target}, figures=lambda record: {{"waste": Figure({waste}, at_most=2)}})
"""

PARTS = """
def test_parts(compare):
    order = []
    parts = [lambda i=i: order.append(i) for i in range(3)]
    compare("parts", ours=lambda: order.append("ours"), peers={"peer": parts}, check=lambda: None, rounds=6)
    assert order == ["ours", 0, "ours", "ours", 1, "ours", "ours", 2, "ours"]
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the real harness and one suite of its own."""
    folder = tmp_path / "checkout" / "benchmarks"
    folder.mkdir(parents=True)
    for name in ("harness.py", "conftest.py"):
        (folder / name).symlink_to(HARNESS / name)
    (folder.parent / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["benchmarks"]\n')
    monkeypatch.setattr(bench, "benchmarks_folder", lambda: folder)
    return folder


def write_suite(folder: Path, *, equal: bool = True, target: float = 1, waste: float = 1) -> None:
    (folder / "bench_made.py").write_text(SUITE.format(equal=equal, target=target, waste=waste))


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_a_suite_and_its_baseline(checkout: Path, tmp_path: Path) -> None:
    write_suite(checkout)
    first, second = tmp_path / "first", tmp_path / "second"
    assert run("made", "--out", first).exit_code == 0
    result = run("made", "--out", second, "--baseline", first)
    assert result.exit_code == 0, result.output
    assert {"made.json", "made.md", "made.png", "made.log", "summary.md", "summary.json"} == {
        path.name for path in second.iterdir()
    }
    (summary,) = json.loads((second / "summary.json").read_text())
    (speed,) = summary["speeds"]
    assert speed["peer"] == "peer"
    assert speed["speed"] > 10
    earlier = json.loads((first / "made.json").read_text())[0]
    assert speed["baseline"] == pytest.approx(earlier["peers_s"]["peer"] / earlier["ours_s"])
    assert "Beside the baseline" in (second / "summary.md").read_text()
    assert "a \\| b" in (second / "made.md").read_text()
    assert "made: test_one" in result.stderr


def test_missed_bounds(checkout: Path, tmp_path: Path) -> None:
    write_suite(checkout, target=1e9, waste=3)
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 4
    assert "to reach 1e+09 x" in result.stdout
    assert "waste 3, at most 2" in result.stdout
    if not torch.cuda.is_available():
        assert "no CUDA device on this machine" in " ".join(result.stdout.split())


def test_unequal_results_fail(checkout: Path, tmp_path: Path) -> None:
    write_suite(checkout, equal=False)
    result = run("made", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "failed: exit code 1, see made.log" in " ".join(result.stdout.split())


def test_a_peer_in_parts_is_spread_over_the_rounds(checkout: Path, tmp_path: Path) -> None:
    (checkout / "bench_parts.py").write_text(PARTS)
    result = run("parts", "--out", tmp_path / "out")
    assert result.exit_code == 0, (tmp_path / "out" / "parts.log").read_text()


def test_a_relative_folder_is_that_of_the_caller(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_suite(checkout)
    monkeypatch.chdir(tmp_path)
    assert run("made", "made", "--out", "out").exit_code == 0
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["speeds"]
    assert not (checkout.parent / "out").exists()


def test_skipped_cases_are_told(checkout: Path, tmp_path: Path) -> None:
    (checkout / "bench_made.py").write_text("import pytest\n\ndef test_one():\n    pytest.skip('needs a trace')\n")
    (tmp_path / "made.md").write_text("of an earlier run")
    result = run("made", "--out", tmp_path)
    assert result.exit_code == 0
    assert "made: 1 not run: needs a trace" in result.stdout
    summary = (tmp_path / "summary.md").read_text()
    assert "- 1 not run: needs a trace" in summary
    assert "earlier run" not in summary


def test_an_interruption_leaves_what_was_finished(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_suite(checkout)
    (checkout / "bench_other.py").write_text("")
    ran = bench._run

    def interrupted(folder: Path, suite: str, *args: Any) -> bench.SuiteResult:
        if suite == "other":
            raise KeyboardInterrupt
        return ran(folder, suite, *args)

    monkeypatch.setattr(bench, "_run", interrupted)
    assert run("made", "other", "--out", tmp_path / "out").exit_code == 130
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["suite"] == "made"


def test_folders_of_no_use(checkout: Path, tmp_path: Path) -> None:
    write_suite(checkout)
    result = run("made", "--out", checkout / "bench_made.py")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    result = run("made", "--out", tmp_path / "out", "--baseline", tmp_path / "none")
    assert result.exit_code == 2
    assert "'--baseline'" in result.stderr
    (tmp_path / "made.json").write_text("{}{")
    result = run("made", "--out", tmp_path / "out", "--baseline", tmp_path)
    assert result.exit_code == 2
    assert "holds no suite's records" in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_suite(checkout: Path, tmp_path: Path) -> None:
    write_suite(checkout)
    result = run("mad", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "the suite must be one of made, gpu, got 'mad'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_the_test_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = run("packing")
    assert result.exit_code == 2
    assert "pip install -e '.[test]'" in result.stderr


def test_a_wheel_has_no_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: Any = tmp_path / "lib" / "site-packages" / "treepack" / "__init__.py"
    monkeypatch.setattr(treepack, "__file__", str(installed))
    result = run("packing")
    assert result.exit_code == 2
    assert "treepack bench needs a checkout" in result.stderr
