"""Every benchmark suite runs on tiny inputs, its results equal its peers', and its report is written."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_suite(tmp_path):
    # One process for all suites: importing the peers takes longer than running them.
    suites = sorted((ROOT / "benchmarks").glob("bench_*.py"))
    assert suites
    command = [sys.executable, "-m", "pytest", *suites, "--smoke", "--out", tmp_path, "-p", "no:cacheprovider"]
    run = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    for suite in suites:
        name = suite.stem.removeprefix("bench_")
        records = json.loads((tmp_path / f"{name}.json").read_text())
        assert records, name
        assert all(record["ours_s"] > 0 for record in records), name
        assert (tmp_path / f"{name}.png").stat().st_size > 1000, name
        assert f"{name}: CPU time" in run.stdout, name
        for record in records:
            assert record["case"] in run.stdout
