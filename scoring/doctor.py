"""`treepack doctor`: what is installed, and whether packed attention is right on this machine.

N: tokens, H: query heads, G: key/value heads, D: head dim.
"""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treepack import __version__
from treepack.kernels.ops import tree_attention
from treepack.scoring.sequences import pack_sequences

PACKAGES = ("torch", "triton", "numpy", "transformers", "trl", "accelerate", "flash-attn", "flash-attn-4", "gguf")
DEFAULT_BACKENDS = {"CPU": "cpu", "GPU": "triton"}
"""`tree_attention`'s choice where no backend is named."""
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
TOLERANCE = 2e-5
"""Largest accepted difference between packed and separate attention in float32, relative to the largest value."""


@dataclass(frozen=True)
class DeviceFinding:
    """One device.

    Attributes:
        device: torch's name of it.
        name: the hardware.
        backend: the attention backend tensors on it get by default.
        differences: largest difference of packed from separate attention, relative to the largest value: `out`, and the
            gradients `dq`, `dk`, `dv`. None when the backend is not available.
        ok: whether all are within TOLERANCE; None when the backend is not available.
        reason: why it is not available.
    """

    device: str
    name: str
    backend: str
    differences: dict[str, float] | None
    ok: bool | None
    reason: str | None


@dataclass(frozen=True)
class Findings:
    """What doctor found.

    Attributes:
        versions: by package, None where it is not installed.
        devices: each device of this machine.
    """

    versions: dict[str, str | None]
    devices: tuple[DeviceFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(device.ok is not False for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return {"ok": self.ok, **asdict(self)}


def examine() -> Findings:
    """Look at this machine and check attention on each of its devices."""
    versions: dict[str, str | None] = {"treepack": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in PACKAGES}
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return Findings(versions, tuple(_examine_device(device) for device in devices))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _examine_device(device: torch.device) -> DeviceFinding:
    on_cpu = device.type == "cpu"
    name = f"{platform.machine()}, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(device)
    backend = DEFAULT_BACKENDS["CPU" if on_cpu else "GPU"]
    try:
        differences = packed_differences(device)
    except NotImplementedError as error:
        return DeviceFinding(str(device), name, backend, None, None, str(error))
    # Not `max(...) <= TOLERANCE`: a NaN must fail, whichever value it is.
    ok = all(difference <= TOLERANCE for difference in differences.values())
    return DeviceFinding(str(device), name, backend, differences, ok, None)


def packed_differences(device: torch.device) -> dict[str, float]:
    """Largest differences of packed from separate attention, values and gradients, each relative to the largest value.

    Two prompts with branches inside branches, a strict prefix and a duplicate among the sequences, float32.
    """
    generator = torch.Generator().manual_seed(0)
    packed = pack_sequences(_sequences(generator), kv_index=False)
    position_ids, positions = packed["position_ids"].to(device), packed["positions"].to(device)
    offsets = packed["offsets"].tolist()
    paths = [positions[start:end] for start, end in pairwise(offsets)]
    shapes = [(len(position_ids), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, grad_out_NHD = (torch.randn(shape, generator=generator).to(device) for shape in shapes)

    def run_packed(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        return tree_attention(q_NHD, k_NGD, v_NGD, position_ids=position_ids)

    def run_separate(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        # Each packed token's value is that of the last sequence through it, so that it gets its gradient once.
        out_NHD = torch.zeros_like(q_NHD)
        for path in paths:
            q, k, v = (x[path].transpose(0, 1)[None] for x in (q_NHD, k_NGD, v_NGD))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out_NHD = out_NHD.index_copy(0, path, out[0].transpose(0, 1))
        return out_NHD

    got, wanted = (_values_and_gradients(run, inputs, grad_out_NHD) for run in (run_packed, run_separate))
    return {
        name: ((got[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item()
        for name in ("out", "dq", "dk", "dv")
    }


def _sequences(generator: torch.Generator) -> list[Tensor]:
    def tokens(length: int) -> Tensor:
        return torch.randint(0, 1000, (length,), generator=generator)

    sequences = []
    for prompt in (tokens(150), tokens(70)):
        for branch in (tokens(130), tokens(40), tokens(1)):
            sequences += [torch.cat([prompt, branch, tokens(length)]) for length in (90, 33, 1)]
    return [*sequences, sequences[0][:200], sequences[1].clone()]


def _values_and_gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], grad_out_NHD: Tensor
) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, grad_out_NHD)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}


def print_findings(findings: Findings, console: Console) -> None:
    """Print the findings for people."""
    versions = Table(title="versions", title_justify="left", box=box.SIMPLE, show_header=False)
    for package, version in findings.versions.items():
        versions.add_row(package, version or "not installed")
    devices = Table(title="packed against separate attention, float32", title_justify="left", box=box.SIMPLE)
    for column in ("device", "hardware", "backend", "out", "dq", "dk", "dv", "check"):
        devices.add_column(column)
    for device in findings.devices:
        differences = device.differences or {}
        figures = [f"{differences[name]:.1e}" if name in differences else "" for name in ("out", "dq", "dk", "dv")]
        verdict = {True: "pass", False: "FAIL", None: f"not available: {device.reason}"}[device.ok]
        devices.add_row(device.device, device.name, device.backend, *figures, verdict)
    console.print(versions)
    console.print(devices)
    console.print(f"largest relative differences; up to {TOLERANCE:.0e} passes", highlight=False)
