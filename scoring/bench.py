"""`treepack bench`: the checkout's benchmark suites one by one, and their ratios beside an earlier run's."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import treepack
from treepack.scoring.display import Display
from treepack.scoring.errors import OptionError

GPU_SUITE = "gpu"
OUTPUTS = ("json", "md", "png", "log")
SUMMARY, SUMMARY_JSON = "summary.md", "summary.json"
Speeds = Mapping[tuple[str, str], float]
"""Times faster than a peer, by case and peer."""


@dataclass(frozen=True)
class SpeedRow:
    """One case against one peer, in this run and in the baseline.

    Attributes:
        speed: times faster than the peer.
        baseline: the same in the baseline; None where it lacks the case.
    """

    suite: str
    case: str
    peer: str
    speed: float
    baseline: float | None

    @property
    def ratio(self) -> float | None:
        """The speed over the baseline's: the machine's own speed cancels out of it."""
        return None if self.baseline is None else self.speed / self.baseline


@dataclass
class SuiteResult:
    """What became of one suite.

    Attributes:
        seconds: wall time.
        problem: why it did not run or did not pass; None if it did.
        skipped: it cannot run here, which is no failure.
        missed: the bounds that were not reached, in words.
        left_out: why cases of it were skipped.
    """

    suite: str
    seconds: float = 0.0
    problem: str | None = None
    skipped: bool = False
    speeds: list[SpeedRow] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def benchmarks_folder() -> Path:
    """The checkout's benchmarks, which a wheel does not hold.

    Raises:
        OptionError: treepack is not installed from a checkout, or without what suites run on.
    """
    folder = Path(treepack.__file__).resolve().parents[2] / "benchmarks"
    if not (folder / "harness.py").exists():
        raise OptionError(
            "treepack bench needs a checkout, installed with `pip install -e .`: an installed wheel has no benchmarks"
        )
    if find_spec("pytest_benchmark") is None:
        raise OptionError("treepack bench needs pytest and its benchmark plugin: pip install -e '.[test]'")
    return folder


def suite_names(folder: Path) -> list[str]:
    """The suites of a benchmarks folder; the one for GPUs comes last."""
    return [*sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py")), GPU_SUITE]


def run_suites(
    folder: Path, suites: Sequence[str], out: Path, *, baseline: Path, smoke: bool, display: Display
) -> list[SuiteResult]:
    """Run suites in turn and write each one's log, JSON, table and plot, and a summary of all, to `out`.

    Args:
        folder: see `benchmarks_folder`.
        suites: of `suite_names`; each is run once.
        out: the folder written to; made where it is missing.
        baseline: a folder with an earlier run's JSON files.
        smoke: one round on tiny inputs; of the GPU's suite, what needs no GPU.
        display: told each test as it ends.

    Raises:
        OptionError: there is no such suite, the folder cannot be written, or the baseline cannot be read.
    """
    known = suite_names(folder)
    for name in suites:
        if name not in known:
            raise OptionError(f"the suite must be one of {', '.join(known)}, got {name!r}")
    baselines = {name: _baseline_speeds(baseline / f"{name}.json") for name in suites}
    out = out.resolve()  # suites run in the checkout
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / SUMMARY).write_text("")
    except OSError as error:
        raise OptionError(f"--out {out}: cannot be written: {error.strerror}") from error
    results = []
    for name, earlier in baselines.items():
        results.append(_run(folder, name, out, earlier, smoke, display))
        # After each suite: an interruption leaves what was finished.
        (out / SUMMARY_JSON).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        (out / SUMMARY).write_text(_markdown(results, out))
    return results


def _baseline_speeds(path: Path) -> Speeds:
    if not path.exists():
        return {}
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return {(r["case"], peer): s / r["ours_s"] for r in records for peer, s in r["peers_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"--baseline: {path}: holds no suite's records: {type(error).__name__}: {error}") from error


def _run(folder: Path, suite: str, out: Path, baseline: Speeds, smoke: bool, display: Display) -> SuiteResult:
    result = SuiteResult(suite)
    for suffix in OUTPUTS:
        (out / f"{suite}.{suffix}").unlink(missing_ok=True)
    if suite == GPU_SUITE:
        if not torch.cuda.is_available():
            result.problem, result.skipped = "no CUDA device on this machine", True
            return result
        command = [str(folder / "gpu" / "run.py"), "--out", str(out / GPU_SUITE)]
        command += ["--dry-run"] * smoke
    else:
        command = ["-m", "pytest", "-v", "-rs", str(folder / f"bench_{suite}.py"), "--out", str(out)]
        command += ["-p", "no:cacheprovider", *["--smoke"] * smoke]
    display.phase(suite)
    start = time.monotonic()
    code, lines = _stream([sys.executable, *command], folder.parent, out / f"{suite}.log", suite, display)
    result.seconds = round(time.monotonic() - start, 1)
    result.left_out = _skip_reasons(lines)
    if code:
        result.problem = f"exit code {code}, see {suite}.log: {lines[-1] if lines else 'no output'}"
    if (out / f"{suite}.json").exists():
        records = json.loads((out / f"{suite}.json").read_text())
        result.speeds = list(_speeds(records, baseline))
        result.missed = list(_missed(records))
    return result


def _stream(command: list[str], cwd: Path, log: Path, suite: str, display: Display) -> tuple[int, list[str]]:
    """Run a command, its output to the log and its finished tests to the display; its exit code and lines."""
    lines = []
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                if line.strip():
                    lines.append(line.strip())
                if ended := re.search(r"::(.+?) (?:PASSED|FAILED|SKIPPED|ERROR)", line):
                    display.phase(f"{suite}: {ended[1]}")
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def _skip_reasons(lines: Sequence[str]) -> list[str]:
    """Why pytest skipped tests, from its summary of them."""
    found = (re.fullmatch(r"SKIPPED \[(\d+)\] \S+: (.+)", line) for line in lines)
    return [f"{match[1]} not run: {match[2]}" for match in found if match]


def _speeds(records: list[dict[str, Any]], baseline: Speeds) -> Iterator[SpeedRow]:
    for r in records:
        for peer, seconds in r["peers_s"].items():
            speed = seconds / r["ours_s"]
            yield SpeedRow(r["suite"], r["case"], peer, speed, baseline.get((r["case"], peer)))


def _missed(records: list[dict[str, Any]]) -> Iterator[str]:
    for r in records:
        speed = next((s / r["ours_s"] for s in r["peers_s"].values()), None)
        if r["target"] is not None and speed is not None and speed < r["target"]:
            yield f"{r['case']}: {speed:.3g} x, to reach {r['target']:g} x"
        for name, figure in r["figures"].items():
            value, at_most, at_least = figure["value"], figure["at_most"], figure["at_least"]
            if at_most is not None and value > at_most:
                yield f"{r['case']}: {name} {value:.4g}, at most {at_most:g}"
            if at_least is not None and value < at_least:
                yield f"{r['case']}: {name} {value:.4g}, at least {at_least:g}"


def _markdown(results: Sequence[SuiteResult], out: Path) -> str:
    parts = ["# treepack bench\n"]
    for result in results:
        if result.problem:
            parts.append(f"### {result.suite}\n\n{'Not run' if result.skipped else 'Failed'}: {result.problem}\n")
        table = out / f"{result.suite}.md"
        if result.speeds or (table.exists() and not result.problem):
            parts.append(table.read_text())
        if result.missed:
            parts.append("Not reached:\n\n" + "".join(f"- {line}\n" for line in result.missed))
        if result.left_out:
            parts.append(f"Cases of {result.suite}:\n\n" + "".join(f"- {line}\n" for line in result.left_out))
    compared = [row for result in results for row in result.speeds if row.ratio is not None]
    if compared:
        lines = [
            f"| {r.suite} | {r.case} | {r.peer} | {r.speed:.3g} x | {r.baseline:.3g} x | {r.ratio:.2f} |"
            for r in compared
        ]
        header = "| suite | case | peer | speed | baseline | ratio |\n| --- | --- | --- | --- | --- | --- |\n"
        parts.append("### Beside the baseline\n\n" + header + "\n".join(lines) + "\n")
    return "\n".join(parts)


def print_results(results: Sequence[SuiteResult], console: Any) -> None:
    """Show the suites, what they missed, and where a speed left its baseline's."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("suite", "seconds", "cases", "against the baseline", "result"):
        table.add_column(column)
    for result in results:
        ratios = [row.ratio for row in result.speeds if row.ratio is not None]
        span = f"{min(ratios):.2f} .. {max(ratios):.2f}" if ratios else "-"
        status = "ok" if not result.missed else f"{len(result.missed)} bounds missed"
        if result.problem:
            status = f"{'not run' if result.skipped else 'failed'}: {result.problem}"
        cases = str(len({row.case for row in result.speeds}))
        table.add_row(result.suite, f"{result.seconds:.0f}", cases, span, status)
    console.print(table)
    for result in results:
        for line in result.missed:
            console.print(f"not reached: {result.suite}: {line}", markup=False, highlight=False)
        for line in result.left_out:
            console.print(f"{result.suite}: {line}", markup=False, highlight=False)
