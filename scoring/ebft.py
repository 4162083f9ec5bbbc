"""EBFTScorer: rewards samples whose features, in a frozen network, match those of a reference answer.

N: tokens of the packed row, P: tokens of all its sequences, S: sequences, H: hidden size, F: feature size; n: samples
of a group.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from treepack.scoring.packed_scorer import PackedModelScorer
from treepack.scoring.sequences import unpack_sequences
from treepack.scoring.trainer import ScoringTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pooling = Literal["last_token", "mean", "completion_mean", "concat"]
Pool = Callable[[torch.Tensor], torch.Tensor]

RANK_TOLERANCE = 1e-5
"""Directions whose singular value is below this, relative to the largest, are not whitened but left out."""


class EBFTScorer(PackedModelScorer):
    """Feature-matching reward of energy-based fine-tuning.

    With f_j the features of the prompt and sample j, f_ref those of the prompt and the group's reference answer:

        reward_j = 2 a <f_j, f_ref> - 2 b / (n - 1) * sum over i != j of <f_j, f_i>

    The first term draws a sample to the reference, the second keeps the samples of a group apart (it is left out for a
    single sample). For a = b = 1 this is the policy gradient's reward for |mean_j f_j - f_ref|^2, the conditional
    feature-matching loss, which the paper takes with `advantage_estimator="rloo"`. Metrics, a group's means over its
    samples, of the features as they enter the reward:
      - `ebft/alignment`: `<f_j, f_ref>`
      - `ebft/diversity`: `1 / (n - 1) sum over i != j of <f_j, f_i>`; lower is more diverse
      - `ebft/cfm_loss`: `|mean_j f_j - f_ref|^2`

    Features are the hidden states of some layers, each pooled over the sequence, laid end to end; then, if asked,
    whitened by the pseudo-inverse square root of the group's second moment (1/n sum_j f_j f_j^T, the reference left
    out), then scaled to unit length, which makes `<f_j, f_ref>` a cosine. Only pooled hidden states are kept.

    The reference answer is the sample key `reference_ids`: (m,) integers, the answer's token ids without the prompt,
    the same in all samples of a group that have it. The prompt put before it is what comes before the first completion
    token of the first sample that has one. Its features are computed once a group. A group without a reference gets
    NaN, not applicable, and so does, under "completion_mean" pooling, a sample without a completion token, which then
    counts nowhere in its group.

    Args:
        model: the feature network, a frozen decoder-only transformers model, with or without a head, loaded with
            `attn_implementation="treepack"`, on the device it is to run on; put in eval mode here.
        token_budget: unique tokens of one forward; longer rows are split into chunks.
        name: the reward column's name.
        layers: fractions of the depth in (0, 1]: a fraction q of L layers stands for the output of layer floor(q L),
            counted from 1 (of the first where that is 0, before the final norm where it is L). Each layer counts once.
        pooling: "last_token"; "mean" over all tokens; "completion_mean" over the completion's; "concat": the tokens at
            1/4, 1/2 and 3/4 of the sequence, laid end to end.
        whiten: whether to whiten. Samples that are linearly independent, as those of a group smaller than F mostly are,
            become orthogonal by it: their diversity term is then 0.
        normalize: whether to scale features to unit length.
        alignment_coef: a.
        diversity_coef: b.
        share_prefixes: whether sequences of a row share prefixes.
        shard: whether `prepare` shards the base model over all ranks with FSDP2.

    Raises:
        ValueError: a model that was not loaded with tree attention or has no list of decoder layers; an option out of
            range.
        NotImplementedError: a packed row would be wrong for this model (see `check_tree_support`).

    Source: Jelassi et al. 2026, "Matching Features, Not Tokens: Energy-Based Fine-Tuning of Language Models", arXiv
    2603.12248, equation 7; layers, poolings and the choice of unit length as in axolotl's `core.trainers.ebft`.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        token_budget: int,
        name: str = "ebft",
        layers: Sequence[float] = (0.25, 0.5, 0.75),
        pooling: Pooling = "last_token",
        whiten: bool = False,
        normalize: bool = True,
        alignment_coef: float = 1.0,
        diversity_coef: float = 1.0,
        share_prefixes: bool = True,
        shard: bool = False,
    ) -> None:
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {get_args(Pooling)}, got {pooling!r}")
        if not layers or not all(0 < fraction <= 1 for fraction in layers):
            raise ValueError(f"layers must be fractions of the depth in (0, 1], one at least, got {tuple(layers)}")
        for option, value in (("alignment_coef", alignment_coef), ("diversity_coef", diversity_coef)):
            if not math.isfinite(value):
                raise ValueError(f"{option} must be finite, got {value}")
        super().__init__(
            model,
            name=name,
            token_budget=token_budget,
            share_prefixes=share_prefixes,
            shard=shard,
            with_masks=pooling == "completion_mean",
        )
        self.layers = _layers_at(model, layers)
        self.pooling = pooling
        self.whiten = whiten
        self.normalize = normalize
        self.alignment_coef = alignment_coef
        self.diversity_coef = diversity_coef

    def group_extras(self, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The reference answer after the group's prompt, if the group has one.

        Raises:
            ValueError: `reference_ids` is empty, not one-dimensional or not the same in all samples.
            TypeError: it does not hold integers.
        """
        references = [
            (sample["uid"], np.asarray(sample["reference_ids"])) for sample in samples if "reference_ids" in sample
        ]
        prompt = next((_prompt(sample) for sample in samples if np.any(sample["completion_mask"])), None)
        if not references or prompt is None:
            return []
        uid, reference = references[0]
        if reference.ndim != 1 or not len(reference):
            raise ValueError(f"reference_ids must be a non-empty (m,), got shape {reference.shape} in sample uid {uid}")
        if reference.dtype.kind not in "iu":
            raise TypeError(f"reference_ids must hold integers, got {reference.dtype} in sample uid {uid}")
        for other, ids in references:
            if not np.array_equal(ids, reference):
                raise ValueError(f"reference_ids must be the same in all samples of a group, got others in uid {other}")
        mask = np.r_[np.zeros(len(prompt), np.int64), np.ones(len(reference), np.int64)]
        return [{"input_ids": np.r_[prompt, reference], "completion_mask": mask}]

    def features(self, trainer: ScoringTrainer, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(S, F): each sequence's pooled hidden states, layer by layer; zeros where there is nothing to pool."""
        model_inputs, positions_P, offsets = unpack_sequences(inputs)
        pool = _pooler(self.pooling, positions_P, offsets, model_inputs["input_ids"].shape[1], inputs.get("mask"))
        pooled: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden_NH = (output[0] if isinstance(output, tuple) else output)[0]
            pooled.append(pool(hidden_NH))

        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.callback(layer.register_forward_hook(keep).remove)
            self.run_base(model_inputs)
        return inputs["uid"].reshape(-1)[: len(offsets) - 1], torch.cat(pooled, dim=1)

    def group_rewards(
        self, sample_features: torch.Tensor, extra_features: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64], dict[str, float]]:
        """See the class.

        Raises:
            ValueError: features that are not finite.
        """
        rewards = np.full(len(sample_features), np.nan)
        if not (torch.isfinite(sample_features).all() and torch.isfinite(extra_features).all()):
            raise ValueError(f"scorer {self.name!r}: features must be finite, got NaN or infinity from the model")
        applies = sample_features.any(dim=1)
        if not len(extra_features) or not applies.any():
            return rewards, {}
        f, f_ref = sample_features[applies].double(), extra_features.double()
        if self.whiten:
            f, f_ref = _whitened(f, f_ref)
        if self.normalize:
            f, f_ref = (nn.functional.normalize(vectors, dim=1) for vectors in (f, f_ref))
        alignment = f @ f_ref[0]
        others = (f @ f.T).fill_diagonal_(0.0).sum(dim=1) / max(len(f) - 1, 1)
        rewards[applies.numpy()] = (2 * self.alignment_coef * alignment - 2 * self.diversity_coef * others).numpy()
        return rewards, {
            "ebft/alignment": float(alignment.mean()),
            "ebft/diversity": float(others.mean()),
            "ebft/cfm_loss": float((f.mean(dim=0) - f_ref[0]).square().sum()),
        }


def _prompt(sample: dict[str, Any]) -> npt.NDArray[Any]:
    """The tokens before the first completion token."""
    return np.asarray(sample["input_ids"])[: int(np.argmax(np.asarray(sample["completion_mask"]) != 0))]


def _layers_at(model: "PreTrainedModel", fractions: Sequence[float]) -> list[nn.Module]:
    """The decoder layers at fractions of the depth, each once, in their order."""
    decoder = model.get_decoder()
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = next((m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == depth), None)
    if layers is None:
        raise ValueError(f"model must have a list of its {depth} decoder layers, got {type(model).__name__} without")
    return [layers[number - 1] for number in sorted({max(1, math.floor(q * depth)) for q in fractions})]


def _pooler(
    pooling: Pooling, positions_P: torch.Tensor, offsets: torch.Tensor, num_tokens: int, mask: torch.Tensor | None
) -> Pool:
    """A function (N, H) -> (S, H), or (S, 3 H) for "concat", both float32."""
    starts, lengths = offsets[:-1], offsets.diff()
    if pooling == "last_token":
        at = positions_P[starts + lengths - 1]
        return lambda hidden_NH: hidden_NH[at].float()
    if pooling == "concat":
        quarters = torch.arange(1, 4, device=offsets.device)
        at = positions_P[starts[:, None] + lengths[:, None] * quarters // 4]
        return lambda hidden_NH: hidden_NH[at].float().flatten(1)
    pooled_P = torch.ones_like(positions_P, dtype=torch.bool)
    if pooling == "completion_mean":
        assert mask is not None, "collate sends masks for this pooling"
        pooled_P = mask.reshape(-1)[: len(positions_P)].bool()
    # A mean is a product with a matrix of weights: exact about prefixes that many sequences share, without a gathered
    # copy of each sequence, and with one order of summation.
    sequence_P = torch.repeat_interleave(lengths)
    weight_SN = torch.zeros(len(lengths), num_tokens, device=offsets.device)
    weight_SN[sequence_P[pooled_P], positions_P[pooled_P]] = 1.0
    weight_SN /= weight_SN.sum(dim=1, keepdim=True).clamp(min=1.0)

    def mean(hidden_NH: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return weight_SN @ hidden_NH.float()

    return mean


def _whitened(f_nF: torch.Tensor, f_ref_1F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, times the pseudo-inverse square root of f's second moment, in coordinates of the span of f.

    With f = U S V^T the second moment is V S^2/n V^T, and its pseudo-inverse square root V sqrt(n)/S V^T. Inner
    products do not change when the last V^T is left off, and vectors are n long instead of F.
    """
    _, s, vt = torch.linalg.svd(f_nF, full_matrices=False)
    kept = s > RANK_TOLERANCE * s[0]
    transform = vt[kept].T * (math.sqrt(len(f_nF)) / s[kept])
    return f_nF @ transform, f_ref_1F @ transform
