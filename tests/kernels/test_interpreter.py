"""Runs tests/kernels/interpreter in a process of its own: the interpreter is chosen before Triton is imported.

It computes bfloat16 wrongly (it multiplies raw bits), so these tests run float32 and float16; bfloat16 values wait for
a GPU (tests/gpu).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "interpreter").glob("test_*.py"))


def run_file(name: str, markers: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers, f"interpreter/{name}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.parametrize("name", FILES)
def test_under_the_interpreter(name: str) -> None:
    run_file(name, "not slow")


@pytest.mark.slow
def test_slow_ones_under_the_interpreter() -> None:
    run_file("", "slow")
