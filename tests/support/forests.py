"""Prefix forests in every awkward shape, attention inputs for them, and the error budget that judges a result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import reference_attention, visible_pairs

Segments = Sequence[tuple[int, int]]


def positions_of(segments: Segments) -> Tensor:
    """Position ids of segments given as (depth of the first token, length), in packed order."""
    runs = [torch.arange(depth, depth + length) for depth, length in segments]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)


def group(prompt: int, completions: Sequence[int]) -> Segments:
    """A prompt and its completions."""
    return [(0, prompt), *((prompt, length) for length in completions)]


def karied(children: int, levels: int, length: int, depth: int = 0) -> Segments:
    """A complete tree whose every edge has `length` tokens."""
    below = karied(children, levels - 1, length, depth + length) if levels > 1 else []
    return [(depth, length), *(list(below) * children)]


def comb(teeth: int, spine: int, tooth: int) -> Segments:
    """A spine with one side branch before each further stretch: many keys stay open to the end of the row."""
    return [s for t in range(teeth) for s in ((t * spine, spine), ((t + 1) * spine, tooth))]


def unwinding(length: int, tooth: int) -> Segments:
    """A chain that is left again one token at a time: all subtree ends differ."""
    return [(0, length), *((depth, tooth) for depth in range(length - 1, 0, -1))]


# Around the sizes at which the CPU path packs (128), splits (256) and lets a segment be a block (64).
FORESTS: dict[str, Segments] = {
    "empty": [],
    "one token": [(0, 1)],
    "one-token roots": [(0, 1)] * 300,
    "chain": [(0, 700)],
    "duplicates": [(0, 70), (0, 70), (0, 3), (0, 3)],
    "group": group(130, [60, 64, 65, 1, 129, 2]),
    "thousand leaves": group(40, [1] * 1000),
    "prompts": [*group(64, [48] * 4), *group(20, [5] * 9), *group(1, [1, 1, 2])],
    "binary": karied(2, 6, 11),
    "comb": comb(40, 9, 5),
    "one-token comb": comb(200, 1, 1),
    "unwinding": unwinding(150, 2),
    "branch at every offset": [(0, 130), *((130 - offset, 1 + offset % 3) for offset in range(129))],
    "block sizes": [*group(128, [128, 127, 129]), *group(64, [64, 63]), (0, 256), (0, 257)],
}


@st.composite
def forests(draw: st.DrawFn, max_segments: int = 12) -> Tensor:
    """Position ids of any forest; lengths crowd around 1 and around block sizes."""
    lengths = st.sampled_from([1, 1, 1, 2, 3, 7, 17, 31, 63, 64, 65, 100, 127, 128, 129, 257])
    segments: list[tuple[int, int]] = []
    open_tokens = 0
    for _ in range(draw(st.integers(0, max_segments))):
        depth = draw(st.one_of(st.integers(0, open_tokens), st.just(open_tokens), st.just(0)))
        length = draw(lengths)
        segments.append((depth, length))
        open_tokens = depth + length
    return positions_of(segments)


def paths_of(position_ids: Tensor) -> list[Tensor]:
    """Packed indices of every root-to-leaf sequence."""
    positions, path, paths = position_ids.tolist(), [], []
    for token, position in enumerate(positions):
        path = [*path[:position], token]
        if token + 1 == len(positions) or positions[token + 1] <= position:
            paths.append(torch.tensor(path))
    return paths


@dataclass(frozen=True, eq=False)
class Inputs:
    """Leaf tensors of one attention call and the gradients that flow into its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None

    @property
    def leaves(self) -> dict[str, Tensor]:
        leaves = {"q": self.q, "k": self.k, "v": self.v, "sinks": self.sinks}
        return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def make_inputs(
    num_tokens: int,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    lse: bool = True,
    seed: int = 0,
) -> Inputs:
    """Draw inputs for (query heads, kv heads) and (head dim, value dim)."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.from_numpy(generator.standard_normal(shape)).to(dtype)

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(
        q=normal(num_tokens, heads[0], dims[0]).requires_grad_(),
        k=normal(num_tokens, heads[1], dims[0]).requires_grad_(),
        v=normal(num_tokens, heads[1], dims[1]).requires_grad_(),
        sinks=normal(heads[0]).requires_grad_() if sinks else None,
        grad_out=normal(num_tokens, heads[0], dims[1]),
        grad_lse=normal(heads[0], num_tokens, dtype=lse_dtype) if lse else None,
    )


Attention = Callable[..., tuple[Tensor, Tensor]]


def run(attend: Attention, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and every gradient of `attend(q, k, v, sinks)` -> (out, lse), by name."""
    out, lse = attend(inputs.q, inputs.k, inputs.v, inputs.sinks)
    outputs, grads = [out], [inputs.grad_out.to(out.dtype)]
    if inputs.grad_lse is not None:
        outputs, grads = [out, lse], [*grads, inputs.grad_lse.to(lse.dtype)]
    leaves = inputs.leaves
    found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    results = {"out": out, "lse": lse.t(), **{f"d{name}": grad for name, grad in zip(leaves, found)}}
    return {name: result.detach() for name, result in results.items()}


def exact_results(inputs: Inputs, plan: TreePlan, **options: object) -> dict[str, Tensor]:
    """The float64 oracle's results for these very inputs."""
    double = Inputs(
        **{
            name: None if t is None else t.detach().double().requires_grad_(t.requires_grad)
            for name, t in vars(inputs).items()
        }
    )
    return run(lambda q, k, v, sinks: reference_attention(q, k, v, plan, sinks=sinks, **options), double)


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], plan: TreePlan) -> None:
    """Check every result's largest error in every segment against twice that of a plain low-precision computation.

    To the plain computation's error in the segment comes the rounding of the stored result and the noise of float32
    sums, without which a segment that the plain computation gets exactly right would leave no room.
    """
    owner = torch.zeros(plan.num_tokens, dtype=torch.int64)
    owner[torch.from_numpy(plan.segments.start[1:])] = 1
    owner = owner.cumsum(0)
    assert found.keys() == exact.keys()
    for name, result in found.items():
        target = exact[name]
        assert result.shape == target.shape, name
        assert result.isfinite().all(), f"{name} is not finite"
        if not target.numel():
            continue
        noise_eps = torch.finfo(torch.float64 if result.dtype == torch.float64 else torch.float32).eps
        # Score gradients are differences of dO.V, whose size for these normal inputs is that of 16 columns or more.
        noise = 4 * noise_eps * max(float(target.abs().max()), 16.0)
        rounding = torch.finfo(result.dtype).eps * target.abs()
        error = (result.double() - target).abs() - 2 * (rounding + noise)
        allowed = 2 * (plain[name].double() - target).abs()
        if name == "dsinks":
            assert (error.amax() <= allowed.amax()).all(), f"{name}: {float(error.amax())} beyond the budget"
            continue
        worst, budget = (_largest_by_segment(t, owner) for t in (error, allowed))
        wrong = (worst > budget).nonzero()
        assert not len(wrong), (
            f"{name}: segment {int(wrong[0, 0])} of {len(worst)} is off by {float(worst[wrong[0, 0]]):.3g}, "
            f"allowed {float(budget[wrong[0, 0]]):.3g}; {len(wrong)} segments are wrong"
        )


def _largest_by_segment(values: Tensor, owner: Tensor) -> Tensor:
    largest = values.flatten(1).amax(1)
    segments = int(owner[-1]) + 1
    return largest.new_full((segments,), -torch.inf).scatter_reduce(0, owner, largest, "amax")


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, plan: TreePlan, **options: Any
) -> tuple[Tensor, Tensor]:
    """The plain computation in the inputs' own precision, whose error sets the budget."""
    group_size = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)))
    scores = q @ k.transpose(1, 2) * (options.get("scale") or q.shape[-1] ** -0.5)
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible_pairs(plan, options.get("sliding_window")), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    normaliser = lse if sinks is None else torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    return (torch.exp(scores - normaliser[..., None]) @ v).transpose(0, 1), lse
