"""Processes of a run that die: the others end too, with the cause, and a resume loses and repeats nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.torchrun import TESTS, launch
from support.trl_end_to_end import prepare

SCRIPT = Path(__file__).parent / "faulty_runs.py"

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path)
    return tmp_path


def start(folder, *names):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, SCRIPT, folder, *names]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, timeout_s=300):
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err[-4000:]
    return out.splitlines()


def json_lines(lines):
    return [json.loads(line) for line in lines if line.startswith("[")]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_that_dies_or_fails_ends_the_run_with_the_cause(folder):
    runs = ("child_is_killed", "reward_raises")
    lines = finish(start(folder, *runs))
    assert [line for line in lines if line.endswith(" ok")] == [f"{name}: rank 0 ok" for name in runs]


def test_all_ranks_end_when_the_child_dies(folder):
    """Only the main process can see it; its end is what the launcher ends the others for."""
    result = launch(SCRIPT, folder, "child_is_killed_uncaught")
    assert result.returncode != 0
    assert "RuntimeError: the rollout child is gone without a word, exit code -9" in result.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_run_that_is_terminated_in_mid_step_takes_its_child_along_and_resumes_without_loss(folder):
    process = start(folder, "stays_in_step_3")
    groups = []
    for line in process.stdout:
        groups += json_lines([line])
        if line.strip().isdigit():
            child = int(line)
            break
    assert is_alive(child)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(child)

    assert len(groups) == 3, "two steps were trained, a third was scored"
    more = json_lines(finish(start(folder, "goes_on")))
    trained = [group for step in (*groups[:2], *more) for group in step]
    assert len(trained) == 16 == len(set(trained)), trained
    assert set(groups[2]) <= set(range(max(trained) + 1))
    assert set(range(12)) <= set(trained) | set(groups[2]), "nothing below is left out for good"
