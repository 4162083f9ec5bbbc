"""Training end to end: a served model over HTTP, TRL's spawned rollout child, the trainer; on one rank and on two."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.torchrun import TESTS, launch
from support.trl_end_to_end import prepare

SCRIPT = Path(__file__).parent / "end_to_end.py"

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path)
    return tmp_path


def assert_passed(result, *names, ranks=1):
    assert result.returncode == 0, result.stderr[-4000:]
    for name in names:
        for rank in range(ranks):
            assert f"{name}: rank {rank} ok" in result.stdout


def run(folder, *names, timeout_s=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, SCRIPT, folder, *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)


def test_one_process(folder):
    names = ("reward_function", "two_scorers", "lora", "resume")
    assert_passed(run(folder, *names), *names)


def test_data_parallel(folder):
    assert_passed(launch(SCRIPT, folder, "data_parallel"), "data_parallel", ranks=2)


def test_fully_sharded(folder):
    assert_passed(launch(SCRIPT, folder, "fully_sharded"), "fully_sharded", ranks=2)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_against_vllm(folder):
    assert_passed(run(folder, "lora_on_vllm", timeout_s=600), "lora_on_vllm")
