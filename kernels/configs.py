"""Launch configurations of the Triton attention: a pure function of the shapes, the dtype and the device's limits.

There is no autotuning at run time: the tiles come from tables, and tests/kernels/aot compiles them ahead of time and
judges their registers, spills, shared memory and instructions.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

MAX_HEAD_DIM = 256

# More packed heads would leave a tile too few tokens: a group beyond this is cut in chunks, of at least half of it.
_MAX_PACK = 16
# Query rows of the smallest tiles of 16-bit kernels, where a pack that does not divide them costs most.
_FEWEST_ROWS = 32

_Family = Literal["blackwell", "hopper", "ampere", "consumer", "cdna"]


@dataclass(frozen=True)
class Device:
    """What a launch depends on.

    Attributes:
        arch: "sm_90" for CUDA capability 9.0, or an AMD name such as "gfx942".
        shared_memory: bytes a program may use.
    """

    arch: str
    shared_memory: int


@dataclass(frozen=True)
class Tile:
    """One kernel's tile and launch options.

    Attributes:
        block_m: query rows (tokens x packed heads) of a tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # Pinned: its default differs between versions of Triton.
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True)
class AttentionConfig:
    """All that the launchers need beside the tensors.

    Attributes:
        group: query heads per kv head.
        pack: query heads of a tile; tiles of one kv head's queries cover the group in `chunks`.
        head_dim: columns of q and k.
        value_dim: columns of v.
        precision: of float32 products, "ieee" or "tf32x3"; 16-bit products ignore it.
        forward: tile of the forward kernel.
        query_grad: tile of the kernel of dQ.
        key_grad: tile of the kernel of dK and dV.
    """

    group: int
    pack: int
    head_dim: int
    value_dim: int
    precision: str
    forward: Tile
    query_grad: Tile
    key_grad: Tile

    @property
    def chunks(self) -> int:
        """Tiles of query rows that share their tokens and their kv head."""
        return -(-self.group // self.pack)

    @property
    def constants(self) -> dict[str, Any]:
        """Keyword arguments that all launches share."""
        d, e = split_columns(self.head_dim)
        vd, ve = split_columns(self.value_dim)
        return {
            "GROUP": self.group,
            "PACK": self.pack,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "D": d,
            "E": e,
            "VD": vd,
            "VE": ve,
            "PRECISION": self.precision,
        }


def attention_config(
    head_dim: int, value_dim: int, dtype: torch.dtype, *, group: int, device: Device, allow_tf32: bool = False
) -> AttentionConfig:
    """Choose the tiles of the three kernels.

    Args:
        head_dim: columns of q and k, 1..256; powers of two and 80, 96, 192 waste nothing.
        value_dim: columns of v, likewise.
        dtype: float16, bfloat16 or float32.
        group: query heads per kv head.
        device: the device's architecture and limit.
        allow_tf32: float32 products may run as three tf32 ones (about 2^-22 relative) where the device can; otherwise
            they are IEEE's.

    Returns:
        The configuration.

    Raises:
        TypeError: `dtype` is another one.
        NotImplementedError: a head dim is too large, or the device is too old or too small.
    """
    for name, columns in (("head_dim", head_dim), ("value_dim", value_dim)):
        if not 1 <= columns <= MAX_HEAD_DIM:
            raise NotImplementedError(f"{name} must be in 1..{MAX_HEAD_DIM} for the Triton kernels, got {columns}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"dtype must be float16, bfloat16 or float32 for the Triton kernels, got {dtype}")
    family = _family(device)
    width = max(sum(split_columns(head_dim)), sum(split_columns(value_dim)))
    table = _FLOAT32_TILES if dtype == torch.float32 else _TILES[family]
    forward, query_grad, key_grad = next(tiles for limit, tiles in table.items() if width <= limit)
    return AttentionConfig(
        group=group,
        pack=_pack(group),
        head_dim=head_dim,
        value_dim=value_dim,
        # AMD has no tf32x3, and beyond 128 columns its three-part operands do not fit the registers.
        precision="tf32x3" if allow_tf32 and family != "cdna" and width <= 128 else "ieee",
        forward=forward,
        query_grad=query_grad,
        key_grad=key_grad,
    )


def _pack(group: int) -> int:
    """Query heads of a tile: all of a small group, else those that leave the fewest rows of its tiles idle."""
    if group <= _MAX_PACK:
        return group

    def rows(pack: int) -> float:
        """Rows that tiles take for a token's heads."""
        return -(-group // pack) * _FEWEST_ROWS / (_FEWEST_ROWS // pack)

    return min(range(_MAX_PACK, _MAX_PACK // 2 - 1, -1), key=rows)


def split_columns(columns: int) -> tuple[int, int]:
    """Cut columns into a power of two and a smaller one (80 = 64 + 16, 96 = 64 + 32), the last padded; or one block."""
    first = 16
    while 2 * first <= columns:
        first *= 2
    if columns <= first:
        return first, 0
    second = 16
    while second < columns - first:
        second *= 2
    return (first, second) if second < first else (2 * first, 0)


def _family(device: Device) -> _Family:
    if device.arch.startswith("gfx"):
        family: _Family = "cdna"
        enough = device.arch.startswith("gfx9") and device.shared_memory >= 65536
    else:
        capability = int(device.arch.removeprefix("sm_"))
        if capability in (90, 100, 103) and device.shared_memory >= 232448:
            family = "hopper" if capability == 90 else "blackwell"
        else:
            family = "ampere" if device.shared_memory >= 166912 else "consumer"
        enough = capability >= 80 and device.shared_memory >= 101376
    if not enough:
        raise NotImplementedError(
            f"device must be CUDA sm_80 or later with 99 KiB of shared memory a program, or an AMD gfx9 with 64 KiB, "
            f"got {device.arch} with {device.shared_memory} bytes"
        )
    return family


# By family: largest padded head dim -> tiles of forward, dQ, and dK and dV. A tile of dK and dV walks every query that
# sees one of its keys, so 64 keys waste half of what 128 do at short edges. But where warps cover more than a tile's
# rows they repeat each other's products, which costs more than the edges: 64 keys take one warpgroup, 128 two.
_Table = dict[_Family, dict[int, tuple[Tile, Tile, Tile]]]

_TILES: _Table = {
    "blackwell": {
        # 128 keys, since 64 run at half the rate of its tensor cores.
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
        128: (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(32, 128, 8, 3)),
        256: (Tile(128, 32, 8, 3), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
    },
    "hopper": {
        64: (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 2)),
        256: (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(32, 64, 8, 2)),
    },
    "ampere": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        # 80, 96 and 192: two column blocks take more registers than one.
        96: (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 64, 4, 2)),
        128: (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
        192: (Tile(64, 32, 8, 3), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
        256: (Tile(64, 32, 8, 3), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    },
    "consumer": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2)),
        96: (Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(32, 64, 4, 2)),
        128: (Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    },
    "cdna": {
        64: (Tile(128, 32, 4, 1), Tile(128, 64, 4, 1), Tile(64, 128, 4, 1)),
        128: (Tile(128, 32, 4, 1), Tile(128, 32, 4, 1), Tile(32, 128, 4, 1)),
        256: (Tile(128, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    },
}

# IEEE products keep a tile's rows and columns of operands in registers, so float32 tiles are small everywhere.
_FLOAT32_TILES = {
    64: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    256: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
