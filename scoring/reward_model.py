"""RewardModelScorer: a sequence classification model's score of each sample, from one packed forward."""

from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from treepack.scoring.packed_scorer import PackedModelScorer
from treepack.scoring.rows import ScoredRow
from treepack.scoring.scorer import RowReward
from treepack.scoring.sequences import unpack_sequences
from treepack.scoring.trainer import ScoringTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModelScorer(PackedModelScorer):
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
        rows: for a rollout of several rows, "last" or "mean" (see `TrainerScorer`).
        tokenizer: the model's, where it is not the policy's: samples are decoded by `policy_tokenizer`, special tokens
            included, and their text is encoded as it stands, nothing added. `token_budget` counts the model's tokens.
        policy_tokenizer: the policy's; given with `tokenizer`.
        share_prefixes: whether sequences of a row share prefixes.
        shard: whether `prepare` shards the base model over all ranks with FSDP2.

    Raises:
        ValueError: the model has no `score` head or was not loaded with tree attention, or has several labels and no
            `label`, or no such label; `rows` is neither of the two; one tokenizer without the other.
        NotImplementedError: a packed row would be wrong for this model (see `check_tree_support`).
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        token_budget: int,
        name: str = "reward_model",
        label: int | None = None,
        rows: RowReward = "last",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        policy_tokenizer: "PreTrainedTokenizerBase | None" = None,
        share_prefixes: bool = True,
        shard: bool = False,
    ) -> None:
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
        if rows not in get_args(RowReward):
            raise ValueError(f"rows must be one of {get_args(RowReward)}, got {rows!r}")
        if (tokenizer is None) is not (policy_tokenizer is None):
            raise ValueError("tokenizer and policy_tokenizer must be given together, got one of them")
        super().__init__(model, name=name, token_budget=token_budget, share_prefixes=share_prefixes, shard=shard)
        self.head = head
        self.label = label or 0
        self.rows = rows
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer

    def sequences(self, row: ScoredRow, index: int) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
        """The row's samples in the model's own tokens.

        Raises:
            ValueError: a sample whose text has no token there.
        """
        uids, ids = super().sequences(row, index)
        if self.tokenizer is None or self.policy_tokenizer is None or not ids:
            return uids, ids
        texts = [self.policy_tokenizer.decode(of_sample.tolist(), skip_special_tokens=False) for of_sample in ids]
        encoded = [np.asarray(own, np.int64) for own in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for uid, own, text in zip(uids, encoded, texts, strict=True):
            if not len(own):
                raise ValueError(f"tokenizer must give a token for every sample, got none for {text!r} of uid {uid}")
        return uids, encoded

    def features(self, trainer: ScoringTrainer, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's outputs (S, num_labels) on each sequence's last token."""
        model_inputs, positions, offsets = unpack_sequences(inputs)
        last = positions[offsets[1:] - 1]
        hidden = self.run_base(model_inputs)
        uids = inputs["uid"].reshape(-1)[: len(last)]
        return uids, self.head(hidden[last]).float()

    def group_rewards(
        self, sample_features: torch.Tensor, extra_features: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64], dict[str, float]]:
        """The chosen output of each sample."""
        return sample_features[:, self.label].double().numpy(), {}
