"""Benchmark options, the `compare` fixture and the ratio tables (see harness.py).

`pytest benchmarks/bench_<name>.py` runs a suite, `--smoke` runs it once on tiny inputs, and `--out DIR` writes JSON,
a Markdown table and a PNG.
"""

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness import Compare, Comparison, suites, table, timer, write_report

RECORDS = pytest.StashKey[list[Comparison]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("treepack benchmarks")
    group.addoption("--smoke", action="store_true", help="one round on tiny inputs: does it run, are results equal")
    group.addoption("--out", type=Path, metavar="DIR", help="write <suite>.json, .md and .png into DIR")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORDS] = []
    # The ratio tables below take the place of pytest-benchmark's own.
    config.option.benchmark_quiet = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=timer))


@pytest.fixture
def smoke(request: pytest.FixtureRequest) -> bool:
    """Whether tiny inputs are wanted."""
    return bool(request.config.getoption("smoke"))


@pytest.fixture
def compare(request: pytest.FixtureRequest, benchmark: BenchmarkFixture, smoke: bool) -> Compare:
    """Times one case against its peers and keeps the record for the table."""
    suite = request.path.stem.removeprefix("bench_")
    return Compare(benchmark, suite, smoke, request.config.stash[RECORDS])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    records = config.stash[RECORDS]
    for suite, rows in suites(records).items():
        terminalreporter.section(f"{suite}: CPU time, medians of interleaved rounds")
        for line in table(rows):
            terminalreporter.write_line(line)
    directory = config.getoption("out")
    if records and directory is not None:
        for path in write_report(records, directory):
            terminalreporter.write_line(f"wrote {path}")
