"""Memory for padded batches, taken again once the tensors of an earlier batch are gone."""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
HEADROOM = 1.25  # batches differ a little in size: a new block also serves somewhat larger ones


class BlockPool:
    """Hands out blocks of memory and takes each back when no array or tensor over it is alive.

    A fresh block costs more than writing it: the system clears every page at its first touch. A batch that is still
    held, whole or by a slice of one tensor, keeps its block, so its values are safe.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def arrays(self, fields: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> dict[str, NDArray[Any]]:
        """Uninitialised arrays of the given (shape, dtype), all within one block."""
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in fields.values()]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        block = self._take(starts[-1])
        return {
            name: block[start : start + size].view(dtype).reshape(shape)
            for (name, (shape, dtype)), start, size in zip(fields.items(), starts, sizes)
        }

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        fitting = [i for i, block in enumerate(self._free) if block.nbytes >= num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        else:
            self._free.clear()  # outgrown
            block = np.empty(int(num_bytes * HEADROOM), dtype=np.uint8)
        # An array over a buffer, not a slice of the block: numpy would make the block itself the base of later views,
        # and this array's end would not tell that they are gone.
        lease = np.frombuffer(block.data, dtype=np.uint8)
        weakref.finalize(lease, self._free.append, block).atexit = False
        return lease
