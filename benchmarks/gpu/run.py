"""Everything that needs a GPU, in one command of under 8 minutes: the tests, then the benchmarks.

    python benchmarks/gpu/run.py --out DIR
    python benchmarks/gpu/run.py --dry-run [--out DIR]

Sections run one after the other, each in a process of its own that ends when its time is up, so that neither a crash
nor a hang in one costs the others. Rows are on disk (DIR/rows.jsonl) as they are measured; results.json, results.md,
attention.png and tests.log lie beside them in the end. Nothing need be installed but torch, triton, numpy, matplotlib,
pytest, pytest-benchmark and hypothesis: treepack is taken from this checkout.

--dry-run needs no GPU: it imports and collects everything, plans and schedules all workloads at a reduced size, runs
what a CPU can run, and writes all files.

Exit code: 0 if every section ended in its time and every test passed, 1 if not, 2 without a GPU.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch

from measured_rows import Row, RowFile

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# Seconds of each section; with the starts of their processes they stay under 8 minutes.
TESTS_S, ATTENTION_S, PACKING_S, REPORT_S = 180, 190, 35, 25
# A measurement may still be under way when its section's time is up.
GRACE_S = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="check all that needs no GPU")
    options = parser.parse_args()
    if options.out is None and not options.dry_run:
        parser.error("--out is needed, except with --dry-run")
    if not torch.cuda.is_available() and not options.dry_run:
        print("run.py needs a CUDA GPU; --dry-run checks what does not", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        # Sections run elsewhere: a relative folder is the caller's.
        directory = Path(options.out or scratch).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        return run_sections(directory, dry_run=options.dry_run)


def run_sections(directory: Path, *, dry_run: bool) -> int:
    """Run all sections and write the report; returns the exit code."""
    rows_path = directory / "rows.jsonl"
    rows_path.unlink(missing_ok=True)
    rows = RowFile(rows_path)
    test_row = run_tests(directory / "tests.log", dry_run=dry_run)
    rows.append(test_row)
    failed = test_row.status != "ok"
    for name, seconds in (("attention", ATTENTION_S), ("packing", PACKING_S)):
        command = [
            sys.executable,
            str(HERE / f"{name}_section.py"),
            "--rows",
            str(rows_path),
            "--seconds",
            str(seconds),
        ]
        status = run_boxed(command + ["--dry-run"] * dry_run, seconds + GRACE_S)
        if status != "ok":
            rows.append(Row(name, "the section", "", status))
            failed = True
    report = run_boxed([sys.executable, str(HERE / "report.py"), "--rows", str(rows_path)], REPORT_S)
    return int(failed or report != "ok")


def run_tests(log: Path, *, dry_run: bool) -> Row:
    """Run tests/gpu; on several processes where pytest-xdist is there, since most of their time goes into compiling."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider", "--durations=10"]
    # The versions on a GPU machine are not the pinned ones; their warnings are not what is tested here.
    command += ["-o", "filterwarnings=default"]
    if dry_run:
        command.append("--collect-only")
    elif find_spec("xdist") is not None:
        command += ["-n", str(min(12, os.cpu_count() or 1))]
    with log.open("w") as output:
        status = run_boxed(command, TESTS_S, stdout=output)
    # Lines of progress alone: the summary names failures once more.
    progress = "\n".join(line for line in log.read_text(errors="replace").splitlines() if "%]" in line)
    found = re.findall(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", progress)
    values = {f"{name.lower()}_count": float(found.count(name)) for name in sorted(set(found))}
    return Row("tests", "tests/gpu", "collected" if dry_run else f"{found.count('PASSED')} passed", status, values)


def run_boxed(command: list[str], seconds: float, stdout: IO[str] | None = None) -> str:
    """Run a command in the root; "ok", or how it ended. All that it started ends with it."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(os.environ), stdout=stdout, start_new_session=True
    ) as process:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return "ok" if code == 0 else f"exit code {code}"


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """With treepack from this checkout, installed or not, and the workloads."""
    folders = [str(ROOT / "src"), str(ROOT / "benchmarks"), inherited.get("PYTHONPATH", "")]
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    raise SystemExit(main())
