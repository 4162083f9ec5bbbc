"""Text of tokens, for people who look at rollouts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.errors import ModelError

Decode = Callable[[NDArray[np.integer[Any]]], str]
"""Text of tokens (n,), special ones included. Cut inside a character, it holds U+FFFD in its place."""


def load_tokenizer(path: Path, vocab_size: int) -> Decode:
    """The decoder of a tokenizer.

    Args:
        path: a tokenizer.json, a checkpoint folder, or a .gguf file.
        vocab_size: the vocabulary that the rollouts need, their largest token + 1.

    Raises:
        ModelError: there is no tokenizer, it cannot be read, or it does not know all tokens.
    """
    decode, known = _read(path)
    if known < vocab_size:
        raise ModelError(f"{path}: must know the rollouts' tokens, up to {vocab_size - 1}, got a tokenizer of {known}")
    return decode


def _read(path: Path) -> tuple[Decode, int]:
    """The decoder, and its largest token + 1."""
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


def _read_json(path: Path) -> tuple[Decode, int]:
    from tokenizers import Tokenizer  # without transformers, which takes long to import

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False)), _size(tokenizer.get_vocab())


def _read_with_transformers(folder: Path, gguf: dict[str, str]) -> tuple[Decode, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)

    def decode(ids: NDArray[np.integer[Any]]) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode, _size(tokenizer.get_vocab())


def _size(vocabulary: Mapping[str, int]) -> int:
    return 1 + max(vocabulary.values())
