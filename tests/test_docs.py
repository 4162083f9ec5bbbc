"""The API page builds without a warning, and every public name is on it with its docstring."""

import subprocess
import sys
from pathlib import Path

import treepack

ROOT = Path(__file__).parents[1]


def test_api_page(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "build.py"), str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "Warn" not in built.stderr
    page = (tmp_path / "treepack.html").read_text()
    for name in treepack.__all__:
        assert f'id="{name}"' in page, name
    trainer = (tmp_path / "treepack" / "scoring" / "trl_hooks.html").read_text()
    assert 'id="ScoringGRPOTrainer"' in trainer


def test_every_public_name_has_a_docstring() -> None:
    for name in treepack.__all__:
        if name != "__version__":
            assert (getattr(treepack, name).__doc__ or "").strip(), name
