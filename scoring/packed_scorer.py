"""PackedModelScorer: what scorers share whose features come from a frozen transformers model's packed forward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from treepack.kernels.hybrid import hybrid_support
from treepack.scoring.rows import ScoredRow
from treepack.scoring.scorer import (
    TrainerScorer,
    check_packed_model,
    collate_packed,
    completion_masks,
    scored_sequences,
)
from treepack.scoring.sharding import reshard, shard_frozen
from treepack.scoring.trainer import ScoringTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedModelScorer(TrainerScorer):
    """A scorer that runs the base model of a frozen transformers model over packed rows.

    Args:
        model: loaded with `attn_implementation="treepack"`, on the device it is to run on; put in eval mode here.
        name: the reward column's name.
        token_budget: unique tokens of one forward; longer rows are split into chunks.
        share_prefixes: whether sequences of a row share prefixes; they never do in a model that `prepare_model` found
            to need chains.
        shard: whether `prepare` shards the base model over all ranks with FSDP2.
        with_masks: whether `collate` adds completion masks.

    Raises:
        ValueError: `token_budget` < 1, or a model that was not loaded with tree attention.
        NotImplementedError: a packed row would be wrong for this model (see `check_tree_support`).
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        name: str,
        token_budget: int,
        share_prefixes: bool,
        shard: bool,
        with_masks: bool = False,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {token_budget}")
        check_packed_model(model)
        self.model = model.eval()
        self.name = name
        self.token_budget = token_budget
        support = hybrid_support(model)
        self.share_prefixes = share_prefixes and (support is None or support.shares_prefixes)
        self.sharded = shard
        self.with_masks = with_masks

    def prepare(self, trainer: ScoringTrainer) -> None:
        """Shard the base model, if asked to; call once on every rank."""
        if self.sharded:
            shard_frozen(self.model.base_model, trainer.accelerator)

    def collate(
        self, rows: Sequence[ScoredRow], index: int
    ) -> tuple[list[dict[str, torch.Tensor]], dict[str, int | float]]:
        """See `TrainerScorer.collate`.

        Raises:
            ValueError: a token that the model does not know.
        """
        sequences = [self.sequences(row, index) for row in rows]
        for uids, ids in sequences:
            self._check_known(uids, ids)
        return collate_packed(
            sequences,
            token_budget=self.token_budget,
            share_prefixes=self.share_prefixes,
            masks=[completion_masks(row, index) for row in rows] if self.with_masks else None,
        )

    def sequences(self, row: ScoredRow, index: int) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
        """uids and token ids of what is scored on `row`: its samples and this scorer's extras."""
        return scored_sequences(row, index)

    def _check_known(self, uids: Sequence[int], ids: Sequence[npt.NDArray[np.int64]]) -> None:
        """A GPU would only tell of them by an assertion that ends the process."""
        vocab_size = self.model.config.get_text_config().vocab_size
        for uid, tokens in zip(uids, ids, strict=True):
            largest = tokens.max(initial=0)
            if largest >= vocab_size:
                raise ValueError(
                    f"scorer {self.name!r} must know the tokens it is to read, its model's vocabulary is "
                    f"[0, {vocab_size}), got {largest} in {'a group extra' if uid < 0 else f'sample uid {uid}'}"
                )

    def run_base(self, model_inputs: dict[str, Any]) -> torch.Tensor:
        """Last hidden states (N, hidden size) of a packed row, after the final norm."""
        hidden: torch.Tensor = self.model.base_model(**model_inputs).last_hidden_state[0]
        if self.sharded:
            reshard(self.model.base_model)
        return hidden
