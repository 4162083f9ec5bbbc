"""What all ranks know of a step before advantages are computed: its samples, its extras and their features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treepack.scoring.collectives import gather_rows
from treepack.scoring.samples import FILLER_UID, FIRST_EXTRA_UID
from treepack.scoring.trainer import ScoringAccelerator

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

Scoring = Sequence[dict[str, Any]]

_SAMPLE_FIELDS = ("uid", "group", "group_size", "rollout", "truncated", "trained_tokens")
_EXTRA_FIELDS = ("extra_uid", "extra_group", "extra_scorer")


@dataclass(frozen=True)
class SampleTable:
    """The step's samples by rising uid, fillers left out.

    Attributes:
        uid, group, rollout: (B,) int64.
        truncated: (B,) bool.
        tokens: (B,) int64, the loss terms each sample came with.
        rewards: (B, C) float64, the rollouts' own columns.
        place: (B, 4) int64: process, micro-batch, row of that process, column (segment_id).
    """

    uid: Int64
    group: Int64
    rollout: Int64
    truncated: npt.NDArray[np.bool_]
    tokens: Int64
    rewards: Float64
    place: Int64

    @staticmethod
    def gather(accelerator: ScoringAccelerator, scoring: Scoring) -> "SampleTable":
        """The table of all ranks, the same on each.

        Raises:
            ValueError: a uid is there twice, or a group is not whole.
        """
        integers, rewards = [], []
        for m, entry in enumerate(scoring):
            row, column = torch.nonzero(entry["uid"] >= 0, as_tuple=True)
            fields = [entry[name][row, column].long() for name in _SAMPLE_FIELDS]
            place = [torch.full_like(row, accelerator.process_index), torch.full_like(row, m), row, column]
            integers.append(torch.stack([*fields, *place], dim=1))
            rewards.append(entry["rewards"][row, column])
        table = gather_rows(accelerator, torch.cat(integers)).numpy()
        reward = gather_rows(accelerator, torch.cat(rewards)).numpy()
        order = np.argsort(table[:, 0], kind="stable")
        table, reward = table[order], reward[order]
        uid, group, group_size, rollout, truncated, tokens = table[:, :6].T
        _check_places(uid, table[:, 6:])
        _check_whole(uid, group, group_size)
        return SampleTable(uid, group, rollout, truncated.astype(bool), tokens, reward, table[:, 6:])


@dataclass(frozen=True)
class ExtraTable:
    """The step's group extras, in the order `group_extras` gave them (falling uid); (E,) int64 each."""

    uid: Int64
    group: Int64
    scorer: Int64

    @staticmethod
    def gather(accelerator: ScoringAccelerator, scoring: Scoring) -> "ExtraTable":
        """The table of all ranks, the same on each."""
        rows = torch.cat([torch.stack([entry[name].flatten() for name in _EXTRA_FIELDS], dim=1) for entry in scoring])
        table = gather_rows(accelerator, rows).numpy()
        table = table[table[:, 0] <= FIRST_EXTRA_UID]
        uid, group, scorer = table[np.argsort(-table[:, 0], kind="stable")].T
        return ExtraTable(uid, group, scorer)

    def of_scorer(self, index: int) -> "ExtraTable":
        """The extras of one scorer."""
        mine = self.scorer == index
        return ExtraTable(self.uid[mine], self.group[mine], self.scorer[mine])


@dataclass(frozen=True)
class Features:
    """One scorer's features of all sequences of the step.

    Attributes:
        scorer: its name.
        uid: (S,) int64, rising.
        values: (S, F) float32 on the CPU.
    """

    scorer: str
    uid: Int64
    values: torch.Tensor

    @staticmethod
    def gather(accelerator: ScoringAccelerator, scorer: str, uids: torch.Tensor, values: torch.Tensor) -> "Features":
        """The features of all ranks, the same on each.

        Args:
            accelerator: the trainer's.
            scorer: the scorer's name.
            uids: (n,) int64, this process's sequences; -1 is discarded.
            values: (n, F) float32.

        Raises:
            ValueError: F differs between ranks, or a sequence has two features.
        """
        uid, order = torch.sort(gather_rows(accelerator, uids))
        gathered = gather_rows(accelerator, values, f"features of scorer {scorer!r}")
        kept = uid != FILLER_UID
        _check_unique(uid[kept].numpy(), f"scorer {scorer!r} must give one feature a sequence")
        return Features(scorer, uid[kept].numpy(), gathered[order[kept]])

    def of(self, uids: Int64) -> torch.Tensor:
        """(n, F) the features of `uids` (n,).

        Raises:
            ValueError: a sequence has none.
        """
        at = np.minimum(np.searchsorted(self.uid, uids), max(len(self.uid) - 1, 0))
        missing = uids[self.uid[at] != uids] if len(self.uid) else uids
        if len(missing):
            raise ValueError(
                f"scorer {self.scorer!r} must give a feature of every sequence, got none of uid {int(missing[0])}"
            )
        return self.values[torch.from_numpy(at)]


def _check_places(uid: Int64, place: Int64) -> None:
    twice = np.flatnonzero(uid[1:] == uid[:-1])
    if len(twice):
        there = " and ".join(
            f"rank {rank} (micro-batch {micro_batch})"
            for rank, micro_batch, *_ in place[twice[0] : twice[0] + 2].tolist()
        )
        raise ValueError(f"uid must be unique in a step, got uid {uid[twice[0]]} on {there}")


def _check_whole(uid: Int64, group: Int64, group_size: Int64) -> None:
    """A group split over two steps would get the mean and the standard deviation of its parts."""
    groups, group_of, count = np.unique(group, return_inverse=True, return_counts=True)
    wrong = np.flatnonzero(count[group_of] != group_size)
    if len(wrong):
        of_group = group_of[wrong[0]]
        uids = uid[group_of == of_group]
        raise ValueError(
            f"a group must be whole in a step, got {count[of_group]} of the {group_size[wrong[0]]} samples of group "
            f"{groups[of_group]}: uids {uids[:8].tolist()}{' ...' if len(uids) > 8 else ''}"
        )


def _check_unique(uid: Int64, rule: str) -> None:
    twice = uid[1:][uid[1:] == uid[:-1]]
    if len(twice):
        raise ValueError(f"{rule}, got uid {int(twice[0])} twice")
