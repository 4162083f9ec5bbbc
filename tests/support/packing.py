"""Packing and gathering on a GPU, tested: sequences in every awkward shape, and memory that shows a wrong write."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CANARY = -77

# Each list is a row of sequences.
ROWS: dict[str, list[list[int]]] = {
    "one token": [[5]],
    "one-token sequences": [[5], [6], [5], [5], [6]],
    "duplicates": [[1, 2, 3], [1, 2, 3], [4], [1, 2, 3], [4]],
    "strict prefixes": [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3], [1, 2], [1]],
    "extensions": [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]],
    "forks of forks": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 2, 3, 4, 8], [1, 2, 3, 9, 9], [1, 7], [1, 2, 3, 4, 8, 8]],
    "one fork, many branches": [[1, 2, 3, k] for k in range(10, 21)],
    "a fork at every depth": [[1] * 9, *([1] * depth + [2, depth] for depth in range(9))],
    "nothing shared": [[k, 1, 2, 3] for k in range(9)],
    "the token 0": [[0, 0, 0], [0, 0], [0], [0, 0, 0, 0], [0, 1]],
    "matches anywhere": [*([k, 1] for k in range(9)), *([k, 1, 5] for k in range(8, -1, -1))],
    "large tokens": [[2**40, 2**40 + 1, 7], [2**40, 2**40 + 1, 8]],
    "late matches": [[2, 1, 1, 5], [3, 1, 1, 5], [4, 1, 1, 5], [1, 1, 1, 5], [1, 1, 1, 6], [4, 1, 1, 6]],
}


def flat(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """The tokens end to end, and the lengths."""
    return torch.tensor([token for ids in sequences for token in ids]), [len(ids) for ids in sequences]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal keys, dtypes and values."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key].cpu(), tensor), (key, found[key].tolist(), tensor.tolist())


@contextmanager
def guarded_memory() -> Iterator[None]:
    """New tensors start as rubbish and have canaries past their end."""
    guarded: list[Tensor] = []
    new_empty = torch.Tensor.new_empty

    def guard(shape: tuple[int, ...], dtype: torch.dtype, value: float) -> Tensor:
        count = math.prod(shape)
        storage = torch.full((count + 8,), CANARY, dtype=dtype)
        guarded.append(storage)
        return storage[:count].fill_(value).view(shape)

    def fake_new_empty(like: Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options:  # The interpreter's own.
            return new_empty(like, *size, **options)
        dtype = like.dtype if dtype is None else dtype
        return guard(size, dtype, torch.nan if dtype.is_floating_point else CANARY)

    def fake_new_zeros(like: Tensor, size: int, *, dtype: torch.dtype | None = None) -> Tensor:
        return guard((size,), like.dtype if dtype is None else dtype, 0)

    def fake_empty_like(like: Tensor) -> Tensor:
        return guard(tuple(like.shape), like.dtype, CANARY)

    with (
        mock.patch.object(torch.Tensor, "new_empty", fake_new_empty),
        mock.patch.object(torch.Tensor, "new_zeros", fake_new_zeros),
        mock.patch.object(torch, "empty_like", fake_empty_like),
    ):
        yield
    assert guarded
    for storage in guarded:
        assert (storage[-8:] == CANARY).all(), "a kernel wrote past an end"
