"""One rank's row of a micro-batch: samples folded into a prefix forest, and the loss terms taken over it.

`TreeRow` does what TRL 1.16's class of that name does, output bit for bit, without an object a token (see forest.py).

A sample is a plain dict. A row reads `input_ids`, `completion_mask` (1 = trained) and `old_log_probs`, all (n,) numpy
arrays or CPU tensors, and `advantage` and `group_id`. The arrays are kept, not copied: they must not be changed in
place once a row has seen them.

N: unique tokens, S: segments, K: keys gathered over all segments, M: loss terms (trained tokens with a predecessor).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from treepack.scoring.forest import ForestLayout, Match, PrefixForest, Tail
from treepack.scoring.samples import Sample

Buffers = dict[str, NDArray[Any]]

# A mask whose runs are shorter than this on average has its loss terms gathered; longer ones are copied as slices.
SHORT_RUN = 32


class Field(NamedTuple):
    """One array of a packed row."""

    size: str  # which of the row's sizes it has
    dtype: DTypeLike
    padding: int  # what fills it up to the longest row of a micro-batch


ROW_FIELDS = {
    "input_ids": Field("N", np.int64, 0),  # the collator pads with its pad_token_id
    "position_ids": Field("N", np.int64, 0),
    "shift_labels": Field("N", np.int64, -100),
    "tree_kv_index": Field("K", np.int64, -1),
    "tree_cu_seqlens_q": Field("S+1", np.int32, -1),
    "tree_cu_seqlens_k": Field("S+1", np.int32, -1),
    "tree_max_seqlens": Field("2", np.int64, 0),
    "token_index": Field("M", np.int64, -1),
    "old_log_probs": Field("M", np.float32, 0),
    "advantages": Field("M", np.float32, 0),
    "segment_id": Field("M", np.int64, 0),
}


class TreeRow:
    """One rank's row: samples whose common prefixes are forwarded once.

    Args:
        share_prefixes: False makes every sample a chain of its own (plain padding-free packing).

    Attributes:
        samples: the samples in the order they were added.
        groups: the `group_id`s of these.

    Source: `TreeRow` of `trl.experimental.async_grpo.packing` (TRL 1.16), whose place it can take.
    """

    __slots__ = ("_forest", "_load", "_run_ends", "_runs", "_seen", "_terms", "_trained", "groups", "samples")

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self.samples: list[Sample] = []
        self.groups: set[Any] = set()
        self._forest = PrefixForest(share_prefixes=share_prefixes)
        # Running totals after each sample, so that a rollback reads them off instead of recounting.
        self._trained = array("q", [0])
        self._load = array("q", [0])
        self._terms = array("q", [0])  # loss terms
        self._run_ends = array("q", [0])  # entries of `_runs`
        self._runs = array("i")  # start, stop, start, stop, ... of each sample's trained runs; see `_trained_runs`
        # The last look-up: the planner asks `fits`, then calls `add` with the same sample.
        self._seen: tuple[Any, Match] | None = None

    @property
    def num_tokens(self) -> int:
        """N, the unique tokens the row forwards."""
        return self._forest.num_tokens

    @property
    def tokens(self) -> NDArray[np.int64]:
        """(N,) the unique tokens in the order they were added."""
        tails = [ids[shared:] for ids, shared in zip(self._forest.sequences, self._forest.shared)]
        return np.concatenate(tails, dtype=np.int64) if tails else np.empty(0, dtype=np.int64)

    @property
    def trained(self) -> int:
        """Trained tokens over all samples; prefix sharing does not shrink them."""
        return self._trained[-1]

    @property
    def load(self) -> int:
        """Attention cost: the number of keys each unique token sees, summed."""
        return self._load[-1]

    def fits(self, sample: Sample, budget: int) -> bool:
        """Whether the row stays within `budget` unique and `budget` trained tokens with `sample` added."""
        num_tokens, trained, length = self._forest.num_tokens, self._trained[-1], len(sample["input_ids"])
        if max(num_tokens, trained) + length <= budget:
            return True
        if num_tokens > budget or trained + _count_trained(sample["completion_mask"]) > budget:
            return False
        input_ids = sample["input_ids"]
        if self._seen is None or self._seen[0] is not input_ids:
            self._seen = (input_ids, self._forest.match(np.asarray(input_ids)))
        return num_tokens + length - self._seen[1].shared <= budget

    def add(self, sample: Sample) -> None:
        """Append `sample` to the row.

        Raises:
            ValueError: an array is empty or not one-dimensional, their lengths differ, or the row would hold more than
                2^31 - 1 tokens.
            TypeError: `input_ids` are not integers or `old_log_probs` not floating point (None stands for a missing
                log-probability in some sources: it must not pass as 0).
        """
        ids, mask = _checked_arrays(sample, len(self.samples))
        seen = self._seen
        match = seen[1] if seen is not None and seen[0] is sample["input_ids"] else self._forest.match(ids)
        self._seen = None
        self._forest.append(ids, match)
        self.samples.append(sample)
        self.groups.add(sample["group_id"])
        trained, terms, runs = _trained_runs(mask)
        self._trained.append(self._trained[-1] + trained)
        self._terms.append(self._terms[-1] + terms)
        self._runs.extend(runs)
        self._run_ends.append(len(self._runs))
        length, shared = len(ids), match.shared
        self._load.append(self._load[-1] + (length * (length + 1) - shared * (shared + 1)) // 2)

    def truncate(self, num_samples: int) -> None:
        """Roll the row back to its first `num_samples` samples, exactly as it was then.

        Raises:
            ValueError: the row holds fewer samples.
        """
        if not 0 <= num_samples <= len(self.samples):
            raise ValueError(f"num_samples must be within 0..{len(self.samples)}, got {num_samples}")
        self._seen = None
        self._forest.truncate(num_samples)
        del self.samples[num_samples:]
        for totals in (self._trained, self._load, self._terms, self._run_ends):
            del totals[num_samples + 1 :]
        del self._runs[self._run_ends[-1] :]
        self.groups = {sample["group_id"] for sample in self.samples}

    def layout(self) -> "RowLayout":
        """Sizes and order of the packed row, ready to be written; valid until the row changes.

        Raises:
            ValueError: the row is empty, or its paths hold more than 2^31 - 1 tokens together.
        """
        if not self.samples:
            raise ValueError("a row must hold at least one sample to be packed, got none")
        return RowLayout(self._forest.layout(), self.samples, self._terms, self._run_ends, self._runs)

    def pack(self) -> dict[str, torch.Tensor]:
        """The row in depth-first pre-order of its forest, and the loss terms over it.

        Returns:
            - `input_ids`, `position_ids` (N,) int64: the unique tokens, and each one's depth (0-based).
            - `shift_labels` (N,) int64: the next token where some sample trains it, else -100.
            - `tree_kv_index` (K,) int64: packed indices of the root-to-segment paths of all segments, end to end.
            - `tree_cu_seqlens_q`, `tree_cu_seqlens_k` (S + 1,) int32: segment bounds in the row, path bounds in
              `tree_kv_index`.
            - `tree_max_seqlens` (2,) int64: the longest segment, the longest path.
            - `token_index` (M,) int64: packed index of the predecessor of each trained token, which predicts it.
            - `old_log_probs`, `advantages` (M,) float32, `segment_id` (M,) int64: of each trained token; `segment_id`
              is the index of its sample in `samples`.

        Raises:
            ValueError: the row is empty, its paths hold more than 2^31 - 1 tokens together, or the old
                log-probability of a trained token is NaN.
        """
        layout = self.layout()
        sizes = layout.sizes
        buffers = {name: np.empty(sizes[field.size], dtype=field.dtype) for name, field in ROW_FIELDS.items()}
        layout.write(buffers)
        return {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}


class ScoredRow(TreeRow):
    """A `TreeRow` that also carries what is scored with its groups but not trained.

    Attributes:
        extras: (scorer index, group_id, uid, inputs) of each extra sequence; all of a group's are on one row.
        reward_names: the reward columns of the optimizer step, sorted; set by the planner on all rows of the step.
    """

    __slots__ = ("extras", "reward_names")

    def __init__(self, *, share_prefixes: bool = True) -> None:
        super().__init__(share_prefixes=share_prefixes)
        self.extras: list[tuple[int, int, int, dict[str, Any]]] = []
        self.reward_names: tuple[str, ...] = ()

    def truncate(self, num_samples: int) -> None:
        """Roll the row back to its first `num_samples` samples; extras of groups no longer here go too."""
        super().truncate(num_samples)
        self.extras = [extra for extra in self.extras if extra[1] in self.groups]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A row about to be packed: what it needs to be told apart from where it is written to."""

    forest: ForestLayout
    samples: list[Sample]
    terms: Sequence[int]  # (samples + 1) bounds of each sample's loss terms
    run_ends: Sequence[int]  # (samples + 1) bounds of each sample's entries in `runs`
    runs: Sequence[int]  # start, stop of each run of trained positions; none where runs are too short to pay

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths of the packed arrays, by `Field.size`."""
        forest = self.forest
        return {
            "N": forest.cu_seqlens_q[-1],
            "K": forest.cu_seqlens_k[-1],
            "S+1": len(forest.cu_seqlens_q),
            "2": 2,
            "M": self.terms[-1],
        }

    def write(self, buffers: Buffers) -> None:
        """Write every array of `ROW_FIELDS` into `buffers`, each of exactly the length that `sizes` tells.

        Raises:
            ValueError: the old log-probability of a trained token is NaN.
        """
        buffers["tree_cu_seqlens_q"][:] = self.forest.cu_seqlens_q
        buffers["tree_cu_seqlens_k"][:] = self.forest.cu_seqlens_k
        buffers["tree_max_seqlens"][:] = self.forest.max_seqlens
        self.forest.write_tokens(buffers["input_ids"], buffers["position_ids"])
        buffers["shift_labels"].fill(-100)
        segment = 0
        for tail in self.forest.tails():
            segment = self.forest.write_kv_index(tail, segment, buffers["tree_kv_index"])
            for index in (tail.owner, *tail.copies):
                if self.terms[index] < self.terms[index + 1]:
                    self._write_terms(index, tail, buffers)
        log_probs = buffers["old_log_probs"]
        if np.isnan(log_probs.sum()) and np.isnan(log_probs).any():
            index = int(buffers["segment_id"][np.isnan(log_probs).argmax()])
            raise ValueError(f"old_log_probs of a trained token must not be NaN, got one in sample {index} of the row")

    def _write_terms(self, index: int, tail: Tail, buffers: Buffers) -> None:
        """Write the loss terms of one sample, whose packed path is the tail's."""
        sample, ids = self.samples[index], self.forest.forest.sequences[index]
        old_log_probs = np.asarray(sample["old_log_probs"])
        start, stop = self.terms[index], self.terms[index + 1]
        token_index, log_probs = buffers["token_index"][start:stop], buffers["old_log_probs"][start:stop]
        labels = buffers["shift_labels"]
        buffers["segment_id"][start:stop].fill(index)
        buffers["advantages"][start:stop].fill(sample["advantage"])
        runs = self.runs[self.run_ends[index] : self.run_ends[index + 1]]
        if not runs:
            predecessors = np.asarray(sample["completion_mask"])[1:].nonzero()[0]
            np.take(tail.path, predecessors, out=token_index)
            np.take(old_log_probs, predecessors + 1, out=log_probs)
            labels[token_index] = ids[predecessors + 1]
        elif len(runs) == 2:  # most samples; a concatenation costs more than these two copies
            first, last = runs
            token_index[:], log_probs[:] = tail.path[first - 1 : last - 1], old_log_probs[first:last]
            _write_labels(labels, ids, [(first, last)], tail)
        else:
            spans = list(zip(runs[::2], runs[1::2]))
            np.concatenate([tail.path[first - 1 : last - 1] for first, last in spans], out=token_index)
            np.concatenate([old_log_probs[first:last] for first, last in spans], out=log_probs, casting="same_kind")
            _write_labels(labels, ids, spans, tail)


def _write_labels(labels: NDArray[np.int64], ids: NDArray[Any], spans: Iterable[tuple[int, int]], tail: Tail) -> None:
    """Give the predecessors of tokens [first, last) of a sequence their labels, for each of `spans`."""
    own = tail.start - tail.shared - 1
    for first, last in spans:
        if first > tail.shared:  # its predecessors are the tail's own
            labels[first + own : last + own] = ids[first:last]
            continue
        for depth, start in reversed(tail.pieces):
            begin = max(depth + 1, first)
            if begin < last:
                shift = start - depth - 1
                labels[begin + shift : last + shift] = ids[begin:last]
                last = begin
            if begin == first:
                break


def _trained_runs(mask: NDArray[Any]) -> tuple[int, int, list[int]]:
    """Trained tokens and loss terms of a mask (n,), n > 0, and the runs of the latter: start, stop, start, stop, ...

    Position 0 has no predecessor: it is trained but no loss term. No runs are given where they are short.
    """
    edges = np.not_equal(mask[1:], mask[:-1]).nonzero()[0]  # faster than the operator
    if len(edges) == 1 and not mask[0]:  # a prompt and its completion: what most samples are
        start, stop = int(edges[0]) + 1, len(mask)
        return stop - start, stop - start, [start, stop]
    if len(mask) < SHORT_RUN * len(edges):
        trained = int(np.count_nonzero(mask))
        return trained, trained - int(mask[0] != 0), []
    trained = 0
    runs: list[int] = []
    starts = [0, *(edges + 1).tolist()]
    for start, stop, is_trained in zip(starts, (*starts[1:], len(mask)), mask[starts].tolist()):
        if is_trained:
            trained += stop - start
            runs += start, stop
    if not mask[0]:
        return trained, trained, runs
    runs[0] = 1
    return trained, trained - 1, runs if runs[1] > 1 else runs[2:]


_counted: tuple[Any, int] = (None, 0)


def _count_trained(mask: Any) -> int:
    """Trained tokens of a mask (n,). A planner asks many rows about one sample: the last answer is kept."""
    global _counted
    if _counted[0] is not mask:
        _counted = (mask, int(np.count_nonzero(np.asarray(mask))))
    return _counted[1]


def _checked_arrays(sample: Sample, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """`input_ids` and `completion_mask` of the sample that becomes number `index` of its row."""
    ids, mask = np.asarray(sample["input_ids"]), np.asarray(sample["completion_mask"])
    log_probs = np.asarray(sample["old_log_probs"])
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"input_ids of sample {index} must be (n,) with n > 0, got shape {ids.shape}")
    if mask.shape != ids.shape or log_probs.shape != ids.shape:
        raise ValueError(
            f"completion_mask and old_log_probs of sample {index} must be {ids.shape} like its input_ids, "
            f"got {mask.shape} and {log_probs.shape}"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(f"input_ids of sample {index} must be integers, got {ids.dtype}")
    if log_probs.dtype.kind != "f":
        raise TypeError(f"old_log_probs of sample {index} must be floating point, got {log_probs.dtype}")
    return ids, mask
