"""ScoringCollator gives TRL 1.16's batch and metrics, and on every rank what scoring needs."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.packing import TreeRow as TRLRow

from support.traces import BUNDLED, load_trace
from support.tries import make_sample, tries
from treepack import ScoredRow, ScoringCollator, TreeRow, chunk_inputs, pack_sequences, unpack_sequences
from treepack.scoring.collator import names_of

PAD = 99
TERM_KEYS = {"token_index", "old_log_probs", "advantages", "segment_id"}
TRAVELLING_DTYPES = {torch.int64, torch.float64, torch.uint8, torch.float32, torch.int32}


def filled(row, samples):
    for sample in samples:
        row.add(sample)
    return row


def both(micro_batch, **options):
    """Ours and TRL's (batch, metrics, groups_trained) of the same samples."""
    found = []
    for collator_class, row_class in ((ScoringCollator, TreeRow), (DataCollatorForRollout, TRLRow)):
        metrics = defaultdict(list)
        collate = collator_class(PAD, len(micro_batch), metrics=metrics, **options)
        batch = collate([[filled(row_class(), samples) for samples in micro_batch]])
        found.append((batch, metrics, collate.groups_trained))
    return found


def assert_equal_batches(ours, theirs, keys):
    for key in keys:
        assert ours[key].dtype == theirs[key].dtype, key
        assert torch.equal(ours[key], theirs[key]), (key, ours[key], theirs[key])


def has_terms(samples):
    return any(sample["completion_mask"][1:].any() for sample in samples)


@given(st.lists(tries(max_samples=5), min_size=1, max_size=4), st.sampled_from([0, 50]))
def test_equals_trl(micro_batch, token_budget):
    (ours, our_metrics, our_groups), (theirs, their_metrics, their_groups) = both(
        micro_batch, token_budget=token_budget
    )
    assert ours.keys() == theirs.keys()
    all_have_terms = all(map(has_terms, micro_batch))
    assert_equal_batches(ours, theirs, theirs.keys() if all_have_terms else theirs.keys() - TERM_KEYS)
    assert our_metrics == their_metrics
    assert our_groups == their_groups


@given(st.lists(tries(max_samples=3), min_size=2, max_size=4))
def test_a_row_without_loss_terms_gets_a_neutral_one(micro_batch):
    """TRL's compute_loss takes the largest segment_id of a row's terms."""
    for sample in micro_batch[0]:
        sample["completion_mask"][:] = 0
    (ours, _, _), (theirs, _, _) = both(micro_batch)
    selected = ours["token_index"] >= 0
    assert selected.any(1).all()
    for rank, samples in enumerate(micro_batch):
        if has_terms(samples):
            for key in TERM_KEYS:
                expected = theirs[key][rank][theirs["token_index"][rank] >= 0]
                assert torch.equal(ours[key][rank][selected[rank]], expected)
        else:
            assert [ours[key][rank][selected[rank]].tolist() for key in sorted(TERM_KEYS)] == [[0], [0], [0], [0]]
    assert torch.equal(ours["global_n_tokens"], theirs["global_n_tokens"])


def test_equals_trl_on_real_rollouts():
    groups = load_trace(BUNDLED, 8)
    (ours, our_metrics, _), (theirs, their_metrics, _) = both(groups, token_budget=40_000)
    assert_equal_batches(ours, theirs, theirs.keys())
    assert our_metrics == their_metrics


def test_a_metric_without_a_number_does_not_wipe_the_window():
    """TRL#4501: one sample whose rewards are all NaN."""
    metrics = defaultdict(list)
    collate = ScoringCollator(PAD, metrics=metrics)
    for values in ([math.nan, 2.0, 4.0], [math.nan], [1.0]):
        collate([[filled(TreeRow(), [make_sample([1, 2], metrics={"reward": value}) for value in values])]])
    assert metrics["reward"] == [3.0, 1.0]
    numbers = [n for window in metrics.values() for value in window for n in np.ravel(value)]
    assert all(map(math.isfinite, numbers))


def test_batches_that_are_held_keep_their_values():
    """A batch's memory is taken again only when the last tensor over it is gone, whichever that is."""
    rows = [filled(TreeRow(), samples) for samples in load_trace(BUNDLED, 2)]
    others = [filled(TreeRow(), samples) for samples in load_trace(BUNDLED, 4)[2:]]
    collate = ScoringCollator(PAD, 2)
    batch = collate([rows])
    copies = {key: value.clone() for key, value in batch.items()}
    address = batch["input_ids"].data_ptr()
    held = [collate([others]) for _ in range(3)]
    assert_equal_batches(batch, copies, copies)
    assert len({each["input_ids"].data_ptr() for each in [batch, *held]}) == 4
    one_slice = batch["token_index"][1][2:5]
    del batch, held
    later = [collate([others]) for _ in range(5)]
    assert torch.equal(one_slice, copies["token_index"][1][2:5])
    assert address not in {each["input_ids"].data_ptr() for each in later}
    del one_slice, later
    assert address in {each["input_ids"].data_ptr() for each in [collate([rows]) for _ in range(20)]}


class LengthScorer:
    """Scores nothing: what it collates is what the tests look at. Rows are packed, two chunks each."""

    name = "length"

    def collate(self, rows, index):
        found = []
        for row in rows:
            uids = [sample["uid"] for sample in row.samples]
            extra = [inputs["input_ids"] for scorer, _, _, inputs in row.extras if scorer == index] or [[0]]
            packed = [pack_sequences([sample["input_ids"] for sample in row.samples]), pack_sequences(extra)]
            chunks = {f"c{j}_{key}": value for j, chunk in enumerate(packed) for key, value in chunk.items()}
            found.append({"c0_uid": torch.tensor(uids), "c1_weight": torch.ones(len(extra), 2), **chunks})
        return found, dict.fromkeys(found[0], -1)


def scored(uid, ids, **more):
    defaults = {"uid": uid, "group_size": 2, "rollout_id": uid + 100, "rewards": {}}
    return make_sample(ids, **{**defaults, **more})


def scored_rows():
    first, second = ScoredRow(), ScoredRow()
    filled(first, [scored(4, [1, 2, 3], group_id=7, rewards={"a": 1.0}, truncated=True), scored(2, [1, 2, 4])])
    filled(second, [scored(3, [5, 6, 7, 8], group_id=9, rewards={"b": 0.25, "a": math.nan})])
    second.extras = [
        (1, 9, -2, {"input_ids": [5, 6]}),
        (0, 9, -3, {"input_ids": [6]}),
        (0, 9, -4, {"input_ids": [6, 7]}),
    ]
    first.reward_names = second.reward_names = ("a", "b")
    return [first, second]


def test_scoring_inputs():
    collate = ScoringCollator(PAD, 2, scorers=[LengthScorer(), LengthScorer()])
    scoring = collate([scored_rows()])["scoring"]
    nan = math.nan
    expected = {
        "uid": [[4, 2], [3, -1]],
        "group": [[7, 0], [9, -1]],
        "group_size": [[2, 2], [2, -1]],
        "rollout": [[104, 102], [103, -1]],
        "trained_tokens": [[2, 2], [3, 0]],
        "rewards": [[[1.0, nan], [nan, nan]], [[nan, 0.25], [nan, nan]]],
        "truncated": [[1, 0], [0, 0]],
        "extra_uid": [[-1, -1, -1], [-2, -3, -4]],
        "extra_group": [[-1, -1, -1], [9, 9, 9]],
        "extra_scorer": [[-1, -1, -1], [1, 0, 0]],
    }
    assert scoring.keys() == {*expected, "reward_names", "scorers"}
    for key, values in expected.items():
        dtype = {"rewards": torch.float64, "truncated": torch.uint8}.get(key, torch.int64)
        torch.testing.assert_close(scoring[key], torch.tensor(values, dtype=dtype), rtol=0, atol=0, equal_nan=True)
    assert [names_of(scoring["reward_names"][rank : rank + 1]) for rank in range(2)] == [("a", "b")] * 2
    assert scoring["scorers"].keys() == {"0", "1"}


def test_scorer_inputs_are_cut_back_on_their_rank():
    rows = scored_rows()
    scoring = ScoringCollator(PAD, 2, scorers=[LengthScorer()])([rows])["scoring"]["scorers"]["0"]
    for rank, row in enumerate(rows):
        chunks = chunk_inputs({key: value[rank : rank + 1] for key, value in scoring.items()})
        extra = [inputs["input_ids"] for scorer, _, _, inputs in row.extras if scorer == 0] or [[0]]
        for chunk, sequences in zip(chunks, [[s["input_ids"] for s in row.samples], extra], strict=True):
            expected = unpack_sequences(pack_sequences(sequences))
            model_inputs, positions, offsets = unpack_sequences(
                {key: value for key, value in chunk.items() if key not in ("uid", "weight")}
            )
            assert torch.equal(model_inputs["input_ids"], expected[0]["input_ids"])
            assert torch.equal(model_inputs["tree_cu_seqlens_k"], expected[0]["tree_cu_seqlens_k"])
            assert torch.equal(positions, expected[1])
            assert torch.equal(offsets, expected[2])
        assert chunks[0]["uid"][0].tolist()[: len(row.samples)] == [sample["uid"] for sample in row.samples]
    assert scoring["c1_weight"].tolist() == [[[1, 1], [-1, -1]], [[1, 1], [1, 1]]]


def test_every_tensor_travels():
    """accelerate cuts any tensor at num_processes rows, silently, and gloo refuses some dtypes."""
    batch = ScoringCollator(PAD, 2, scorers=[LengthScorer()])([scored_rows()])
    scoring = batch.pop("scoring")
    scorers = scoring.pop("scorers")
    for tensors in (batch, scoring, *scorers.values()):
        for key, tensor in tensors.items():
            assert tensor.shape[0] == 2, key
            assert tensor.dtype in TRAVELLING_DTYPES, key


def test_fillers_are_forwarded_but_no_sample_of_the_run():
    sample = scored(5, [1, 2, 3], group_id=7, metrics={"reward": 1.0})
    filler = {**sample, "uid": -1, "rollout_id": -1, "completion_mask": np.zeros(3), "metrics": {"reward": 50.0}}
    filler["group_id"] = 8
    metrics = defaultdict(list)
    collate = ScoringCollator(PAD, 2, metrics=metrics)
    batch = collate([[filled(ScoredRow(), [sample]), filled(ScoredRow(), [filler])]])
    assert batch["scoring"]["uid"].tolist() == [[5], [-1]]
    assert batch["token_index"].tolist() == [[0, 1], [0, -1]]
    assert batch["global_n_tokens"].tolist() == [2.0, 2.0]
    assert batch["global_n_forward_tokens"].tolist() == [6.0, 6.0]
    assert collate.groups_trained == {7}
    assert metrics["reward"] == [1.0]
    assert metrics["batch/masked_token_frac"] == [(3, 6)]
    # A whole micro-batch of fillers, at the end of the source.
    collate([[filled(ScoredRow(), [filler]), filled(ScoredRow(), [filler])]])
    assert metrics["reward"] == [1.0]


def test_plain_samples_have_no_scoring():
    batch = ScoringCollator(PAD)([[filled(TreeRow(), [make_sample([1, 2])])]])
    assert "scoring" not in batch


def collating(change):
    class Changed(LengthScorer):
        def collate(self, rows, index):
            return change(*super().collate(rows, index))

    return lambda rows: ScoringCollator(PAD, 2, scorers=[Changed()])([rows])


def without_last(tensors, padding):
    return [tensors[0], dict(list(tensors[1].items())[:-1])], padding


@pytest.mark.parametrize(
    ("collate", "error", "message"),
    [
        (lambda rows: ScoringCollator(PAD, 0), ValueError, "num_processes must be at least 1, got 0"),
        (lambda rows: ScoringCollator(PAD, 3)([rows]), ValueError, "must hold num_processes = 3 rows, got 2"),
        (lambda rows: ScoringCollator(PAD, 2)([rows, rows]), ValueError, r"one micro-batch \(batch_size=1\), got 2"),
        (lambda rows: ScoringCollator(PAD, 2)([[rows[0], ScoredRow()]]), ValueError, "at least one sample"),
        (lambda rows: ScoringCollator(PAD)([[filled(TreeRow(), rows[0].samples)]]), TypeError, "must be ScoredRows"),
        (collating(lambda tensors, padding: (tensors[:1], padding)), ValueError, r"one dict a row \(2\), got 1"),
        (collating(without_last), ValueError, r"every row the same keys, got \['c1_\w+'\] in row 1"),
        (collating(lambda tensors, padding: (tensors, {})), ValueError, "a padding value for every key"),
        (
            collating(lambda tensors, padding: ([{"x": torch.ones(1).bfloat16()}] * 2, {"x": 0})),
            TypeError,
            "collate of scorer 0: x must be one of .* got torch.bfloat16",
        ),
    ],
)
def test_refusals(collate, error, message):
    with pytest.raises(error, match=message):
        collate(scored_rows())


def test_reward_names_that_do_not_agree():
    rows = scored_rows()
    rows[1].reward_names = ("a",)
    with pytest.raises(ValueError, match="reward_names must agree over a micro-batch"):
        ScoringCollator(PAD, 2)([rows])
    rows[0].reward_names = ("a",)
    with pytest.raises(ValueError, match=r"must hold every reward column, got \('a',\) without \['b'\]"):
        ScoringCollator(PAD, 2)([rows])
