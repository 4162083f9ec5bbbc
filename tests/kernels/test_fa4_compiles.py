"""FlashAttention 4 with our mask, forward and backward, compiles for Hopper; running it needs one."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_fa4.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("cutlass") is None, reason="the flash-attn-4 package is not installed"),
]


@pytest.mark.parametrize(("head_dim", "window", "softcap"), [(64, 0, 0), (128, 0, 0), (256, 0, 0), (128, 512, 30)])
def test_forward_and_backward_compile_for_sm_90a(head_dim: int, window: int, softcap: float) -> None:
    # The target is read from the environment at the first import, so each compilation has a process of its own.
    # -P keeps the script's folder off the path, in which a module is called like a package: cuda.
    command = [sys.executable, "-P", str(SCRIPT), str(head_dim), str(window), str(softcap)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
