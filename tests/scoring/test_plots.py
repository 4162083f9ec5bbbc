"""The pictures: drawn for small and large jobs, and the tree's columns by hand."""

import numpy as np
import pytest
from matplotlib.image import imread

from support.samples import sample
from treepack import pack_sequences
from treepack.scoring.plots import MAX_LABELLED_STEPS, _columns, plot_rows, plot_tokens, plot_tree
from treepack.scoring.report import RowReport, ScoreReport, StepReport


def report_of(num_steps: int) -> ScoreReport:
    report = ScoreReport(rollouts="made up", options={}, model=None)
    for step in range(num_steps):
        rows = tuple(
            RowReport(
                micro_batch=micro_batch,
                rank=rank,
                samples=4,
                raw_tokens=4000,
                tokens=1000 + 10 * step + 100 * rank,
                trained_tokens=500,
                raw_pairs=8_000_000,
                pairs=1_000_000 + 100_000 * rank,
            )
            for micro_batch in range(2)
            for rank in range(2)
        )
        report.steps.append(StepReport(step, 3, rows))
    return report


def assert_drawn(path) -> None:
    """Ink in every quarter of the picture, which a blank or an empty plot lacks."""
    image = imread(path)[..., :3]
    height, width = image.shape[:2]
    assert height > 400
    assert width > 800
    for rows in (slice(0, height // 2), slice(height // 2, None)):
        for columns in (slice(0, width // 2), slice(width // 2, None)):
            assert (image[rows, columns] < 0.9).any(axis=2).mean() > 0.01


@pytest.mark.parametrize("num_steps", [1, MAX_LABELLED_STEPS + 1])
def test_tokens_and_rows(tmp_path, num_steps):
    report = report_of(num_steps)
    plot_tokens(tmp_path / "tokens.png", report)
    plot_rows(tmp_path / "rows.png", report, 1500)
    assert_drawn(tmp_path / "tokens.png")
    assert_drawn(tmp_path / "rows.png")


@pytest.mark.parametrize("num_samples", [1, 2, 60])
def test_tree(tmp_path, num_samples):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 100, 50)
    tails = [rng.integers(0, 100, 50) for _ in range(num_samples)]
    plot_tree(tmp_path / "tree.png", [sample(i, 0, num_samples, [*prompt, *tail]) for i, tail in enumerate(tails)])
    assert_drawn(tmp_path / "tree.png")


def test_columns_of_a_tree():
    # Node = (token, next token). Packed order: 1 2 | 3 4 9 | 3 4 (twice) | 5 6.
    sequences = [[1, 2, 3, 4, 9], [1, 2, 5, 6], [1, 2, 3, 4], [1, 2, 3, 4]]
    packed = {name: tensor.numpy() for name, tensor in pack_sequences(sequences, kv_index=False).items()}
    first, count = _columns(packed)
    widths = {}
    bounds = packed["tree_cu_seqlens_q"]
    for start, end, x, width in zip(bounds[:-1], bounds[1:], first, count):
        widths[tuple(packed["input_ids"][start:end].tolist())] = (int(x), int(width))
    # A fork lies one token before the sequences differ, so the 2 and the last 4 are there once for each way on.
    assert widths == {(1,): (0, 4), (2, 3): (0, 3), (4, 9): (0, 1), (4,): (1, 2), (2, 5, 6): (3, 1)}


def test_columns_cover_each_sample_once_at_each_depth():
    rng = np.random.default_rng(1)
    sequences = [[0, *rng.integers(0, 2, rng.integers(1, 9)).tolist()] for _ in range(40)]
    packed = {name: tensor.numpy() for name, tensor in pack_sequences(sequences, kv_index=False).items()}
    first, count = _columns(packed)
    lengths = np.diff(packed["tree_cu_seqlens_q"])
    assert int((lengths * count).sum()) == sum(map(len, sequences))
    depth = packed["position_ids"][packed["tree_cu_seqlens_q"][:-1]]
    grid = np.zeros((len(sequences), 10), np.int64)
    for x, width, y, length in zip(first, count, depth, lengths):
        grid[x : x + width, y : y + length] += 1
    assert grid.max() == 1
    assert sorted(grid.sum(axis=1).tolist()) == sorted(map(len, sequences))
