"""What the layout of the project promises: light imports, one-way imports, and a folder that shadows no package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import treepack

ROOT = Path(__file__).parents[1]


def run(code, cwd):
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_folders_are_no_packages_of_their_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "scoring" / "__init__.py").exists()
    for name in ("kernels", "scoring"):
        link = ROOT / "src" / "treepack" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_hugging_face_kernels_wins_in_the_root():
    """TRL and transformers import a package called `kernels`: ours must not stand in its way."""
    out = run("import transformers, trl, kernels; print(kernels.get_kernel.__module__)", ROOT)
    assert out.strip().startswith("kernels.")


@pytest.mark.parametrize(
    "imported", ["treepack", "treepack.kernels.ops", "treepack.kernels.hf_attention", "treepack.kernels.tree_support"]
)
def test_imports_are_light(imported, tmp_path):
    heavy = ("triton", "transformers", "trl", "accelerate", "matplotlib", "pyarrow", "typer", "rich")
    heavy += ("torch",) if imported == "treepack" else ()
    code = f"import sys, {imported}; print([m for m in {heavy!r} if m in sys.modules])"
    assert run(code, tmp_path).strip() == "[]"


def test_every_public_name_loads_from_its_home():
    for name in treepack.__all__:
        assert getattr(treepack, name) is not None
    with pytest.raises(AttributeError, match="module 'treepack' has no attribute 'nonsense'"):
        _ = treepack.nonsense
    assert set(treepack.__all__) <= set(dir(treepack))


def imports_of(path):
    """The treepack modules a file imports, also inside functions, except for type checking."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    return {
        node.module.removeprefix("treepack.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node not in typing_only and (node.module or "").startswith("treepack.")
    }


def test_imports_go_one_way():
    graph = {
        f"{folder}.{path.stem}": imports_of(path)
        for folder in ("kernels", "scoring")
        for path in (ROOT / folder).glob("*.py")
    }
    for name, imports in graph.items():
        assert name.startswith("scoring") or not any(imported.startswith("scoring") for imported in imports), name

    def reached(name, path=()):
        assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
        for imported in graph.get(name, ()):
            reached(imported, (*path, name))

    for name in graph:
        reached(name)


def test_kernels_need_torch_numpy_and_triton_alone():
    allowed = {"torch", "numpy", "triton", "treepack", *sys.stdlib_module_names}
    lazily = {"hf_attention.py": {"transformers"}, "hybrid.py": {"transformers", "tree_recurrence"}}
    for path in (ROOT / "kernels").glob("*.py"):
        tree = ast.parse(path.read_text())
        imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        roots = {name.split(".")[0] for name in imports}
        assert roots <= allowed | lazily.get(path.name, set()), path.name
