"""The oldest Triton that is supported compiles the attention kernels at head dim 128 as the pinned one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OLDEST = "3.6"
GATE = f"""
import sys, pytest, triton
assert triton.__version__.startswith("{OLDEST}."), triton.__version__
arguments = ["-q", "-p", "no:cacheprovider", "-m", "", "aot/test_gate.py", "-k", "D128 and bfloat16 and G4"]
sys.exit(pytest.main(arguments))
"""


@pytest.mark.slow
def test_the_gate_passes_with_the_oldest_triton(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    installed = subprocess.run([*install, f"triton=={OLDEST}.*"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip has no Triton {OLDEST} here: {installed.stderr.strip()[-300:]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", GATE], cwd=HERE, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
