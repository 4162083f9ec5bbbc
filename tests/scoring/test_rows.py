"""TreeRow does what TRL 1.16's does, output bit for bit, and rolls back exactly."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TreeRow as TRLRow

from support.traces import BUNDLED, load_trace, trace_paths
from support.tries import make_sample, tries
from treepack import ScoredRow, TreeRow
from treepack.scoring import forest, rows


def assert_same_tensors(ours, theirs):
    assert list(ours) == list(theirs)
    for key, expected in theirs.items():
        assert ours[key].dtype == expected.dtype, key
        assert torch.equal(ours[key], expected), (key, ours[key], expected)


def assert_same_state(ours, theirs):
    assert ours.tokens.tolist() == theirs.tokens
    assert ours.num_tokens == len(theirs.tokens)
    assert (ours.load, ours.trained, ours.groups) == (theirs.load, theirs.trained, theirs.groups)
    assert ours.samples == theirs.samples


def row_of(samples, **options):
    row = TreeRow(**options)
    for sample in samples:
        row.add(sample)
    return row


def trl_row_of(samples):
    row = TRLRow()
    for sample in samples:
        row.add(sample)
    return row


@given(tries(), st.integers(1, 60), st.booleans())
def test_equals_trl_at_every_step(samples, budget, keep_to_budget):
    ours, theirs = TreeRow(), TRLRow()
    for sample in samples:
        fits = theirs.fits(sample, budget)
        assert ours.fits(sample, budget) == fits
        assert ours.fits(sample, budget) == fits  # answered from the look-up that was kept
        if fits or not keep_to_budget:
            ours.add(sample)
            theirs.add(sample)
            assert_same_state(ours, theirs)
    if theirs.samples:
        assert_same_tensors(ours.pack(), theirs.pack())


@given(tries(min_samples=1))
def test_runs_of_trained_tokens_are_copied_as_they_are_gathered(samples):
    """Long runs are copied, piece by piece of the path: here all are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SHORT_RUN", 0)
        assert_same_tensors(row_of(samples).pack(), trl_row_of(samples).pack())


@given(tries(min_samples=2), st.data())
def test_truncate_is_a_rebuild(samples, data):
    row = row_of(samples)
    kept = data.draw(st.integers(0, len(samples)))
    row.truncate(kept)
    assert_same_state(row, trl_row_of(samples[:kept]))
    row.truncate(kept)
    order = data.draw(st.permutations(samples))
    for sample in order:
        row.add(sample)
    rebuilt = trl_row_of(samples[:kept] + order)
    assert_same_state(row, rebuilt)
    assert_same_tensors(row.pack(), rebuilt.pack())


@given(tries(min_samples=2), st.integers(1, 60))
def test_a_sample_offered_to_many_rows_is_judged_by_each(samples, budget):
    rows = [(TreeRow(), TRLRow()) for _ in range(3)]
    for index, sample in enumerate(samples):
        assert [ours.fits(sample, budget) for ours, _ in rows] == [theirs.fits(sample, budget) for _, theirs in rows]
        for row in rows[index % len(rows)]:
            row.add(sample)


def test_what_is_kept_of_a_sample_does_not_outlive_its_arrays():
    row = TreeRow()
    row.add(make_sample([1, 2, 3, 4]))
    sample = make_sample([1, 2, 3, 4])
    assert row.fits(sample, 8)
    assert not row.fits(sample, 7)  # 8 trained tokens
    sample["completion_mask"] = np.zeros(4, dtype=np.int64)
    assert row.fits(sample, 4)
    sample["input_ids"] = np.array([5, 6, 7, 8])
    assert not row.fits(sample, 7)
    row.add(sample)
    assert_same_state(row, trl_row_of(row.samples))
    filler = {**sample, "completion_mask": np.ones(4, dtype=np.int64)}
    row.add(filler)
    assert_same_state(row, trl_row_of(row.samples))


def test_equals_trl_on_long_samples_with_many_turns():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, 5000)
    samples = []
    for cut in (5000, 3000, 3001, 1024, 4096, 2999):
        turns = np.repeat(np.arange(100) % 2, 60)[:cut]
        samples.append(make_sample(np.r_[ids[:cut], rng.integers(0, 1000, 700)], np.r_[turns, np.ones(700)]))
    samples.append(make_sample(ids[:4500], np.arange(4500) % 2))
    samples.append(make_sample(samples[1]["input_ids"], np.ones(3700)))
    assert_same_tensors(row_of(samples).pack(), trl_row_of(samples).pack())


@pytest.mark.parametrize("convert", [torch.from_numpy, lambda a: a.astype(np.int32), lambda a: a.astype(np.uint16)])
def test_arrays_of_any_integer_type_and_tensors(convert):
    samples = [make_sample([1, 2, 3, 9], [0, 0, 1, 1]), make_sample([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])]
    expected = trl_row_of(samples).pack()
    for sample in samples:
        sample["input_ids"] = convert(sample["input_ids"])
        sample["completion_mask"] = sample["completion_mask"].astype(bool)
        sample["old_log_probs"] = sample["old_log_probs"].astype(np.float64)
    assert_same_tensors(row_of(samples).pack(), expected)


@given(tries())
def test_chains_without_sharing(samples):
    row = row_of(samples, share_prefixes=False)
    packed = row.pack()
    alone = [trl_row_of([sample]).pack() for sample in samples]
    lengths = [len(sample["input_ids"]) for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    for key in ("input_ids", "position_ids", "shift_labels", "old_log_probs", "advantages"):
        assert torch.equal(packed[key], torch.cat([one[key] for one in alone])), key
    for key in ("token_index", "tree_kv_index"):
        assert torch.equal(packed[key], torch.cat([one[key] + start for one, start in zip(alone, starts)])), key
    assert packed["tree_cu_seqlens_q"].tolist() == [*starts, sum(lengths)] == packed["tree_cu_seqlens_k"].tolist()
    assert packed["tree_max_seqlens"].tolist() == [max(lengths)] * 2
    assert row.num_tokens == sum(lengths)
    assert row.load == sum(trl_row_of([sample]).load for sample in samples)
    assert not row.fits(samples[0], sum(lengths) + lengths[0] - 1)


def test_strict_prefixes_and_duplicates_keep_their_own_loss_terms():
    """verl#6689."""
    packed = row_of([make_sample([1, 2, 3]), make_sample([1, 2, 3, 4]), make_sample([1, 2, 3])]).pack()
    assert packed["input_ids"].tolist() == [1, 2, 3, 3, 4]
    assert packed["segment_id"].tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert packed["token_index"].tolist() == [0, 1, 0, 1, 3, 0, 1]
    assert packed["shift_labels"].tolist() == [2, 3, -100, 4, -100]


def test_one_branch_leaves_the_others_place_unchanged():
    """verl#6689: P -> {A -> R0, R1; B -> R2, R3}."""

    def row(a):
        prompt, b = [1, 2, 3], [7, 8]
        return row_of([make_sample(prompt + middle + [end]) for middle, end in ((a, 4), (a, 5), (b, 4), (b, 5))]).pack()

    one, other = row([5, 6]), row([9, 9])
    for key in set(one) - {"input_ids", "shift_labels"}:
        assert torch.equal(one[key], other[key]), key
    in_b = slice(one["input_ids"].tolist().index(7), None)
    assert torch.equal(one["input_ids"][in_b], other["input_ids"][in_b])
    assert torch.equal(one["shift_labels"][in_b], other["shift_labels"][in_b])


def trace_cases():
    """All groups where TRL is quick enough, some of the large ones; all the rest under `-m slow`."""
    some = {"game24_samples": slice(0, 100, 25), "airline_turns": slice(0, 50, 12)}
    for path in trace_paths():
        yield pytest.param(path, some.get(path.stem, slice(None)), id=path.stem)
        if path.stem in some:
            yield pytest.param(path, slice(None), id=f"{path.stem}-all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("path", "groups"), list(trace_cases()))
def test_equals_trl_on_real_rollouts(path, groups):
    for samples in load_trace(path)[groups]:
        ours, theirs = row_of(samples), trl_row_of(samples)
        assert (ours.num_tokens, ours.load, ours.trained) == (len(theirs.tokens), theirs.load, theirs.trained)
        assert_same_tensors(ours.pack(), theirs.pack())


def samples_of(path, groups, rows):
    return [sample for group in load_trace(path, groups, rows) for sample in group]


@pytest.mark.parametrize("batcher", ["TokenBudgetBatcher", "FixedCountBatcher"])
def test_speeds_trl_up_alone(monkeypatch, batcher):
    """With `async_grpo_trainer.TreeRow = treepack.TreeRow` TRL's own batchers and collator give the same batches."""
    samples = samples_of(BUNDLED, 12, 4)

    def batches():
        metrics = async_grpo_trainer.defaultdict(list)
        source = {"TokenBudgetBatcher": (samples, 2, 2500, metrics), "FixedCountBatcher": (samples, 2, 12)}[batcher]
        collator = async_grpo_trainer.DataCollatorForRollout(7, 2, metrics=metrics, token_budget=2500)
        found = [collator([rows]) for rows in getattr(async_grpo_trainer, batcher)(*source)]
        return found, metrics, collator.groups_trained

    theirs, their_metrics, their_groups = batches()
    monkeypatch.setattr(async_grpo_trainer, "TreeRow", TreeRow)
    ours, our_metrics, our_groups = batches()
    assert len(theirs) > 1
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_tensors(mine, other)
    assert our_metrics == their_metrics
    assert our_groups == their_groups


def test_state_is_small():
    """At most 8 bytes a unique token, on short rollouts too (TRL: hundreds)."""
    samples = samples_of(BUNDLED, None, None)
    row_of(samples)  # what is allocated once
    tracemalloc.start()
    try:
        row = row_of(samples)
        occupied, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert occupied <= 8 * row.num_tokens


def test_scored_row_rolls_its_extras_back():
    row = ScoredRow()
    row.add(make_sample([1, 2], group_id=3))
    row.extras.append((0, 3, -2, {}))
    row.add(make_sample([1, 3], group_id=4))
    row.extras.append((0, 4, -3, {}))
    row.truncate(1)
    assert row.extras == [(0, 3, -2, {})]
    assert row.groups == {3}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": np.array([], dtype=np.int64)}, ValueError, r"input_ids of sample 1 must be .* got shape \(0,\)"),
        ({"input_ids": np.zeros((2, 2), dtype=np.int64)}, ValueError, r"sample 1 must be .* got shape \(2, 2\)"),
        ({"input_ids": np.zeros(3)}, TypeError, "input_ids of sample 1 must be integers, got float64"),
        ({"completion_mask": np.ones(2)}, ValueError, r"sample 1 must be \(3,\) .* got \(2,\) and \(3,\)"),
        ({"old_log_probs": np.ones(4)}, ValueError, r"sample 1 must be \(3,\) .* got \(3,\) and \(4,\)"),
        ({"old_log_probs": np.array([0.0, -1.0, None])}, TypeError, "sample 1 must be floating point, got object"),
    ],
)
def test_bad_samples(changes, error, message):
    row = row_of([make_sample([1, 2, 3])])
    with pytest.raises(error, match=message):
        row.add({**make_sample([4, 5, 6]), **changes})
    assert_same_state(row, trl_row_of([row.samples[0]]))


def test_a_missing_log_probability_of_a_trained_token_is_refused():
    """TRL#6868: never taken for 0."""
    sample = make_sample([1, 2, 3], [0, 0, 1])
    sample["old_log_probs"][:2] = np.nan  # not trained: nothing reads them
    row = row_of([make_sample([1, 2, 4]), sample])
    row.pack()
    sample["old_log_probs"][2] = np.nan
    with pytest.raises(ValueError, match="must not be NaN, got one in sample 1 of the row"):
        row.pack()


def test_misuse():
    row = TreeRow()
    with pytest.raises(ValueError, match="at least one sample to be packed, got none"):
        row.pack()
    with pytest.raises(ValueError, match=r"num_samples must be within 0\.\.0, got 1"):
        row.truncate(1)


def test_rows_too_long_for_int32(monkeypatch):
    monkeypatch.setattr(forest, "INT32_MAX", 5)
    row = row_of([make_sample([1, 2, 3, 4])])
    with pytest.raises(ValueError, match="at most 5 tokens, got 6 at sequence 1"):
        row.add(make_sample([5, 6]))
    assert_same_state(row, trl_row_of(row.samples))
    row.add(make_sample([1, 2, 3]))
    with pytest.raises(ValueError, match="paths in a packed row must hold at most 5 tokens, got 9"):
        row.pack()
