"""Compile the attention kernels for GPUs that are not there, through their launchers, and judge the machine code."""

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from treepack.kernels import gpu
from treepack.kernels.configs import Device, attention_config, split_columns
from treepack.kernels.plan import TreePlan

KERNELS = ("forward_kernel", "query_kernel", "key_kernel")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Target:
    device: Device
    gpu: GPUTarget

    @property
    def is_cuda(self) -> bool:
        return self.gpu.backend == "cuda"


def _cuda(capability: int, shared_memory: int) -> Target:
    return Target(Device(f"sm_{capability}", shared_memory), GPUTarget("cuda", capability, 32))


TARGETS = {
    target.device.arch: target
    for target in (
        _cuda(80, 166912),
        _cuda(89, 101376),
        _cuda(90, 232448),
        _cuda(100, 232448),
        _cuda(120, 101376),
        Target(Device("gfx942", 65536), GPUTarget("hip", "gfx942", 64)),
    )
}


@dataclass(frozen=True)
class Case:
    """One configuration; `features` are window, softcap, sinks and the gradient of lse, all or none."""

    arch: str
    dims: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    features: bool = True
    group: int = 4
    tf32: bool = False

    def __str__(self) -> str:
        dims = f"D{self.dims[0]}" if self.dims[0] == self.dims[1] else f"D{self.dims[0]}:{self.dims[1]}"
        dtype = "tf32x3" if self.tf32 else str(self.dtype).removeprefix("torch.")
        return f"{self.arch} {dims} {dtype} G{self.group} {'all' if self.features else 'none'}"


class _Driver:
    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target.arch)  # Kernels are cached by it.

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compile_only(target: GPUTarget, launched: Callable[[str, tuple[int, ...], Any], None]) -> Iterator[None]:
    """Launches compile for `target` and are reported as (kernel name, grid, compiled kernel); nothing runs."""
    run = JITFunction.run

    def compile_(self: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        launched(self.__name__, grid, run(self, *args, grid=grid, warmup=True, **kwargs))

    with mock.patch.object(driver, "_active", _Driver(target)), mock.patch.object(JITFunction, "run", compile_):
        yield


def launch_all(case: Case, num_tokens: int = 100) -> None:
    """Forward and backward of zeros through the launchers."""
    head_dim, value_dim = case.dims
    kv_heads = 2
    heads = kv_heads * case.group

    def zeros(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    plan = TreePlan.from_position_ids(torch.arange(num_tokens))
    inputs = (
        zeros(num_tokens, heads, head_dim),
        zeros(num_tokens, kv_heads, head_dim),
        zeros(num_tokens, kv_heads, value_dim),
        zeros(heads, dtype=torch.float32) if case.features else None,
    )
    options: dict[str, Any] = {
        "scale": 0.1,
        "window": 64 if case.features else None,
        "softcap": 20.0 if case.features else None,
        "config": attention_config(
            *case.dims,
            case.dtype,
            group=case.group,
            device=TARGETS[case.arch].device,
            allow_tf32=case.tf32,
        ),
    }
    out, lse = gpu.attention_forward(*inputs, plan, **options)
    grad_lse = zeros(heads, num_tokens, dtype=torch.float32) if case.features else None
    gpu.attention_backward(torch.zeros_like(out), grad_lse, *inputs, out, lse, plan, **options)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes and does.

    Attributes:
        tile: rows x keys, warps, stages.
        registers: of a thread.
        spill: bytes a thread keeps in local memory for want of registers.
        shared: bytes of a program.
        instructions: counts by mnemonic.
        serialized: ptxas could not keep asynchronous matmuls in flight (C7515).
        products: multiply-adds that the code's matmul instructions do, over all warps; 0 where they do not say.
    """

    tile: str
    registers: int
    spill: int
    shared: int
    instructions: dict[str, int]
    serialized: bool
    products: int


def needed_products(case: Case, kernel: str, tile: str) -> int:
    """Multiply-adds of one tile, as often as the code has its loop: for full and for partial ranges, or once."""
    rows, keys = map(int, tile.split()[0].split("x"))
    head, value = (sum(split_columns(columns)) for columns in case.dims)
    columns = {"forward_kernel": 2 * (head + value), "query_kernel": 2 * (2 * head + value)}
    return rows * keys * columns.get(kernel, 2 * head + 2 * value)


def compile_case(case: Case) -> dict[str, Resources]:
    """Compile the three kernels of a case as they would be launched."""
    found: dict[str, Resources] = {}

    def judge(name: str, grid: tuple[int, ...], kernel: Any) -> None:
        if name in KERNELS:
            found[name] = _judge(kernel, TARGETS[case.arch])

    with compile_only(TARGETS[case.arch].gpu, judge):
        launch_all(case)
    return found


def _judge(kernel: Any, target: Target) -> Resources:
    tiles = {name[0]: value for name, value in kernel.src.constants.items()}
    arguments = kernel.src.fn.arg_names
    constants = {arguments[index]: value for index, value in tiles.items()}
    tile = f"{constants['BLOCK_M']}x{constants['BLOCK_N']} {kernel.metadata.num_warps}w {kernel.metadata.num_stages}s"
    return judge(kernel, tile, target)


def judge(kernel: Any, tile: str, target: Target) -> Resources:
    """What a compiled kernel takes and does."""
    return _judge_cuda(kernel, tile, target=target) if target.is_cuda else _judge_hip(kernel, tile)


def _judge_cuda(kernel: Any, tile: str, *, target: Target) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = _run(_TOOLS / "cuobjdump", "-sass", "-res-usage", file.name)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert usage is not None
    mnemonics = ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS", "UTMALDG", "LDL", "STL")
    return Resources(
        tile=tile,
        registers=int(usage[1]),
        spill=int(usage[2]),
        shared=kernel.metadata.shared,
        instructions={name: len(re.findall(rf"\b{name}\b", listing)) for name in mnemonics},
        serialized=target.device.arch == "sm_90" and "C7515" in _ptxas_log(kernel, target.gpu.arch),
        # Four warps share an HGMMA, each runs its own HMMA.
        products=kernel.metadata.num_warps
        * (
            sum(math.prod(map(int, size.split("x"))) for size in re.findall(r"HGMMA\.(\d+x\d+x\d+)", listing)) // 4
            + 16 * 8 * 16 * len(re.findall(r"\bHMMA\.16816\b", listing))
        ),
    )


def _judge_hip(kernel: Any, tile: str) -> Resources:
    code = kernel.asm["amdgcn"]
    vectors, spilled = (int(re.findall(rf"\.{name}:\s+(\d+)", code)[-1]) for name in ("vgpr_count", "vgpr_spill_count"))
    return Resources(
        tile=tile,
        registers=vectors,
        spill=4 * spilled,
        shared=kernel.metadata.shared,
        instructions={"v_mfma": code.count("v_mfma")},
        serialized=False,
        products=kernel.metadata.num_warps
        * sum(math.prod(map(int, size.split("x"))) for size in re.findall(r"v_mfma_f32_(\d+x\d+x\d+)", code)),
    )


def _ptxas_log(kernel: Any, capability: int) -> str:
    """What ptxas says of the kernel; asked again, for a kernel from Triton's cache never went through it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        arch = sm_arch_from_capability(capability)
        return _run(get_ptxas(capability).path, "-v", f"--gpu-name={arch}", source, "-o", Path(folder) / "kernel.cubin")


def _run(*command: str | Path) -> str:
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout + result.stderr


DEFAULT_CASES = [
    Case(arch, (columns, columns), features=features)
    for arch in ("sm_80", "sm_90")
    for columns in (64, 128, 256)
    for features in (False, True)
]

# One factor at a time away from the default cases.
SLOW_CASES = [
    *(Case(arch, (columns, columns)) for arch in ("sm_89", "sm_100", "sm_120", "gfx942") for columns in (64, 128, 256)),
    *(Case(arch, dims) for arch in ("sm_80", "sm_90") for dims in ((16, 16), (80, 80), (96, 96), (192, 128))),
    *(Case(arch, (128, 128), torch.float16) for arch in ("sm_80", "sm_90", "gfx942")),
    *(Case("sm_90", (columns, columns), torch.float32) for columns in (64, 128, 256)),
    *(Case(arch, (128, 128), torch.float32) for arch in ("sm_80", "sm_120", "gfx942")),
    *(Case(arch, (128, 128), torch.float32, tf32=True) for arch in ("sm_80", "sm_90")),
    *(Case("sm_90", (128, 128), group=group) for group in (1, 7, 16, 40)),
]

TABLE = Path(__file__).parents[1] / "kernels" / "aot" / "resources.csv"


def table_row(case: Case, kernel: str, found: Resources) -> str:
    """One line of resources.csv."""
    repeated = found.products / needed_products(case, kernel, found.tile) if case.dtype.itemsize == 2 else 0
    return f"{case},{kernel},{found.tile},{found.registers},{found.spill},{found.shared},{repeated:.3g}"
