"""Variable-length attention: one call that attends many (queries, keys) pairs of sequences, which "flash" builds upon.

The two adaptors are unverified: no GPU has run them yet. Both take the output and log-sum-exp (LSE) that a backward
works from as arguments, which the libraries' public functions do not, hence the functions below those.

Legend: H query heads, K kv heads, B sequences, R queries of a call, L its keys, D head dim (of values too).
"""

import importlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """The sequences of one call.

    Attributes:
        cu_q: (B + 1,) int32, boundaries of the sequences among the R queries.
        cu_k: (B + 1,) int32, likewise among the L keys.
        max_q: longest sequence of queries.
        max_k: longest sequence of keys.
        causal: the last query of a sequence sees all its keys and each one before sees one key less; without it every
            query sees every key of its sequence.
        window: with `causal`, a query sees only the last `window` of these keys.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: int | None = None


class VarlenKernel(Protocol):
    """Attention with a scale and softcap of its own; tensors need no more than adjacent columns."""

    def forward(self, call: VarlenCall, q_RHD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (R, H, D) in q's dtype and LSE (H, R), natural log."""
        ...

    def backward(
        self,
        call: VarlenCall,
        grad_out_RHD: Tensor,
        q_RHD: Tensor,
        k_LKD: Tensor,
        v_LKD: Tensor,
        out_RHD: Tensor,
        lse_HR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) for probabilities exp(scores - `lse`) and the final `out`, wherever these come from."""
        ...


@dataclass(frozen=True)
class TorchVarlen:
    """The FlashAttention that torch brings along, or what `activate_flash_attention_impl` has put in its place.

    Its backward repeats bit for bit where `torch.use_deterministic_algorithms` says so.
    """

    scale: float

    def forward(self, call: VarlenCall, q_RHD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel`."""
        left, right = _window_sides(call)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_RHD,
            k_LKD,
            v_LKD,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,
            call.causal,
            return_debug_mask=False,
            scale=self.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self,
        call: VarlenCall,
        grad_out_RHD: Tensor,
        q_RHD: Tensor,
        k_LKD: Tensor,
        v_LKD: Tensor,
        out_RHD: Tensor,
        lse_HR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel`."""
        left, right = _window_sides(call)
        # There is no dropout, whose random state this would be.
        state = torch.zeros(2, dtype=torch.uint64, device=q_RHD.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out_RHD,
            q_RHD,
            k_LKD,
            v_LKD,
            out_RHD,
            lse_HR,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,
            call.causal,
            state,
            q_RHD.new_empty(0),
            scale=self.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv


@dataclass(frozen=True)
class FlashAttnVarlen:
    """The flash-attn package (2.7 or later); unlike torch's it has a softcap."""

    scale: float
    softcap: float | None
    deterministic: bool

    def forward(self, call: VarlenCall, q_RHD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel`."""
        left, right = _window_sides(call)
        out, lse, *_ = _flash_attn()._flash_attn_varlen_forward(
            q_RHD,
            k_LKD,
            v_LKD,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,
            self.scale,
            call.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=self.softcap or 0.0,
        )
        return out, lse

    def backward(
        self,
        call: VarlenCall,
        grad_out_RHD: Tensor,
        q_RHD: Tensor,
        k_LKD: Tensor,
        v_LKD: Tensor,
        out_RHD: Tensor,
        lse_HR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel`."""
        left, right = _window_sides(call)
        dq, dk, dv = (torch.empty_like(t) for t in (q_RHD, k_LKD, v_LKD))
        _flash_attn()._flash_attn_varlen_backward(
            grad_out_RHD,
            q_RHD,
            k_LKD,
            v_LKD,
            out_RHD,
            lse_HR,
            dq,
            dk,
            dv,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,
            self.scale,
            call.causal,
            left,
            right,
            self.softcap or 0.0,
            None,
            self.deterministic,
        )
        return dq, dk, dv


def is_installed(package: str) -> bool:
    """Whether a distribution is installed, without importing it."""
    return next(iter(metadata.distributions(name=package)), None) is not None


# Read once, since a traced function can look nothing up; flash-attn-4 is another package with the same import name.
HAS_FLASH_ATTN = is_installed("flash-attn")


def varlen_kernel(scale: float, softcap: float | None, deterministic: bool) -> VarlenKernel:
    """The flash-attn package where it is installed, else what torch has built in, which has no softcap."""
    if HAS_FLASH_ATTN:
        return FlashAttnVarlen(scale, softcap, deterministic)
    assert softcap is None
    return TorchVarlen(scale)


@cache
def _flash_attn() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _window_sides(call: VarlenCall) -> tuple[int, int]:
    """Keys left and right of the diagonal that a query sees, in the libraries' terms: -1 is no limit."""
    if call.window is None:
        return -1, 0 if call.causal else -1
    return call.window - 1, 0
