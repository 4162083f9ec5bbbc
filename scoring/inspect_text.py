"""Text of tokens, for people who look at rollouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.errors import ModelError

Decode = Callable[[NDArray[np.integer[Any]]], str]
"""Text of tokens (n,), special ones included. Cut inside a character, it holds U+FFFD in its place."""


def load_tokenizer(path: Path) -> Decode:
    """The decoder of a tokenizer.

    Args:
        path: a tokenizer.json, a checkpoint folder, or a .gguf file.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    fast = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"{path}: no such tokenizer")
    try:
        if fast.suffix == ".json" and fast.is_file():
            return _read_json(fast)
        if path.is_dir():
            return _read_with_transformers(path, {})
        if path.suffix == ".gguf":
            return _read_with_transformers(path.parent, {"gguf_file": path.name})
    except Exception as error:  # whatever the readers of a damaged or unknown file run into
        raise ModelError(f"{path}: cannot be read: {str(error).strip().splitlines()[0]}") from error
    raise ModelError(f"{path}: a tokenizer must be a tokenizer.json, a checkpoint folder or a .gguf file")


def _read_json(path: Path) -> Decode:
    from tokenizers import Tokenizer  # without transformers, which takes long to import

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _read_with_transformers(folder: Path, gguf: dict[str, str]) -> Decode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    return lambda ids: str(
        tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
