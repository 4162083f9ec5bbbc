"""Nothing compiles in a process whose Triton interprets."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]
