"""From a micro-batch of rows to the tensors of every rank, written once, straight into the padded batch.

W: ranks (rows of a micro-batch), S: samples of the fullest row, E: extras of the row with most, C: reward columns.
"""

import math
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treepack.scoring.buffers import BlockPool
from treepack.scoring.progress import GroupProgress
from treepack.scoring.rows import ROW_FIELDS, RowLayout, ScoredRow, TreeRow
from treepack.scoring.samples import FILLER_UID, Sample
from treepack.scoring.scorer import TrainerScorer

if TYPE_CHECKING:
    from treepack.scoring.recorder import StepRecorder

PAD_UID = -1

# What travels between ranks on every backend (gloo refuses int16).
TRAVELLING_DTYPES = (torch.int64, torch.float64, torch.uint8, torch.float32, torch.int32)


class ScoringCollator:
    """TRL's `DataCollatorForRollout` (1.16), plus what `score_step` needs on every rank.

    Called like a DataLoader's `collate_fn` with a list of one micro-batch, itself the list of its rows, one a rank.

    Args:
        pad_token_id: fills `input_ids` up to the longest row.
        num_processes: W.
        metrics: sink of the sample and packing metrics, {name: list}; those of TRL's collator. A sample metric that no
            sample of the micro-batch has a number for is left out: one NaN would wipe the logging window's mean.
        token_budget: the planner's budget of a row, 0 without one.
        progress: told of the groups of each micro-batch as planned, which `StepPlanner` does itself: for other
            planners.
        recorder: handed the rows of each micro-batch; give it the step's scores too, see `StepRecorder`.
        scorers: the trainer's scorers, in the order the trainer has them.

    Attributes:
        groups_trained: the `group_id`s of all samples collated so far, as in TRL. Not what a resume may skip: a
            dispatcher has the next step collated before this one trains (see `GroupProgress`).
    """

    def __init__(
        self,
        pad_token_id: int,
        num_processes: int = 1,
        *,
        metrics: MutableMapping[str, list[Any]] | None = None,
        token_budget: int = 0,
        progress: GroupProgress | None = None,
        recorder: "StepRecorder | None" = None,
        scorers: Sequence[TrainerScorer] = (),
    ) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes must be at least 1, got {num_processes}")
        self.pad_token_id = pad_token_id
        self.num_processes = num_processes
        self.metrics = defaultdict(list) if metrics is None else metrics
        self.token_budget = token_budget
        self.progress = progress
        self.recorder = recorder
        self.scorers = tuple(scorers)
        self.groups_trained: set[Any] = set()
        self._pool = BlockPool()

    def __call__(self, examples: Sequence[Sequence[TreeRow]]) -> dict[str, Any]:
        """Collate one micro-batch.

        Args:
            examples: one micro-batch of W rows, none empty.

        Returns:
            - the keys of `TreeRow.pack`, each padded on the right to (W, longest row), and `attention_mask` (W, N)
              int64, 1 where `input_ids` is not padding. A row without any loss term gets one of advantage 0: TRL's loss
              needs one. It is not counted.
            - `global_n_tokens`, `global_n_forward_tokens`, `mean_seq_len` (W,) float32: loss terms and unique tokens of
              all rows, and the latter over the number of samples; the same on every rank.
            - `scoring`, where samples carry a `uid`: `uid`, `group`, `group_size`, `rollout` (W, S) int64, padding -1,
              column = `segment_id`; `trained_tokens` (W, S) int64, loss terms; `rewards` (W, S, C) float64 in the order
              of the rows' `reward_names`, NaN = not applicable; `reward_names` (W, bytes) uint8 (see `names_of`);
              `truncated` (W, S) uint8; `extra_uid`, `extra_group`, `extra_scorer` (W, E) int64, padding -1; `scorers`
              {str(index): its `collate`d tensors, padded}.

        Raises:
            ValueError: not one micro-batch of W rows; rows that disagree on `reward_names`, or samples with a column
                that is not among them; a scorer's `collate` that does not give every row the same keys.
            TypeError: scored samples on rows that are not `ScoredRow`s; a scorer's tensor of a dtype that does not
                travel between ranks.
        """
        if len(examples) != 1:
            raise ValueError(f"examples must hold one micro-batch (batch_size=1), got {len(examples)}")
        rows = examples[0]
        if len(rows) != self.num_processes:
            raise ValueError(f"a micro-batch must hold num_processes = {self.num_processes} rows, got {len(rows)}")
        layouts = [row.layout() for row in rows]
        num_samples = sum(len(row.samples) for row in rows)
        num_tokens = sum(row.num_tokens for row in rows)
        batch: dict[str, Any] = _pack_rows(layouts, self.pad_token_id, self._pool)
        batch["global_n_tokens"] = self._on_every_rank(sum(layout.sizes["M"] for layout in layouts))
        batch["global_n_forward_tokens"] = self._on_every_rank(num_tokens)
        batch["mean_seq_len"] = self._on_every_rank(num_tokens / num_samples)
        if self.scorers or "uid" in rows[0].samples[0]:
            batch["scoring"] = _scoring_inputs(rows, layouts, self.scorers)

        real = [sample for row in rows for sample in row.samples if sample.get("uid") != FILLER_UID]
        groups = {sample["group_id"] for sample in real}
        self.groups_trained.update(groups)
        if self.progress is not None:
            self.progress.planned(groups)
        if self.recorder is not None:
            self.recorder.collated(rows)
        self._log_samples(real)
        self._log_rows(rows, num_samples)
        return batch

    def _on_every_rank(self, value: float) -> torch.Tensor:
        return torch.full((self.num_processes,), float(value))

    def _log_samples(self, samples: Sequence[Sample]) -> None:
        """Means of the samples' own metrics, each over the samples that have a number for it."""
        for name in dict.fromkeys(name for sample in samples for name in sample["metrics"]):
            values = [sample["metrics"][name] for sample in samples if name in sample["metrics"]]
            numbers = [value for value in values if not math.isnan(value)]
            if numbers:
                self.metrics[name].append(sum(numbers) / len(numbers))

    def _log_rows(self, rows: Sequence[TreeRow], num_samples: int) -> None:
        """What the rows forward, fillers included: pairs are rates (numerator, denominator)."""
        forwarded = [len(sample["input_ids"]) for row in rows for sample in row.samples]
        trained = sum(row.trained for row in rows)
        tokens, loads = [row.num_tokens for row in rows], [row.load for row in rows]
        raw, unique, padded = sum(forwarded), sum(tokens), max(tokens) * len(rows)
        for name, value in {
            "sample/forwarded_tokens_mean": raw / num_samples,
            "sample/forwarded_tokens_max": float(max(forwarded)),
            "sample/trained_tokens_mean": trained / num_samples,
            "batch/masked_token_frac": (raw - trained, raw),
            "batch/samples_per_row": num_samples / len(rows),
            "batch/row_tokens_mean": unique / len(rows),
            "batch/row_tokens_max": float(max(tokens)),
            "batch/row_imbalance": max(loads) / (sum(loads) / len(rows)),
            "batch/packing_ratio": (raw, unique),
            "batch/pad_frac": (padded - unique, padded),
        }.items():
            self.metrics[name].append(value)
        if self.token_budget:
            self.metrics["batch/row_fill_frac"].append((unique, self.token_budget * len(rows)))


def _pack_rows(layouts: Sequence[RowLayout], pad_token_id: int, pool: BlockPool) -> dict[str, torch.Tensor]:
    """Write every row into one padded (W, ...) buffer a field; no row is packed on its own first."""
    sizes = [layout.sizes for layout in layouts]
    # One column at least: TRL's loss takes the maximum over a row's loss terms.
    widths = {name: max(1, *(of_row[field.size] for of_row in sizes)) for name, field in ROW_FIELDS.items()}
    fields = {name: ((len(layouts), widths[name]), field.dtype) for name, field in ROW_FIELDS.items()}
    buffers = pool.arrays(fields | {"attention_mask": fields["input_ids"]})
    for row, (layout, of_row) in enumerate(zip(layouts, sizes)):
        layout.write({name: buffers[name][row, : of_row[field.size]] for name, field in ROW_FIELDS.items()})
        for name, field in ROW_FIELDS.items():
            buffers[name][row, of_row[field.size] :] = pad_token_id if name == "input_ids" else field.padding
        buffers["attention_mask"][row, : of_row["N"]] = 1
        buffers["attention_mask"][row, of_row["N"] :] = 0
        if not of_row["M"]:
            buffers["token_index"][row, 0] = 0  # the rest of such a term is the padding: advantage 0, segment 0
    return {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}


def _scoring_inputs(
    rows: Sequence[TreeRow], layouts: Sequence[RowLayout], scorers: Sequence[TrainerScorer]
) -> dict[str, Any]:
    scored = [row for row in rows if isinstance(row, ScoredRow)]
    if len(scored) != len(rows):
        raise TypeError("rows of samples that are scored must be ScoredRows, got TreeRows")
    samples = [row.samples for row in scored]
    extras = [row.extras for row in scored]
    return {
        "uid": _padded_column([[sample["uid"] for sample in row] for row in samples]),
        "group": _padded_column([[sample["group_id"] for sample in row] for row in samples]),
        "group_size": _padded_column([[sample["group_size"] for sample in row] for row in samples]),
        "rollout": _padded_column([[sample["rollout_id"] for sample in row] for row in samples]),
        "trained_tokens": _padded_column([np.diff(layout.terms).tolist() for layout in layouts], 0),
        "rewards": _rewards(scored),
        "reward_names": _names_tensor(scored[0].reward_names, len(scored)),
        "truncated": _padded_column(
            [[bool(sample.get("truncated", False)) for sample in row] for row in samples], 0, torch.uint8
        ),
        "extra_uid": _padded_column([[uid for _, _, uid, _ in row] for row in extras]),
        "extra_group": _padded_column([[group for _, group, _, _ in row] for row in extras]),
        "extra_scorer": _padded_column([[index for index, _, _, _ in row] for row in extras]),
        "scorers": {str(index): _scorer_inputs(scored, scorer, index) for index, scorer in enumerate(scorers)},
    }


def _rewards(rows: Sequence[ScoredRow]) -> torch.Tensor:
    """(W, S, C) float64: the samples' own reward columns, NaN where there is none."""
    names = rows[0].reward_names
    if any(row.reward_names != names for row in rows):
        raise ValueError(
            f"reward_names must agree over a micro-batch, got {sorted({row.reward_names for row in rows})}"
        )
    columns = {name: column for column, name in enumerate(names)}
    rewards = np.full((len(rows), max(len(row.samples) for row in rows), len(names)), np.nan)
    for r, row in enumerate(rows):
        for s, sample in enumerate(row.samples):
            if unknown := sample["rewards"].keys() - columns.keys():
                raise ValueError(f"reward_names must hold every reward column, got {names} without {sorted(unknown)}")
            for name, reward in sample["rewards"].items():
                rewards[r, s, columns[name]] = reward
    return torch.from_numpy(rewards)


def _names_tensor(names: Sequence[str], num_rows: int) -> torch.Tensor:
    """(W, bytes) uint8, the same on every rank: UTF-8, each name ended by a zero byte."""
    text = "".join(f"{name}\0" for name in names).encode()
    return torch.tensor(list(text or b"\0"), dtype=torch.uint8).repeat(num_rows, 1)


def names_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """The reward columns' names from one rank's slice (1, bytes) of `batch["scoring"]["reward_names"]`."""
    return tuple(name for name in bytes(tensor[0].tolist()).decode().split("\0") if name)


def _scorer_inputs(rows: Sequence[ScoredRow], scorer: TrainerScorer, index: int) -> dict[str, torch.Tensor]:
    """A scorer's tensors, each padded to (W, ...)."""
    of_rows, padding = scorer.collate(rows, index)
    where = f"collate of scorer {index}"
    if len(of_rows) != len(rows):
        raise ValueError(f"{where} must return one dict a row ({len(rows)}), got {len(of_rows)}")
    keys = of_rows[0].keys()
    for r, tensors in enumerate(of_rows):
        if tensors.keys() != keys:
            raise ValueError(
                f"{where} must give every row the same keys, got {sorted(tensors.keys() ^ keys)} in row {r}"
            )
        for key, tensor in tensors.items():
            if tensor.dtype not in TRAVELLING_DTYPES:
                raise TypeError(f"{where}: {key} must be one of {TRAVELLING_DTYPES}, got {tensor.dtype}")
    if missing := keys - padding.keys():
        raise ValueError(f"{where} must return a padding value for every key, got none for {sorted(missing)}")
    return {key: _padded([tensors[key] for tensors in of_rows], padding[key]) for key in keys}


def _padded_column(
    values: Sequence[Sequence[int]], padding: int = PAD_UID, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """(W, longest) of one list a row."""
    return _padded([torch.tensor(row, dtype=dtype) for row in values], padding)


def _padded(tensors: Sequence[torch.Tensor], padding: int | float) -> torch.Tensor:
    """Stack tensors of one rank and dtype, each padded at the end of every dimension."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors))]
    stacked = torch.full((len(tensors), *shape), padding, dtype=tensors[0].dtype)
    for r, tensor in enumerate(tensors):
        stacked[r][tuple(slice(0, size) for size in tensor.shape)] = tensor
    return stacked
