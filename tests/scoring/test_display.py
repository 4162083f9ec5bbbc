"""What a job shows: a bar where there is a terminal, few plain lines where there is none."""

import io

import pytest
from rich.console import Console

from treepack.scoring import display
from treepack.scoring.display import BarDisplay, LineDisplay, TimeLeft


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def test_time_left_follows_the_mean_pace(clock):
    left = TimeLeft()
    assert left(0, 10) == "time left unknown"
    clock[0] += 8
    assert left(4, 10) == "12 s left"
    clock[0] += 92
    assert left(5, 10) == "1 min 40 s left"


def test_lines_come_at_phases_and_every_few_seconds(clock, capsys):
    with LineDisplay() as lines:
        lines.phase("loading")
        lines.advance(0, 100)
        for done in range(1, 101):
            clock[0] += 0.5
            lines.advance(done, 100)
        lines.phase("writing")
    captured = capsys.readouterr()
    assert captured.out == ""
    printed = captured.err.splitlines()
    assert printed[0] == "[   0.0 s] loading"
    assert printed[1] == "[   5.0 s] 10 of 100 samples, 45 s left"
    assert printed[-1] == "[  50.0 s] writing"
    assert len(printed) == 2 + 9


def test_the_bar_fits_a_terminal_of_80_columns(clock):
    stream = io.StringIO()
    with BarDisplay(Console(file=stream, force_terminal=True, color_system=None, width=80)) as bar:
        bar.phase("planning and scoring")
        bar.advance(0, 1137)
        clock[0] += 60
        bar.advance(300, 1137)
    shown = stream.getvalue()
    assert "300/1137 samples, 2 min 47 s left" in " ".join(shown.split())
