"""The built wheel installs and works beside the oldest and the newest supported triton, transformers and TRL."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The floors of pyproject.toml, and what pip finds newest within what `scoring/trl_layout.py` takes.
VERSIONS = {
    "oldest": ["triton==3.6.*", "transformers==5.17.*", "trl==1.16.*"],
    "newest": ["triton>=3.6", "transformers>=5.17", "trl==1.16.*"],
}
# What leans on each of the three: ops and their schemas, models in transformers, the trainer in TRL.
TESTS = ["kernels/test_ops.py", "kernels/test_hf_models.py", "scoring/test_trl_loss.py", "trl/test_layout.py"]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.parametrize("which", VERSIONS)
def test_wheel_beside(which: str, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    # What this environment has (torch above all) is seen from there too; what is installed there comes first.
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    upgrade = ["-U", "--upgrade-strategy", "only-if-needed"]
    run(python, "-m", "pip", "install", "-q", *upgrade, "torch==2.13.0", *VERSIONS[which], cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    home = run(python, "-c", "import treepack; print(treepack.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(tmp_path / "venv")
    run(python.with_name("treepack"), "doctor", cwd=tmp_path)
    run(python.with_name("treepack"), "score", "--limit-groups", "2", "--out", "scored", cwd=tmp_path)
    tests = [ROOT / "tests" / name for name in TESTS]
    run(python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, cwd=ROOT)
