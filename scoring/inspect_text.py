"""Text of tokens, for people who look at rollouts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.errors import ModelError

Decode = Callable[[NDArray[np.integer[Any]]], str]
"""Text of tokens (n,), special ones included. U+FFFD is a character that is cut, or a token that is not known."""

UNKNOWN = "\ufffd"


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
    return _showing_unknown(
        lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False)), tokenizer.get_vocab()
    )


def _read_with_transformers(folder: Path, gguf: dict[str, str]) -> Decode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    return _showing_unknown(
        lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        tokenizer.get_vocab(),
    )


def _showing_unknown(decode: Decode, vocabulary: Mapping[str, int]) -> Decode:
    """Tokenizers leave out what they do not know; a model's vocabulary may be larger, or another."""
    is_known = np.zeros(max(vocabulary.values()) + 2, bool)
    is_known[list(vocabulary.values())] = True

    def shown(ids: NDArray[np.integer[Any]]) -> str:
        known = is_known[np.minimum(ids, len(is_known) - 1)]
        if known.all():
            return decode(ids)
        starts = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist()]
        runs = np.split(ids, starts[1:])
        return "".join(decode(run) if known[at] else UNKNOWN * len(run) for at, run in zip(starts, runs))

    return shown
