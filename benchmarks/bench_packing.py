"""Planning and packing one optimizer step: fits + add + pack + collate, against TRL's batcher and collator.

`limit` is the time to read every byte of the samples once and write every byte of the batches once. `state` is what the
rows of a planned step occupy besides the samples, per unique token.
"""

import gc
import tracemalloc
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from harness import Compare, Comparison, Figure, Work
from support.traces import trace_paths
from synthetic_rollouts import Sample, Samples, agentic, chat, one_row, trace
from treepack import ScoringCollator, TreeRow
from trl_batchers import by_token_budget, fill_micro_batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns that async GRPO is experimental
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    samples: Callable[[], Samples]
    ranks: int
    token_budget: int
    target: float | None = None
    of_limit: float | None = None


LOAD = attrgetter("load")

# TRL's step of seconds is spread over them, a batch at a time: the machine's memory may be slow for a while.
ROUNDS = 45

# TRL needs tolerable time for these many groups of each trace.
TRACE_GROUPS = {"gsm8k_solutions": 400, "game24_samples": 2, "airline_conversations": 12, "airline_turns": 3}

CASES = [
    Case("64 x 8 x ~1.5k", lambda: chat(64, 8, 512, 1024, sigma=0.7), 8, 32768, target=90, of_limit=3.5),
    Case("16 x 16 x ~6k", lambda: chat(16, 16, 2048, 4096, sigma=0.5), 8, 32768, target=130, of_limit=3.5),
    Case("agentic 16 x 8 x 4 x ~16k", lambda: agentic(16, 8, 4, 16000), 8, 32768, target=150, of_limit=3.5),
    Case("one row of 131k", lambda: one_row(131_072), 1, 131_072),
    *(
        Case(path.stem, lambda path=path: trace(path, TRACE_GROUPS.get(path.stem, 16)), 4, 32768)  # type: ignore[misc]
        for path in trace_paths()
    ),
]
SMOKE_CASES = [
    Case("smoke: 4 x 2 x ~60", lambda: chat(4, 2, 72, 32, sigma=0.5), 2, 400),
    Case("smoke: agentic 2 x 2 x 2 x ~600", lambda: agentic(2, 2, 2, 600), 2, 2000),
]


def least_loaded(rows: list[TreeRow], sample: Sample, token_budget: int) -> TreeRow | None:
    """TRL's placement rule: a row that holds the group, else any, the least loaded that fits."""

    group = sample["group_id"]
    home = [row for row in rows if group in row.groups]
    for row in sorted(home, key=LOAD) if len(home) > 1 else home:
        if row.fits(sample, token_budget):
            return row
    if home and all(row.samples for row in rows):
        return None
    return next((row for row in sorted(rows, key=LOAD) if row.fits(sample, token_budget)), None)


def plan_ours(samples: Samples, case: Case) -> Iterator[list[TreeRow]]:
    return fill_micro_batches(samples, case.ranks, partial(least_loaded, token_budget=case.token_budget), TreeRow)


def pack_ours(samples: Samples, case: Case, collate: ScoringCollator) -> Iterator[Batch]:
    return (collate([rows]) for rows in plan_ours(samples, case))


def pack_trl(samples: Samples, case: Case, collate: DataCollatorForRollout) -> Iterator[Batch]:
    return (collate([rows]) for rows in by_token_budget(samples, case.ranks, case.token_budget))


def consume(batches: Iterator[Batch]) -> None:
    """Like a trainer: a batch is gone when the next one is asked for, but for the one that is prefetched."""
    deque(batches, maxlen=1)


def in_parts(batches: Iterator[Batch], count: int) -> list[Work]:
    """Take the next `count` batches one a call, as `consume` does."""
    last: deque[Batch] = deque(maxlen=1)
    return [partial(last.extend, islice(batches, 1)) for _ in range(count)]


def assert_equal(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for key in other:
            assert mine[key].dtype == other[key].dtype, (index, key)
            assert torch.equal(mine[key], other[key]), (index, key)


def read_and_write(samples: Samples, batches: list[Batch]) -> None:
    """The limit: read every byte of the samples once and write every byte of the batches once."""
    for sample in samples:
        for key in ("input_ids", "completion_mask", "old_log_probs"):
            sample[key].sum()
    for batch in batches:
        written = [np.empty(tuple(tensor.shape), tensor.numpy().dtype) for tensor in batch.values()]
        for array in written:
            array.fill(1)


def state_bytes_per_token(samples: Samples, case: Case) -> float:
    """Bytes that the planned rows of all samples occupy, per unique token, samples themselves left out."""
    gc.collect()
    tracemalloc.start()
    try:
        rows = [row for micro_batch in plan_ours(samples, case) for row in micro_batch]
        occupied, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return occupied / sum(row.num_tokens for row in rows)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = SMOKE_CASES if metafunc.config.getoption("smoke") else CASES
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def test_packing(compare: Compare, case: Case) -> None:
    samples = case.samples()
    # One collator for all rounds, as for all steps of a training run.
    options: dict[str, Any] = {"metrics": defaultdict(list), "token_budget": case.token_budget}
    our_collator = ScoringCollator(0, case.ranks, **options)
    trl_collator = DataCollatorForRollout(0, case.ranks, **options)
    batches = list(pack_ours(samples, case, our_collator))

    def figures(record: Comparison) -> dict[str, Figure]:
        return {
            "of the limit": Figure(record.ours_s / record.peers_s["limit"], "x", at_most=case.of_limit),
            "state": Figure(state_bytes_per_token(samples, case), "B/token", at_most=8),
            "unique": Figure(sum(float(batch["global_n_forward_tokens"][0]) for batch in batches), "tokens"),
        }

    compare(
        case.name,
        ours=lambda: consume(pack_ours(samples, case, our_collator)),
        peers={
            "TRL": in_parts(pack_trl(samples, case, trl_collator), len(batches)),
            "limit": lambda: read_and_write(samples, batches),
        },
        check=lambda: assert_equal(batches, pack_trl(samples, case, trl_collator)),
        target=case.target,
        rounds=ROUNDS,
        figures=figures,
    )
