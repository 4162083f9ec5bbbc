"""RewardModelScorer: a sequence classification model's score of each sample, from one packed forward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from treepack.scoring.rows import ScoredRow
from treepack.scoring.scorer import TrainerScorer, collate_packed, scored_sequences
from treepack.scoring.sequences import unpack_sequences
from treepack.scoring.trainer import ScoringTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RewardModelScorer(TrainerScorer):
    """Scores samples with a transformers sequence classification model.

    The base model runs once over the packed row and the classification head on the hidden state of each sequence's last
    token, found by its recorded offset: pooling by the pad token, as the model's own forward does, would read a single
    sequence and, where pad is also the end-of-turn token, the wrong position.

    Args:
        model: a decoder-only `AutoModelForSequenceClassification` model (base model + `score` head) loaded with
            `attn_implementation="treepack"`, on the device it is to run on; put in eval mode here.
        token_budget: unique tokens of one forward; longer rows are split into chunks.
        name: the reward column's name.
        label: which of the head's outputs is the reward; needed where it has several.
        share_prefixes: whether sequences of a row share prefixes.

    Raises:
        ValueError: the model has no `score` head, or several labels and no `label`, or no such label.
        NotImplementedError: a packed row would be wrong for this model (see `check_tree_support`).
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        token_budget: int,
        name: str = "reward_model",
        label: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        from treepack.kernels.tree_support import check_tree_support

        head = getattr(model, "score", None)
        if not isinstance(head, nn.Module):
            raise ValueError(
                f"model must be a sequence classification model with a `score` head, got {type(model).__name__}"
            )
        num_labels: int = model.config.num_labels
        if label is None and num_labels != 1:
            raise ValueError(f"label must say which of the model's {num_labels} outputs is the reward, got None")
        if label is not None and not 0 <= label < num_labels:
            raise ValueError(f"label must be in [0, {num_labels}), got {label}")
        if token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {token_budget}")
        check_tree_support(model)
        self.name = name
        self.model = model.eval()
        self.head = head
        self.label = label or 0
        self.token_budget = token_budget
        self.share_prefixes = share_prefixes

    def collate(
        self, rows: Sequence[ScoredRow], index: int
    ) -> tuple[list[dict[str, torch.Tensor]], dict[str, int | float]]:
        """See `TrainerScorer.collate`."""
        sequences = [scored_sequences(row, index) for row in rows]
        return collate_packed(sequences, token_budget=self.token_budget, share_prefixes=self.share_prefixes)

    def features(self, trainer: ScoringTrainer, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's outputs (S, num_labels) on each sequence's last token."""
        model_inputs, positions, offsets = unpack_sequences(inputs)
        last = positions[offsets[1:] - 1]
        hidden = self.model.base_model(**model_inputs).last_hidden_state[0]
        uids = inputs["uid"].reshape(-1)[: len(last)]
        return uids, self.head(hidden[last]).float()

    def group_rewards(
        self, sample_features: torch.Tensor, extra_features: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64], dict[str, float]]:
        """The chosen output of each sample."""
        return sample_features[:, self.label].double().numpy(), {}
