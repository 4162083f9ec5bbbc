"""Tree attention as a cascade of dense tiles over any attention primitive, forward and backward.

The visible pairs of a row fall into rectangles of (consecutive queries) x (keys): each block of tokens against itself
(a triangle), and each block's keys against the block's later descendants. A tile is one call to a dense primitive
that returns its output and log-sum-exp (LSE); tiles of the same queries merge by LSE. In the backward the global
output and LSE make every tile exact on its own: P = exp(S - LSE) holds for any subset of the keys, and
the gradients simply add up. This is the split-KV algebra of Flash-Decoding and of Hydragen / cascade inference, with a
backward.

Legend: K kv heads, G query heads per kv head, N tokens, R queries of a tile, L keys of a tile, D head dim, V value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class Tile:
    """One dense piece of the mask.

    Attributes:
        queries: the R query rows, a slice or a (R,) int64 index of distinct rows.
        keys: the L key rows, likewise.
        causal: queries and keys are the same rows and query r sees key l only if l <= r. The causal tiles of a
            schedule come first and cover every token once.
        masked: some pairs that `causal` would admit are invisible, so the primitive must compare bounds.
    """

    queries: Rows
    keys: Rows
    causal: bool
    masked: bool


TileT = TypeVar("TileT", bound=Tile)
TileT_contra = TypeVar("TileT_contra", bound=Tile, contravariant=True)


class Primitive(Protocol[TileT_contra]):
    """A dense attention over the pairs of one tile; some primitives need tiles that say more."""

    def forward(self, tile: TileT_contra, q_KGRD: Tensor, k_KLD: Tensor, v_KLV: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out (K, G, R, V), LSE (K, G, R)), natural log; a query without a key has out 0 and LSE -inf."""
        ...

    def backward(
        self,
        tile: TileT_contra,
        grad_out_KGRV: Tensor,
        q_KGRD: Tensor,
        k_KLD: Tensor,
        v_KLV: Tensor,
        out_KGRV: Tensor,
        lse_KGR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tile's (dq (K, G, R, D), dk (K, L, D), dv (K, L, V)) under the global `out` and `lse`."""
        ...


def cascade_forward(
    primitive: Primitive[TileT],
    tiles: Sequence[TileT],
    q_KGND: Tensor,
    k_KND: Tensor,
    v_KNV: Tensor,
    out_KGNV: Tensor,
) -> Tensor:
    """Attend tile by tile into `out_KGNV`, a (K, G, N, V) view of any strides; return the LSE (K, G, N) likewise."""
    lse_KGN = out_KGNV.new_empty(out_KGNV.shape[:3])
    for tile in tiles:
        queries, keys = tile.queries, tile.keys
        out, lse = primitive.forward(tile, q_KGND[:, :, queries], k_KND[:, keys], v_KNV[:, keys])
        if tile.causal:
            out_KGNV[:, :, queries] = out
            lse_KGN[:, :, queries] = lse
        elif isinstance(queries, slice):
            _merge(out_KGNV[:, :, queries], lse_KGN[:, :, queries], out, lse)
        else:
            merged_out, merged_lse = out_KGNV[:, :, queries], lse_KGN[:, :, queries]
            _merge(merged_out, merged_lse, out, lse)
            out_KGNV[:, :, queries] = merged_out
            lse_KGN[:, :, queries] = merged_lse
    return lse_KGN


def cascade_backward(
    primitive: Primitive[TileT],
    tiles: Sequence[TileT],
    grad_out_KGNV: Tensor,
    q_KGND: Tensor,
    k_KND: Tensor,
    v_KNV: Tensor,
    out_KGNV: Tensor,
    lse_KGN: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Sum the gradients of all tiles into `grads`: views (K, G, N, D), (K, N, D), (K, N, V) of any strides.

    `lse_KGN` is the normaliser the forward used in the end (sinks included).
    """
    dq_KGND, dk_KND, dv_KNV = grads
    for tile in tiles:
        queries, keys = tile.queries, tile.keys
        dq, dk, dv = primitive.backward(
            tile,
            grad_out_KGNV[:, :, queries],
            q_KGND[:, :, queries],
            k_KND[:, keys],
            v_KNV[:, keys],
            out_KGNV[:, :, queries],
            lse_KGN[:, :, queries],
        )
        if tile.causal:
            dq_KGND[:, :, queries] = dq
            dk_KND[:, keys] = dk
            dv_KNV[:, keys] = dv
        else:
            _add_rows(dq_KGND, 2, queries, dq)
            _add_rows(dk_KND, 1, keys, dk)
            _add_rows(dv_KNV, 1, keys, dv)


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a partial attention over further keys into (out, lse), in place."""
    out.lerp_(new_out, torch.sigmoid(new_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


def _add_rows(total: Tensor, dim: int, rows: Rows, addend: Tensor) -> None:
    if isinstance(rows, slice):
        total.narrow(dim, rows.start, rows.stop - rows.start).add_(addend)
    else:
        total.index_add_(dim, rows, addend)
