"""These tests need a process of their own, with Triton's interpreter: `tests/kernels/test_interpreter.py` starts it."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
