"""Tree attention on a CPU against attention without sharing, forward + backward in float32 at 8:2 heads of 64.

    pytest benchmarks/bench_attention_cpu.py

Peers:
- "unshared": torch's causal SDPA of every root-to-leaf sequence alone. Its inputs are gathered outside the timing, and
  the sum of its gradients over the copies of a shared token is not charged to it either.
- "dense mask": SDPA of the whole row with the (N, N) mask, built outside the timing.
- "prefix grouper": verl's PrefixGrouper (the package itself) over SDPA, where no prompt branches twice, which is all it
  does: one causal call on the prompts, one on the completions with the prompt's keys repeated before each.
- "flex, forward" (a figure: FlexAttention has no backward on a CPU): compiled FlexAttention with the same mask as a
  block mask, built outside the timing, against our forward. Not compiled under --smoke.

One thread, since the timer is CPU time: with more, it counts their spinning at barriers, on a shared machine many times
over. Figures: visible pairs against the unshared ones (what sharing can save), and the speed of the forward alone.

What limits us where segments are short (16 prompts of 64 + 4 x 48): the fused kernel takes about 60 % of the time; the
rest is the copies of its outputs into place and Python, about 0.1 ms a call. Runs of segments under 64 tokens therefore
share masked calls of up to 128 tokens, at the price of pairs that are computed and masked away.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from prefix_grouper import PrefixGrouper
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from harness import Compare, Comparison, Figure, timer
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import visible_pairs

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def karied(children: int, levels: int, length: int, depth: int = 0) -> list[tuple[int, int]]:
    """(first depth, length) of the segments of a complete tree."""
    below = karied(children, levels - 1, length, depth + length) if levels > 1 else []
    return [(depth, length), *(below * children)]


# name -> (segments, segments under --smoke, times faster than unshared we want to be)
CASES = {
    "1024 + 12 x 256": ([(0, 1024), *[(1024, 256)] * 12], [(0, 100), *[(100, 30)] * 3], 2.0),
    "512 + 8 x 448": ([(0, 512), *[(512, 448)] * 8], [(0, 50), *[(50, 40)] * 3], 1.1),
    "4-ary, 3 levels of 195": (karied(4, 3, 195), karied(2, 3, 20), 1.3),
    "16 x (64 + 4 x 48)": ([(0, 64), *[(64, 48)] * 4] * 16, [(0, 8), *[(8, 6)] * 4] * 3, 0.8),
}

NOT_RUN = {
    "FlexAttention's backward": "torch has none on a CPU",
    "FlashAttention-4, MagiAttention": "CUDA only",
    "AReaL 1.0.4": "wants torch < 2.11 and transformers <= 5.3; on FlexAttention or Triton: no backward on a CPU",
    "Unsloth": "on FlexAttention: no backward on a CPU",
    "OpenPipe ART": "Megatron, CUDA only",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def leaf_paths(position_ids: Tensor) -> list[Tensor]:
    """Packed indices of every root-to-leaf sequence."""
    positions = position_ids.tolist()
    path: list[int] = []
    paths = []
    for token, position in enumerate(positions):
        path = [*path[:position], token]
        if token + 1 == len(positions) or positions[token + 1] <= position:
            paths.append(torch.tensor(path))
    return paths


def batched(tensor_NHD: Tensor) -> Tensor:
    """(N, H, D) as the (1, H, N, D) that SDPA takes."""
    return tensor_NHD.transpose(0, 1).unsqueeze(0)


def prompt_groups(segments: list[tuple[int, int]]) -> list[list[int]] | None:
    """The prompt's and its completions' lengths by prompt; None where a completion branches again."""
    groups: list[list[int]] = []
    for depth, length in segments:
        if depth == 0:
            groups.append([length])
        elif depth == groups[-1][0]:
            groups[-1].append(length)
        else:
            return None
    return groups


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor) -> Tensor:
    """What PrefixGrouper calls: (B, H, S, D) queries that are the last of the keys -> (B, S, H, D)."""
    assert padding_mask.all(), "all completions are as long as each other"
    behind = k.shape[2] - q.shape[2]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(behind) if behind else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Case:
    """One row and everything each side may prepare before the clock starts."""

    plan: TreePlan
    paths: list[Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    unshared: list[list[Tensor]]
    mask: Tensor
    block_mask: BlockMask
    flex: Callable[..., Any]
    groups: list[list[int]] | None

    @classmethod
    def of(cls, segments: list[tuple[int, int]], flex: Callable[..., Any]) -> "Case":
        position_ids = torch.cat([torch.arange(depth, depth + length) for depth, length in segments])
        plan = TreePlan.from_position_ids(position_ids)
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int) -> Tensor:
            return torch.randn(plan.num_tokens, heads, HEAD_DIM, generator=generator)

        q, k, v, grad_out = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), normal(HEADS)
        paths = leaf_paths(position_ids)
        seen = torch.zeros(plan.num_tokens, dtype=torch.bool)
        unshared = []
        for path in paths:
            *inputs, grad = (batched(t[path]).contiguous() for t in (q, k, v, grad_out))
            # A shared token's gradient enters once, as in the packed row.
            grad[:, :, seen[path]] = 0.0
            seen[path] = True
            unshared.append([*(t.requires_grad_() for t in inputs), grad])
        mask = visible_pairs(plan)
        end = plan.subtree_end

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < end[key])

        block_mask = create_block_mask(visible, None, None, plan.num_tokens, plan.num_tokens, device="cpu")
        leaves = (t.requires_grad_() for t in (q, k, v))
        return cls(plan, paths, *leaves, grad_out, unshared, mask, block_mask, flex, prompt_groups(segments))

    def run_ours(self) -> tuple[Tensor, ...]:
        out = tree_attention(self.q, self.k, self.v, plan=self.plan)
        return out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.grad_out)

    def run_unshared(self) -> list[tuple[Tensor, ...]]:
        results = []
        for q, k, v, grad_out in self.unshared:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)))
        return results

    def run_dense(self) -> tuple[Tensor, ...]:
        q, k, v = (batched(t) for t in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)[0].transpose(0, 1)
        return out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.grad_out)

    def run_grouper(self) -> tuple[Tensor, ...]:
        assert self.groups is not None
        q, k, v = (t.view(len(self.groups), -1, *t.shape[1:]).transpose(1, 2) for t in (self.q, self.k, self.v))
        out = PrefixGrouper(self.groups).forward(grouped_attention, q, k, v).flatten(0, 1)
        return out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.grad_out)

    @torch.no_grad()
    def run_ours_forward(self) -> Tensor:
        return tree_attention(self.q, self.k, self.v, plan=self.plan)

    @torch.no_grad()
    def run_flex_forward(self) -> Tensor:
        q, k, v = (batched(t.detach()) for t in (self.q, self.k, self.v))
        out = self.flex(q, k, v, block_mask=self.block_mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    def check(self) -> None:
        """Compare outputs and gradients of all sides; a packed token's gradient is the sum over its copies."""
        ours = self.run_ours()
        totals = [torch.zeros_like(t) for t in ours]
        for path, results in zip(self.paths, self.run_unshared()):
            totals[0][path] = results[0][0].transpose(0, 1)
            for total, grad in zip(totals[1:], results[1:]):
                total.index_add_(0, path, grad[0].transpose(0, 1))
        for found, unshared, dense in zip(ours, totals, self.run_dense()):
            torch.testing.assert_close(found, unshared, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-4)
        if self.groups is not None:
            for found, grouped in zip(ours, self.run_grouper()):
                torch.testing.assert_close(found, grouped, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(self.run_ours_forward(), ours[0], rtol=0, atol=0)
        torch.testing.assert_close(self.run_flex_forward(), ours[0], rtol=1e-4, atol=1e-4)

    @property
    def unshared_pairs(self) -> int:
        return sum(len(path) * (len(path) + 1) // 2 for path in self.paths)

    def figures(self, rounds: int) -> dict[str, Figure]:
        """The pairs that sharing saves, and interleaved medians of the forwards."""
        sides = {"ours": self.run_ours_forward, "unshared": self.run_unshared_forward, "flex": self.run_flex_forward}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                start = timer()
                side()
                times[name].append(timer() - start)
        ours, unshared, flex = (statistics.median(times[name]) for name in sides)
        return {
            "pairs saved": Figure(self.unshared_pairs / self.plan.num_pairs(), "x"),
            "forward": Figure(unshared / ours, "x"),
            "flex, forward": Figure(flex / ours, "x"),
        }

    @torch.no_grad()
    def run_unshared_forward(self) -> None:
        for q, k, v, _ in self.unshared:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_forward_and_backward(name: str, compare: Compare, smoke: bool) -> None:
    segments, smoke_segments, target = CASES[name]
    case = Case.of(
        smoke_segments if smoke else segments, flex_attention if smoke else torch.compile(flex_attention, dynamic=False)
    )
    rounds = 1 if smoke else 5

    def figures(_: Comparison) -> dict[str, Figure]:
        return case.figures(rounds)

    compare(
        name,
        ours=case.run_ours,
        peers={"unshared": case.run_unshared, "dense mask": case.run_dense}
        | ({} if case.groups is None else {"prefix grouper": case.run_grouper}),
        check=case.check,
        target=target,
        rounds=rounds,
        figures=figures,
        not_run=NOT_RUN,
    )
