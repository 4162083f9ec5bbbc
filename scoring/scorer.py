"""TrainerScorer: one reward column computed on the trainer, and how its sequences are packed for the forward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FILLER_UID
from treepack.scoring.sequences import chunk_sequences, pack_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treepack.scoring.trainer import ScoringTrainer

RowReward = Literal["last", "mean"]


class TrainerScorer(ABC):
    """One reward column computed on the trainer from a group's samples.

    `group_extras` and `collate` run on rank 0 while steps are planned and packed; `features` runs on every rank for
    every micro-batch, so it may run collective forwards (FSDP); `group_rewards` runs on every rank, on the gathered
    features, and must give the same result on each.

    Attributes:
        name: the reward column's name, unlike every other column's.
        sharded: whether `features` runs collectives of its own. An error there cannot reach the other ranks, which wait
            in the collective: the failing process then ends.
        rows: what a rollout of several rows (forks of a conversation) gets: each row its own reward, of which the
            "last" row's votes in its group, or all of them the "mean" over the rows the scorer applies to.
    """

    name: str
    sharded: bool = False
    rows: RowReward = "last"

    def prepare(self, trainer: "ScoringTrainer") -> None:  # noqa: B027 - optional, hence not abstract
        """Called once on every rank before training; shard the scorer's model (`fully_shard`) here."""

    def group_extras(self, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sequences scored with a group but not trained, e.g. a reference answer.

        Args:
            samples: the group's sample dicts, by rising uid.

        Returns:
            One dict a sequence, with at least `input_ids` (n,) integers. They travel to `collate` in `row.extras`.
        """
        return []

    @abstractmethod
    def collate(
        self, rows: Sequence[ScoredRow], index: int
    ) -> tuple[list[dict[str, torch.Tensor]], dict[str, int | float]]:
        """Per-row input tensors for `features`, and their padding values by full key.

        Args:
            rows: the rows of one micro-batch, one a rank. A row's extras are `row.extras`, entries
                (scorer index, group_id, uid, dict).
            index: this scorer's position among the trainer's, which marks its entries in `row.extras`.

        Returns:
            A dict a row, all with the same keys; and the value that pads each key. Every row must yield input, also
            when it holds only filler samples (uid -1), so that collective forwards line up across ranks. Keys prefixed
            `c{j}_` split a row into chunks, each scored by its own `features` call; every row of a micro-batch must
            then have the same number of chunks, for the same reason.
        """

    @abstractmethod
    def features(self, trainer: "ScoringTrainer", inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of the sequences in one rank's chunk of a micro-batch, computed without gradient.

        Args:
            trainer: the trainer.
            inputs: one chunk of `collate`'s tensors on the rank's device, prefix removed, padded, dim 0 = 1.

        Returns:
            uids (S,) int64, and features (S, F) float32, F the same everywhere; uid -1 is discarded.
        """

    @abstractmethod
    def group_rewards(
        self, sample_features: torch.Tensor, extra_features: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64] | torch.Tensor, dict[str, float]]:
        """Rewards of a group's samples, and metrics to average over groups.

        Args:
            sample_features: (n, F) float32 on the CPU, the group's samples by rising uid.
            extra_features: (m, F) float32 on the CPU, the group's extras in the order `group_extras` gave them.

        Returns:
            (n,) float64, NaN where the scorer does not apply, and {metric name: value}.
        """


def check_packed_model(model: "PreTrainedModel") -> None:
    """Refuse a model that would get a packed row wrong.

    Raises:
        ValueError: the model was not loaded with tree attention.
        NotImplementedError: see `check_tree_support`.
    """
    from treepack.kernels.tree_support import check_tree_support

    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("treepack", "tree_fa3"):
        raise ValueError(f"model must be loaded with attn_implementation='treepack', got {attention!r}")
    check_tree_support(model)


def scored_sequences(row: ScoredRow, index: int) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
    """uids and token ids of what scorer `index` scores on `row`: its samples, fillers left out, and its extras."""
    found = [(sample["uid"], np.asarray(sample["input_ids"])) for sample in row.samples if sample["uid"] >= 0]
    found += [(uid, np.asarray(extra["input_ids"])) for scorer, _, uid, extra in row.extras if scorer == index]
    return [uid for uid, _ in found], [ids for _, ids in found]


def completion_masks(row: ScoredRow, index: int) -> list[npt.NDArray[np.int64]]:
    """`completion_mask`s (n,), 1 = completion, of what `scored_sequences` gives, in its order."""
    masks = [sample["completion_mask"] for sample in row.samples if sample["uid"] >= 0]
    masks += [extra["completion_mask"] for scorer, _, _, extra in row.extras if scorer == index]
    return [np.asarray(mask) for mask in masks]


def collate_packed(
    sequences: Sequence[tuple[list[int], list[npt.NDArray[np.int64]]]],
    *,
    token_budget: int,
    share_prefixes: bool = True,
    masks: Sequence[Sequence[npt.NDArray[np.int64]]] | None = None,
) -> tuple[list[dict[str, torch.Tensor]], dict[str, int | float]]:
    """`TrainerScorer.collate`'s result for a model that reads packed sequences.

    Each row's sequences are split into chunks that pack to `token_budget` tokens and packed by `pack_sequences`; a row
    short of chunks gets chunks of one token and uid -1.

    Args:
        sequences: (uids, token id arrays) of each row.
        token_budget: unique tokens of a chunk, which bounds the forward's memory.
        share_prefixes: whether a chunk shares prefixes.
        masks: each row's completion masks, (n,) of 0 and 1 for every sequence, for scorers that need them.

    Returns:
        Keys `c{j}_uid` (S,) int64 and `c{j}_` + those of `pack_sequences`, for each row, and the padding values. With
        `masks` also `c{j}_mask` (P,) uint8: those of a chunk's sequences laid end to end, as `positions` are.
    """
    chunks = [chunk_sequences(ids, token_budget, share_prefixes) for _, ids in sequences]
    num_chunks = max(1, max(len(of_row) for of_row in chunks))
    rows: list[dict[str, torch.Tensor]] = []
    for r, (uids, ids) in enumerate(sequences):
        tensors: dict[str, torch.Tensor] = {}
        for j in range(num_chunks):
            chunk = chunks[r][j] if j < len(chunks[r]) else []
            packed = pack_sequences([ids[i] for i in chunk] or [np.zeros(1, np.int64)], share_prefixes, kv_index=False)
            packed["uid"] = torch.tensor([uids[i] for i in chunk] or [FILLER_UID])
            if masks is not None:
                mask = np.concatenate([masks[r][i] for i in chunk] or [np.zeros(1, np.int64)])
                packed["mask"] = torch.from_numpy(mask.astype(np.uint8))
            tensors |= {f"c{j}_{key}": value for key, value in packed.items()}
        rows.append(tensors)
    padding: dict[str, int | float] = {
        key: FILLER_UID if key.endswith(("_uid", "_offsets")) or "cu_seqlens" in key else 0 for key in rows[0]
    }
    return rows, padding
