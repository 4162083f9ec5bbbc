"""What a step would be made of under each of several settings: the planner is run, the model's work is counted."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.scoring.errors import ModelError
from treepack.scoring.planner import Placement, StepPlanner
from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FILLER_UID, Sample
from treepack.scoring.token_cost import DENSE_8B_TOKEN_COST, token_cost

GIB = 2**30
SIMILAR = 1.03  # settings this close in predicted time are taken for equal


@dataclass(frozen=True)
class ModelShape:
    """What the forecast needs of a model.

    Attributes:
        name: for people.
        layers, hidden, mlp: decoder layers, width, and width of the MLP that a token passes.
        heads, kv_heads, head_dim: of attention.
        token_cost: see the function `token_cost`.
    """

    name: str = "a dense 8B model"
    layers: int = 32
    hidden: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    token_cost: float = DENSE_8B_TOKEN_COST

    def training_flops(self, pairs: int) -> float:
        """FLOPs of attention, forward (2 products) and backward (5, the scores computed again among them)."""
        return 14.0 * self.layers * self.heads * self.head_dim * pairs

    def activation_bytes(self, tokens: int) -> int:
        """Bytes of activations of a row in bf16, every layer checkpointed and the head fused with the loss.

        A hidden state a layer, and what one layer holds while its backward runs, with its gradients. Weights, gradients
        of weights and optimizer states are not in it.
        """
        layer = 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.mlp
        return 2 * tokens * (self.layers * self.hidden + 2 * layer)


def read_model_shape(path: Path) -> ModelShape:
    """The shape of the model in a checkpoint folder, of which only config.json is read.

    Raises:
        ModelError: there is none, or it is of no decoder.
    """
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a checkpoint folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(path)
        cost = token_cost(config)
    except Exception as error:  # whatever the reader of a damaged or unknown file runs into
        raise ModelError(f"{path}: cannot be read: {str(error).strip().splitlines()[0]}") from error
    text: Any = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return ModelShape(
        name=path.name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        mlp=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        token_cost=cost,
    )


@dataclass(frozen=True)
class Setting:
    """How steps are planned: rows of a micro-batch, micro-batches of a step, tokens of a row, and placement."""

    ranks: int
    steps: int
    token_budget: int
    placement: Placement


@dataclass(frozen=True)
class Forecast:
    """What the rollouts come to under a setting.

    Attributes:
        setting: the setting.
        optimizer_steps: steps of all rollouts that are not dropped.
        dropped_groups, dropped_samples: what does not fit into a step.
        packing_ratio: raw tokens a forwarded one; None where all are dropped.
        memory_gib: activations of the largest row, see `ModelShape.activation_bytes`; GiB of 2^30 bytes.
        attention_tflops, unshared_attention_tflops: attention of all rows, forward and backward; the same without
            sharing.
        busy: share of the devices' time that is not spent waiting for the slowest rank of the micro-batch, predicted.
        device_cost: predicted time of all devices together for a sample, in units of a forward of one visible key.
    """

    setting: Setting
    optimizer_steps: int
    dropped_groups: int
    dropped_samples: int
    packing_ratio: float | None
    memory_gib: float
    attention_tflops: float
    unshared_attention_tflops: float
    busy: float
    device_cost: float


@dataclass(frozen=True)
class Recommendation:
    """A setting and why it is the one."""

    setting: Setting
    reason: str


def forecast(samples: Sequence[Sample], setting: Setting, model: ModelShape) -> Forecast:
    """Plan all samples, a group's in a run, under a setting."""
    dropped: list[int] = []
    planner = StepPlanner(
        samples,
        num_processes=setting.ranks,
        steps=setting.steps,
        token_budget=setting.token_budget,
        samples_per_row=0,
        scorers=(),
        metrics={},
        placement=setting.placement,
        token_cost=model.token_cost,
        on_dropped=lambda group, reason: dropped.append(len(group)),
    )
    with _quiet_planner():
        rows = [row for micro_batch in planner for row in micro_batch]
    tokens = np.array([row.num_tokens for row in rows], np.int64)
    pairs = np.array([row.load for row in rows], np.int64)
    cost = (model.token_cost * tokens + pairs).reshape(-1, setting.ranks)
    lengths = np.array([length for row in rows for length in _lengths(row)], np.int64)
    device_time = float(setting.ranks * cost.max(axis=1).sum()) if len(rows) else 0.0
    return Forecast(
        setting=setting,
        optimizer_steps=len(rows) // (setting.ranks * setting.steps),
        dropped_groups=len(dropped),
        dropped_samples=sum(dropped),
        packing_ratio=float(lengths.sum() / tokens.sum()) if len(rows) else None,
        memory_gib=model.activation_bytes(int(tokens.max(initial=0))) / GIB,
        attention_tflops=model.training_flops(int(pairs.sum())) / 1e12,
        unshared_attention_tflops=model.training_flops(int((lengths * (lengths + 1) // 2).sum())) / 1e12,
        busy=float(cost.sum()) / device_time if len(rows) else 0.0,
        device_cost=device_time / len(lengths) if len(rows) else 0.0,
    )


def recommend(forecasts: Sequence[Forecast], memory_gib: float | None = None) -> Recommendation | None:
    """The setting that drops least, then takes least device time a sample, then least memory.

    Args:
        forecasts: the settings to choose from.
        memory_gib: what a device has left for activations; None for no bound.

    Returns:
        None where no setting fits or all drop everything.
    """
    fitting = [one for one in forecasts if memory_gib is None or one.memory_gib <= memory_gib]
    fitting = [one for one in fitting if one.packing_ratio is not None]
    if not fitting:
        return None
    fewest = min(one.dropped_samples for one in fitting)
    keeping = [one for one in fitting if one.dropped_samples == fewest]
    least = min(keeping, key=lambda one: one.device_cost)
    similar = [one for one in keeping if one.device_cost <= SIMILAR * least.device_cost]
    best = min(similar, key=lambda one: (one.setting.token_budget, -one.setting.ranks, one.device_cost))
    return Recommendation(best.setting, _reason(best, least, fitting, fewest))


def _reason(best: Forecast, least: Forecast, fitting: Sequence[Forecast], fewest: int) -> str:
    kept = f"it drops {fewest} samples, no setting fewer" if fewest else "it drops nothing"
    losing = sum(one.dropped_samples > fewest for one in fitting)
    if losing:
        kept += f" ({losing} of {len(fitting)} settings drop more)"
    time = "and takes least device time a sample"
    if best is not least:
        more = 100 * (best.device_cost / least.device_cost - 1)
        setting = least.setting
        time = (
            f"and takes {more:.1f} % more device time a sample than the best ({setting.ranks} ranks x "
            f"{setting.token_budget:,} tokens, {setting.placement}), with the smallest rows that come so close"
        )
    return f"{kept}, {time}; devices are busy {100 * best.busy:.0f} % of it"


def _lengths(row: ScoredRow) -> Iterator[int]:
    return (len(sample["input_ids"]) for sample in row.samples if sample["uid"] != FILLER_UID)


@contextmanager
def _quiet_planner() -> Iterator[None]:
    """Without a warning a dropped group: the forecast counts them."""
    logger = logging.getLogger("treepack.scoring.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
