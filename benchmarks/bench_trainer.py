"""One training step on real rollouts: plan, pack, score, forward, backward and optimizer, in three ways.

- unshared: each sample's tokens laid end to end, attention a sample at a time; what TRL did before its tries.
- TRL's trie: TRL 1.16's planner, collator and trie. Its attention needs a GPU's kernel; a CPU stand-in gathers each
  segment's keys as TRL does and calls SDPA on them.
- ours: treepack.

All run TRL's own `training_step` on one model and one optimizer, whose learning rate is 0, so that every round is the
first step. A step is one micro-batch of the same samples, none of zero advantage: there the three define one loss.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from harness import Compare, Comparison, Figure, timer
from support.traces import BUNDLED, FULL
from synthetic_rollouts import Samples
from treepack import ScoringCollator, StepPlanner, TreeRow, group_advantages, register_attention, score_step
from treepack.scoring.rollouts import read_rollouts
from trl_batchers import by_token_budget

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns that async GRPO is experimental
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

    from support.trl_training import QueuedRollouts, save_policy, scoring_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

Batch = dict[str, Any]

TURNS = FULL / "airline_turns.npz"
AHEAD_OF_UNSHARED = 4.0


@dataclass(frozen=True)
class Case:
    name: str
    group: int
    every: int = 1  # take each n-th row
    peer_rounds: int = 1
    target: float | None = AHEAD_OF_UNSHARED


# Airline tasks of 4 rollouts each, a row a model turn.
CASES = [Case("24 turns, 44k tokens", 12, peer_rounds=2), Case("31 turns, 61k tokens", 1)]
SMOKE_CASES = [Case("smoke: 3 turns", 1, every=15, target=None)]
VOCABULARY = 4096  # token ids are taken modulo this, which keeps the output layer in proportion to so small a model
MODEL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32}
SMOKE_MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}


@dataclass(frozen=True)
class Step:
    """What one step came to; seconds of CPU time."""

    loss: float
    gradient: float  # its norm
    tokens: float  # forwarded
    host_s: float  # planning, packing and, on our side, scoring
    total_s: float

    @property
    def host_share(self) -> float:
        return self.host_s / self.total_s


def rollouts(case: Case) -> Samples:
    """The case's samples; rewards and old log-probabilities are drawn, so that no advantage is zero."""
    trace = read_rollouts(TURNS if TURNS.exists() else BUNDLED)
    airline = [rows for rows in trace.group_rows() if len(set(trace.rollout_id[rows])) < len(rows)]
    rows = set(trace.uid[airline[case.group][:: case.every]].tolist())
    samples = [sample for sample in trace.samples() if sample["uid"] in rows]
    generator = np.random.default_rng(0)
    ids = np.array([sample["rollout_id"] for sample in samples])
    rewards = generator.normal(size=ids.max() + 1)[ids]
    advantages = group_advantages(rewards, np.zeros(len(samples), np.int64), ids)
    for sample, reward, advantage in zip(samples, rewards, advantages, strict=True):
        noise = generator.normal(-np.log(VOCABULARY), 0.1, len(sample["input_ids"]))
        sample["old_log_probs"] = np.where(sample["completion_mask"], noise, 0.0).astype(np.float32)
        sample |= {"rewards": {"reward": float(reward)}, "advantage": float(advantage), "group_size": len(samples)}
        sample["input_ids"] %= VOCABULARY
    return samples


def attend_alone(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, scaling: float | None
) -> Tensor:
    """SDPA of each segment's queries (1, H, N, D) to the last keys of its path (1, G, K, D); (1, N, H, D)."""
    outputs = []
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist())):
        before = (k1 - k0) - (q1 - q0)
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(before) if before else None
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, q0:q1],
                key[:, :, k0:k1],
                value[:, :, k0:k1],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def unshared_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    bounds = options["tree_cu_seqlens_q"]
    return attend_alone(query, key, value, bounds, bounds, options["scaling"]), None


def gathered_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """TRL's tree attention but for the kernel."""
    key, value = (x.index_select(2, options["tree_kv_index"]) for x in (key, value))
    bounds = options["tree_cu_seqlens_q"], options["tree_cu_seqlens_k"]
    return attend_alone(query, key, value, *bounds, options["scaling"]), None


class Training:
    """One model, trained by TRL's `training_step` on what the three ways make of the same samples."""

    def __init__(self, folder: Path, samples: Samples, model: dict[str, int]) -> None:
        policy = save_policy(folder / "policy", vocab_size=VOCABULARY, max_position_embeddings=16384, **model)
        self.samples = samples
        self.budget = sum(len(sample["input_ids"]) for sample in samples)
        shape = {"gradient_accumulation_steps": 1, "token_budget": self.budget}
        self.trainer = scoring_trainer(policy, folder, QueuedRollouts(0), more=shape)
        self.trainer.current_gradient_accumulation_steps = 1
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.0, weight_decay=0.0)

    def unshared(self) -> Step:
        AttentionInterface.register("tree_fa3", unshared_attention)
        return self._step(self._pack_unshared)

    def trl(self) -> Step:
        AttentionInterface.register("tree_fa3", gathered_attention)
        return self._step(self._pack_trl)

    def ours(self) -> Step:
        register_attention()
        return self._step(self._pack_ours)

    def _pack_unshared(self) -> Sequence[Batch]:
        row = TreeRow(share_prefixes=False)
        for sample in self.samples:
            row.add(sample)
        return [DataCollatorForRollout(0)([[row]])]

    def _pack_trl(self) -> Sequence[Batch]:
        collate = DataCollatorForRollout(0, token_budget=self.budget)
        return [collate([rows]) for rows in by_token_budget(self.samples, 1, self.budget)]

    def _pack_ours(self) -> Sequence[Batch]:
        shared: dict[str, Any] = {"token_budget": self.budget, "scorers": (), "metrics": defaultdict(list)}
        planner = StepPlanner(self.samples, num_processes=1, steps=1, samples_per_row=0, **shared)
        collate = ScoringCollator(0, **shared)
        batches = [collate([rows]) for rows in planner]
        score_step(self.trainer, batches)
        return batches

    def _step(self, pack: Callable[[], Sequence[Batch]]) -> Step:
        start = timer()
        batches = pack()
        packed = timer()
        (batch,) = batches
        model = self.trainer.model
        loss = self.trainer.training_step(model, batch, None)
        gradient = torch.nn.utils.get_total_norm(parameter.grad for parameter in model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = float(batch["global_n_forward_tokens"][0])
        return Step(float(loss), float(gradient), tokens, packed - start, timer() - start)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = SMOKE_CASES if metafunc.config.getoption("smoke") else CASES
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def test_step(compare: Compare, case: Case, tmp_path: Path) -> None:
    if not (compare.smoke or TURNS.exists()):
        pytest.skip("needs the full airline_turns trace; the bundled rollouts hold other tasks")
    training = Training(tmp_path, rollouts(case), SMOKE_MODEL if compare.smoke else MODEL)
    ways = {"unshared": training.unshared, "TRL's trie": training.trl, "ours": training.ours}
    last: dict[str, Step] = {}

    def run(name: str) -> None:
        last[name] = ways[name]()

    def check() -> None:
        for name in ways:
            run(name)
        for name in ("unshared", "TRL's trie"):
            assert last[name].loss == pytest.approx(last["ours"].loss, abs=1e-5), name
            assert last[name].gradient == pytest.approx(last["ours"].gradient, rel=1e-4), name
        assert last["ours"].loss != 0

    def figures(record: Comparison) -> dict[str, Figure]:
        ahead = None if case.target is None else 1.0
        shown = {"faster than TRL's trie": Figure(record.speedup("TRL's trie"), "x", at_least=ahead)}
        shown |= {f"tokens, {name}": Figure(step.tokens) for name, step in last.items()}
        shown |= {f"loss, {name}": Figure(step.loss) for name, step in last.items()}
        shown |= {f"planning and packing, {name}": Figure(100 * step.host_share, "%") for name, step in last.items()}
        return shown

    try:
        record = compare(
            case.name,
            ours=partial(run, "ours"),
            peers={name: partial(run, name) for name in ("unshared", "TRL's trie")},
            check=check,
            target=case.target,
            rounds=3,
            peer_rounds=case.peer_rounds,
            figures=figures,
        )
    finally:
        register_attention()
    assert record.ratio is not None
    assert record.ratio.reached
    assert record.figures["faster than TRL's trie"].reached
