"""What every benchmark suite shares: one interleaved comparison, its record, and the report of all records.

A suite is a pytest-benchmark module `bench_<name>.py` whose tests take the `compare` fixture (see conftest.py):

    def test_packing(compare: Compare) -> None:
        compare("64 x 8", ours=pack, peers={"TRL": trl_pack}, check=assert_equal, target=90)

`check` runs first and must raise when the results differ, so a wrong answer is never timed. Then every round times each
peer and ours in turn, in this process: other load on the machine hits all sides alike. A peer that takes long is cut
into parts that are spread over the rounds, so that it does not meet another machine than ours. The timer is the CPU
time of the process (all its threads), so waiting for a busy core is not counted.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

timer = time.process_time

Work = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """One more number of a case: shown in a column of its own, with its bound where there is one."""

    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        below = self.at_most is None or self.value <= self.at_most
        return above and below

    def __str__(self) -> str:
        bounds = [f"<= {self.at_most:g}" if self.at_most is not None else ""]
        bounds += [f">= {self.at_least:g}" if self.at_least is not None else ""]
        bound = " ".join(filter(None, bounds))
        mark = f" ({bound}{'' if self.reached else ' MISSED'})" if bound else ""
        return f"{self.value:.4g}{' ' + self.unit if self.unit else ''}{mark}"


@dataclass(frozen=True)
class Comparison:
    """One case of one suite. Times are seconds of CPU time, medians over the rounds; of peers in parts, their sums."""

    suite: str
    case: str
    ours_s: float
    peers_s: dict[str, float]
    target: float | None  # how many times faster than the first peer we want to be
    figures: dict[str, Figure] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)  # peers that cannot run here, and why

    def speedup(self, peer: str) -> float:
        return self.peers_s[peer] / self.ours_s

    @property
    def ratio(self) -> Figure | None:
        """Speed against the first peer, the one the target is about."""
        first = next(iter(self.peers_s), None)
        return None if first is None else Figure(self.speedup(first), "x", at_least=self.target)


class Compare:
    """Times ours against its peers; one instance a test, bound to that test's `benchmark` fixture."""

    def __init__(self, benchmark: BenchmarkFixture, suite: str, smoke: bool, records: list[Comparison]) -> None:
        self.smoke = smoke
        self._benchmark = benchmark
        self._suite = suite
        self._records = records

    def __call__(
        self,
        case: str,
        *,
        ours: Work,
        peers: Mapping[str, Work | Sequence[Work]],
        check: Callable[[], None],
        target: float | None = None,
        rounds: int = 5,
        peer_rounds: int | None = None,
        figures: Callable[[Comparison], Mapping[str, Figure]] | None = None,
        not_run: Mapping[str, str] | None = None,
    ) -> Comparison:
        """Check, time and record one case.

        Args:
            case: the row's name in the table.
            ours: what is measured; a call does the whole work once.
            peers: name -> the same work done another way, or the parts of it in order, spread evenly over the rounds.
                The first is the one `target` is about.
            check: raises when the results of ours and its peers differ; runs before anything is timed.
            target: times faster than the first peer we want to be.
            rounds: interleaved rounds; medians are reported, and sums of parts. One under `--smoke`.
            peer_rounds: rounds in which the peers run too, for peers that take long; default all. Parts all run once.
            figures: more columns, computed from the timed comparison.
            not_run: peers that cannot run here, and why; said under the table.
        """
        check()
        rounds = 1 if self.smoke else rounds
        times: dict[str, list[float]] = {name: [] for name in peers}
        rounds_begun = count()

        def time_peers() -> None:
            now = next(rounds_begun)
            for name, peer in peers.items():
                if isinstance(peer, Sequence):
                    turn = peer[now * len(peer) // rounds : (now + 1) * len(peer) // rounds]
                else:
                    turn = [peer] if now < (peer_rounds or rounds) else []
                for work in turn:
                    start = timer()
                    work()
                    times[name].append(timer() - start)

        self._benchmark.pedantic(ours, setup=time_peers, rounds=rounds, warmup_rounds=0)
        peers_s = {
            name: sum(times[name]) if isinstance(peer, Sequence) else statistics.median(times[name])
            for name, peer in peers.items()
        }
        record = Comparison(self._suite, case, self._benchmark.stats.stats.median, peers_s, target)
        record = replace(record, not_run=dict(not_run or {}))
        if figures is not None:
            record = replace(record, figures=dict(figures(record)))
        self._benchmark.extra_info.update(peers_s=times, ratio=str(record.ratio))
        self._records.append(record)
        return record


def suites(records: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Records by suite, in the order they were made."""
    by_suite: dict[str, list[Comparison]] = {}
    for record in records:
        by_suite.setdefault(record.suite, []).append(record)
    return by_suite


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def cells(records: list[Comparison]) -> list[list[str]]:
    """The ratio table of one suite, its header first."""
    peers = list(dict.fromkeys(name for r in records for name in r.peers_s))
    figures = list(dict.fromkeys(name for r in records for name in r.figures))
    rows = [["case", "ours", *peers, "speed", *figures]]
    for r in records:
        row = [r.case, format_seconds(r.ours_s)]
        for position, name in enumerate(peers):
            seconds = r.peers_s.get(name)
            text = "-" if seconds is None else format_seconds(seconds)
            if seconds is not None and position > 0:
                text += f" ({r.speedup(name):.3g}x)"
            row.append(text)
        row.append("-" if r.ratio is None else str(r.ratio))
        rows.append(row + [str(r.figures.get(name, "-")) for name in figures])
    return rows


def table(records: list[Comparison]) -> list[str]:
    """The ratio table of one suite as lines of text, columns aligned."""
    rows = cells(records)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:], *_not_run(records)]


def _not_run(records: list[Comparison]) -> list[str]:
    reasons = {name: reason for record in records for name, reason in record.not_run.items()}
    return [f"not run: {name}: {reason}" for name, reason in reasons.items()]


def markdown(suite: str, records: list[Comparison]) -> str:
    """The ratio table of one suite as Markdown."""
    header, *rows = ([cell.replace("|", "\\|") for cell in row] for row in cells(records))
    lines = [header, ["---"] * len(header), *rows]
    table_lines = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    not_run = "".join(f"\n{line}\n" for line in _not_run(records))
    return f"### {suite}\n\nCPU time, medians of interleaved rounds.\n\n{table_lines}\n{not_run}"


def write_report(records: list[Comparison], directory: Path) -> list[Path]:
    """Write `<suite>.json`, `.md` and `.png` of each suite into `directory`; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for suite, rows in suites(records).items():
        path = directory / f"{suite}.json"
        path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        text = path.with_suffix(".md")
        text.write_text(markdown(suite, rows))
        paths += [path, text, _draw(suite, rows, path.with_suffix(".png"))]
    return paths


def _draw(suite: str, records: list[Comparison], path: Path) -> Path:
    """Bars of the speed against each peer, one group a case, with the target as a mark."""
    # The object interface, not pyplot: no global state, and no display is looked for.
    from matplotlib.figure import Figure as Canvas

    peers = list(dict.fromkeys(name for r in records for name in r.peers_s))
    canvas = Canvas(figsize=(9, 1.4 + 0.45 * len(records) * max(len(peers), 1)), layout="constrained")
    axes = canvas.add_subplot()
    height = 0.8 / max(len(peers), 1)
    for p, name in enumerate(peers):
        shown = [(c, r.speedup(name)) for c, r in enumerate(records) if name in r.peers_s]
        where = [c + (p - (len(peers) - 1) / 2) * height for c, _ in shown]
        bars = axes.barh(where, [speed for _, speed in shown], 0.9 * height, label=name)
        backdrop = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a target mark may lie behind
        axes.bar_label(bars, fmt="%.3gx", fontsize=9, padding=6, bbox=backdrop, zorder=4)
    for c, r in enumerate(records):
        if r.target is not None:
            first = c - (len(peers) - 1) / 2 * height
            ends = (first - height / 2, first + height / 2)
            label = "target" if "target" not in axes.get_legend_handles_labels()[1] else None
            axes.plot([r.target, r.target], ends, color="black", linewidth=2, label=label)
    axes.axvline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(records)), [r.case for r in records])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("times faster than the peer (CPU time, median of interleaved rounds)")
    axes.set_title(f"treepack: {suite.replace('_', ' ')}")
    axes.spines[["top", "right"]].set_visible(False)
    if peers:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    canvas.savefig(path, dpi=150)
    return path
