"""LogProbScorer: how likely a frozen language model finds each completion, from one packed forward.

N: tokens of the packed row, P: tokens of all its sequences, S: sequences, T: scored tokens.
"""

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from treepack.scoring.log_probs import add_rows, token_log_probs
from treepack.scoring.packed_scorer import PackedModelScorer
from treepack.scoring.sequences import unpack_sequences
from treepack.scoring.trainer import ScoringTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Reduction = Literal["mean", "sum"]

_PROBE_TOKENS = 16


class LogProbScorer(PackedModelScorer):
    """Log-probability of a completion under a frozen causal language model: a likelihood or KL reward.

    With y the tokens of a sample whose `completion_mask` is 1, except a first token, which nothing predicts:

        reward = sum or mean over t in y of log p(token_t | tokens before t)

    in nats, at temperature 1. The sum of a reference model's, less that of the policy, estimates -KL(policy |
    reference). Each packed token is scored once, however many samples share it, and logits are held for one chunk of
    tokens and vocabulary at a time (`token_log_probs`). A sample without a completion token gets NaN: not applicable.

    Args:
        model: a decoder-only `AutoModelForCausalLM` model loaded with `attn_implementation="treepack"`, on the device
            it is to run on; put in eval mode here. Its logits must be its head's weight times its last hidden state and
            nothing more, which a forward of a few tokens checks.
        token_budget: unique tokens of one forward; longer rows are split into chunks.
        name: the reward column's name.
        reduction: "mean" over the completion's tokens or their "sum".
        share_prefixes: whether sequences of a row share prefixes.
        shard: whether `prepare` shards the base model over all ranks with FSDP2.

    Raises:
        ValueError: no causal language model, or one not loaded with tree attention; an option out of range.
        NotImplementedError: a packed row would be wrong for this model (see `check_tree_support`), or its logits are
            biased, scaled or capped.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        token_budget: int,
        name: str = "log_prob",
        reduction: Reduction = "mean",
        share_prefixes: bool = True,
        shard: bool = False,
    ) -> None:
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {get_args(Reduction)}, got {reduction!r}")
        super().__init__(
            model, name=name, token_budget=token_budget, share_prefixes=share_prefixes, shard=shard, with_masks=True
        )
        self.head = _plain_head(self.model)
        self.reduction = reduction

    def features(self, trainer: ScoringTrainer, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(S, 2): the summed log-probability of each completion, and its number of tokens."""
        model_inputs, positions_P, offsets = unpack_sequences(inputs)
        weight_VH = self.head.weight
        if isinstance(weight_VH, DTensor):  # tied to the sharded embedding
            weight_VH = weight_VH.full_tensor()
        hidden_NH = self.run_base(model_inputs).to(weight_VH.dtype)
        scored_P = inputs["mask"].reshape(-1)[: len(positions_P)].bool()
        scored_P[offsets[:-1]] = False
        at_T = scored_P.nonzero()[:, 0]
        log_probs_T = _shared_log_probs(
            hidden_NH, weight_VH, model_inputs["input_ids"][0], positions_P[at_T - 1], positions_P[at_T]
        )
        sequence_T = torch.searchsorted(offsets, at_T, right=True) - 1
        terms_T2 = torch.stack([log_probs_T, torch.ones_like(log_probs_T)], dim=1).double()
        features = add_rows(terms_T2, sequence_T, len(offsets) - 1)
        return inputs["uid"].reshape(-1)[: len(features)], features.float()

    def group_rewards(
        self, sample_features: torch.Tensor, extra_features: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64], dict[str, float]]:
        """The sum or mean of each sample, NaN without a completion token.

        Raises:
            ValueError: the model gave a log-probability that is not finite.
        """
        total, count = sample_features.double().numpy().T
        if not np.isfinite(total).all():
            bad = int(np.flatnonzero(~np.isfinite(total))[0])
            raise ValueError(
                f"scorer {self.name!r}: log-probabilities must be finite, got {total[bad]} for sample {bad} of a group "
                f"of {len(total)}, by rising uid"
            )
        divisor = count if self.reduction == "mean" else np.ones_like(count)
        return np.where(count > 0, total / np.maximum(divisor, 1), np.nan), {}


def _shared_log_probs(
    hidden_NH: torch.Tensor,
    head_VH: torch.Tensor,
    input_ids_N: torch.Tensor,
    predecessor_T: torch.Tensor,
    scored_T: torch.Tensor,
) -> torch.Tensor:
    """Log-probabilities (T,) of the packed tokens `scored_T`, each computed once.

    A packed token has one successor in all samples that share it (it is keyed on both), hence one target.
    """
    target_N = torch.full_like(input_ids_N, -1)
    target_N[predecessor_T] = input_ids_N[scored_T]
    used = (target_N >= 0).nonzero()[:, 0]
    log_probs = token_log_probs(hidden_NH, head_VH, used, target_N[used])
    log_probs_N = torch.zeros(len(target_N), dtype=log_probs.dtype, device=log_probs.device)
    log_probs_N[used] = log_probs
    return log_probs_N[predecessor_T]


def _plain_head(model: "PreTrainedModel") -> nn.Linear:
    """The language model head, once a forward has shown that the logits are its product and nothing more."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"model must be a causal language model with a linear head, got {type(model).__name__}")
    # Spread over the vocabulary: a cap or a scale shows on large logits, which not every token has.
    input_ids = torch.linspace(0, head.weight.shape[0] - 1, _PROBE_TOKENS, device=head.weight.device).long()[None]
    inputs = {"input_ids": input_ids, "position_ids": torch.arange(_PROBE_TOKENS, device=input_ids.device)[None]}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0].float()
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
        product = nn.functional.linear(hidden, head.weight).float()
    rounding = 4 * torch.finfo(head.weight.dtype).eps * float(product.abs().max())
    if float((logits - product).abs().max()) > rounding:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be scored: its logits are not its head's weight times its last hidden "
            "state (a bias, scale or cap)"
        )
    return head
