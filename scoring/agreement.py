"""Ranks that disagree about a step: found before a collective would wait or mix things up, and named on every rank."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from treepack.scoring.collectives import gather_rows
from treepack.scoring.scorer import TrainerScorer
from treepack.scoring.step_tables import Float64, Int64
from treepack.scoring.trainer import ScoringAccelerator, ScoringTrainer

REWARD_TOLERANCE = 1e-6
"""How far ranks' rewards may be apart, relative to 1 or the reward: machines of different kinds sum in other orders."""


def described_step(trainer: ScoringTrainer, batches: Sequence[Mapping[str, Any]]) -> str:
    """What must be the same on every rank before a step is scored, as JSON: an object of values by what they are.

    Args:
        trainer: the trainer.
        batches: this rank's micro-batches, "scoring" still in them.
    """
    args = trainer.args
    return json.dumps(
        {
            "scorers": [_described(scorer) for scorer in trainer.scorers],
            "the number of micro-batches": len(batches),
            "the micro-batches' tokens": _first_values(batches, "global_n_forward_tokens"),
            "the micro-batches' loss terms": _first_values(batches, "global_n_tokens"),
            "the tensors of scorers": [_tensors_of_scorers(batch) for batch in batches],
            "advantage_estimator": args.advantage_estimator,
            "scale_rewards": args.scale_rewards,
            "reward_weights": _weights(args.reward_weights),
            "mask_truncated_completions": bool(args.mask_truncated_completions),
            "loss_normalization": args.loss_normalization,
        }
    )


def check_same_step(accelerator: ScoringAccelerator, description: str) -> None:
    """Compare the ranks' `described_step`.

    Raises:
        ValueError: on every rank, what differs and on which ranks.
    """
    if accelerator.num_processes == 1:
        return
    text = torch.tensor(list(description.encode() + b"\0"), dtype=torch.uint8)
    of_ranks = [json.loads(part) for part in bytes(gather_rows(accelerator, text).tolist()).split(b"\0")[:-1]]
    differing = [name for name in of_ranks[0] if any(other[name] != of_ranks[0][name] for other in of_ranks)]
    if differing:
        raise ValueError(
            "; ".join(f"{name} must be the same on every rank, got {_by_rank(of_ranks, name)}" for name in differing)
        )


def _described(scorer: TrainerScorer) -> str:
    """A sharded scorer runs collectives that all ranks must take part in."""
    return f"{scorer.name} ({'sharded ' if scorer.sharded else ''}{type(scorer).__name__})"


def _weights(weights: Sequence[float] | Mapping[str, float] | None) -> list[float] | dict[str, float] | None:
    if isinstance(weights, Mapping):
        return {name: float(weight) for name, weight in weights.items()}
    return None if weights is None else [float(weight) for weight in weights]


def _first_values(batches: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """What the collator says alike to all ranks of each micro-batch."""
    return [float(batch[key][0]) for batch in batches]


def _tensors_of_scorers(batch: Mapping[str, Any]) -> int:
    """How many there are, which grows with the chunks that scorers forward."""
    return sum(len(tensors) for tensors in batch["scoring"]["scorers"].values())


def _by_rank(of_ranks: Sequence[Mapping[str, Any]], name: str) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, values in enumerate(of_ranks):
        ranks.setdefault(json.dumps(values[name]), []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(having) > 1 else ''} {', '.join(map(str, having))}"
        for value, having in ranks.items()
    )


def agreed_rewards(accelerator: ScoringAccelerator, scorer: str, uids: Int64, column: Float64) -> Float64:
    """Rank 0's rewards, on every rank: the bits that all go on with.

    Args:
        accelerator: the trainer's.
        scorer: the scorer's name.
        uids: (B,) int64, the same on every rank.
        column: (B,) float64, the rewards this rank computed.

    Raises:
        ValueError: on every rank, where they differ by more than rounding.
    """
    if accelerator.num_processes == 1 or not len(column):
        return column
    columns: Float64 = gather_rows(accelerator, torch.from_numpy(column)[None]).numpy()
    same = np.isclose(columns, columns[0], rtol=REWARD_TOLERANCE, atol=REWARD_TOLERANCE, equal_nan=True)
    if not same.all():
        rank, sample = np.argwhere(~same)[0].tolist()
        raise ValueError(
            f"scorer {scorer!r} must give the same rewards on every rank, got {columns[0, sample]} on rank 0 and "
            f"{columns[rank, sample]} on rank {rank} for uid {uids[sample]}"
        )
    agreed: Float64 = columns[0]
    return agreed
