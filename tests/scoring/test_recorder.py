"""StepRecorder: what it writes is what was scored and where, under prefetch, bounds and crashes."""

import dataclasses
import sys
from collections import defaultdict
from itertools import islice

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from support.samples import group, groups_of
from treepack import RecordSettings, ScoringCollator, StepPlanner, StepRecorder, score_step
from treepack.scoring import recorder as recorder_module
from treepack.scoring.errors import RolloutError
from treepack.scoring.recorder import read_recorded_step, recorded_steps
from treepack.scoring.rollouts import read_rollouts
from treepack.scoring.trainer import LocalTrainer, ScoringArgs

SETTINGS = RecordSettings(token_budget=40)


def stream(sizes=(8, 7, 9, 6), seed=0):
    rng = np.random.default_rng(seed)
    samples = groups_of(sizes, length=12)
    for i, sample in enumerate(samples):
        sample["rewards"] = {"solved": float(rng.integers(0, 2)), "style": float("nan") if i % 3 else 0.25}
        sample["metrics"] = {"length": float(i)} if i % 2 else {}
        sample["finished"] = i % 4 != 0
    return samples


def recorded_run(folder, samples, *, prefetched=0, steps=2, ranks=2, **options):
    """Plans, collates and scores everything, `prefetched` micro-batches ahead; gives the scores and the rows."""
    recorder = StepRecorder(folder, settings=SETTINGS, **options)
    planner = StepPlanner(
        samples, num_processes=ranks, steps=steps, token_budget=40, samples_per_row=0, scorers=[], metrics={}
    )
    collate = ScoringCollator(0, ranks, token_budget=40, recorder=recorder)
    planned = list(planner)
    collated = (collate([rows]) for rows in planned)
    ahead = list(islice(collated, prefetched))
    scored = []
    while batches := [*ahead, *islice(collated, steps - len(ahead))]:
        ahead, batches = batches[steps:], batches[:steps]
        ahead += islice(collated, max(0, prefetched - len(ahead)))
        scored.append(score_step(LocalTrainer(torch.nn.Identity(), [], ScoringArgs()), batches))
        recorder.write(scored[-1])
    return scored, [planned[i : i + steps] for i in range(0, len(planned), steps)]


@pytest.mark.parametrize("prefetched", [0, 1, 2])
def test_a_step_reads_back_as_it_was_scored(tmp_path, prefetched):
    samples = {s["uid"]: s for s in stream()}
    scored, planned = recorded_run(tmp_path, samples.values(), prefetched=prefetched)
    assert len(scored) >= 2
    files = recorded_steps(tmp_path)
    assert list(files) == list(range(len(scored)))
    for number, path in files.items():
        step, scores = read_recorded_step(path), scored[number]
        assert (step.number, step.micro_batches, step.ranks, step.settings) == (number, 2, 2, SETTINGS)
        assert step.names == scores.names == ("solved", "style")
        assert step.num_own_names == 2
        assert step.rollouts.uid.tolist() == scores.uids.tolist()  # this stream comes by rising uid
        np.testing.assert_array_equal(step.rewards, scores.rewards)
        np.testing.assert_array_equal(step.advantages, scores.advantages)
        assert step.reasons == scores.reasons
        for micro_batch, rows in enumerate(planned[number]):
            for rank, row in enumerate(rows):
                here = (step.place == (micro_batch, rank)).all(axis=1)
                uids = sorted(s["uid"] for s in row.samples if s["uid"] >= 0)
                assert step.rollouts.uid[here].tolist() == uids
        for read in step.rollouts.samples():
            original = samples[read["uid"]]
            for key in ("input_ids", "completion_mask", "old_log_probs"):
                np.testing.assert_array_equal(read[key], original[key])
            assert read["rewards"] == pytest.approx(original["rewards"], nan_ok=True)
            assert {key: read[key] for key in ("group_id", "group_size", "finished")} == {
                key: original[key] for key in ("group_id", "group_size", "finished")
            }
        lengths = dict(zip(step.rollouts.uid.tolist(), pq.read_table(path)["metrics/length"].to_pylist()))
        assert lengths == {uid: samples[uid]["metrics"].get("length") for uid in lengths}


def test_groups_are_in_the_order_of_planning(tmp_path):
    late, early = group(7, [9, 9], first_uid=0), group(3, [9, 9], first_uid=2)
    recorded_run(tmp_path, [*early, *late])
    (path,) = recorded_steps(tmp_path).values()
    assert read_rollouts(path).group_id.tolist() == [3, 3, 7, 7]


def test_reference_answers_are_kept(tmp_path):
    with_one = group(0, [9, 12, 8], first_uid=0, reference_ids=[7, 8, 9])
    without = group(1, [9, 9], first_uid=3)
    recorded_run(tmp_path, [*with_one, *without])
    read = [s for path in recorded_steps(tmp_path).values() for s in read_recorded_step(path).samples()]
    assert [s["uid"] for s in read] == [0, 1, 2, 3, 4]
    for s in read[:3]:
        np.testing.assert_array_equal(s["reference_ids"], np.array([7, 8, 9]))
        assert s["reference_ids"].dtype == np.int64
    assert all("reference_ids" not in s for s in read[3:])
    recorded_run(tmp_path / "none", without)
    (path,) = recorded_steps(tmp_path / "none").values()
    assert "reference_ids" not in pq.read_schema(path).names
    assert read_recorded_step(path).references == (None, None)


def test_fillers_are_left_out(tmp_path):
    recorded_run(tmp_path, group(0, [9]), steps=3)
    (path,) = recorded_steps(tmp_path).values()
    step = read_recorded_step(path)
    assert step.rollouts.uid.tolist() == [0]
    assert (step.micro_batches, step.ranks) == (3, 2)


def test_the_oldest_files_go_first(tmp_path):
    scored, _ = recorded_run(tmp_path / "all", groups_of([9] * 4, length=12), max_steps=None)
    assert len(scored) >= 4
    recorded_run(tmp_path / "two", groups_of([9] * 4, length=12), max_steps=2)
    assert list(recorded_steps(tmp_path / "two")) == [len(scored) - 2, len(scored) - 1]
    size = max(path.stat().st_size for path in (tmp_path / "all").iterdir())
    recorded_run(tmp_path / "small", groups_of([9] * 4, length=12), max_steps=None, max_bytes=2 * size)
    kept = recorded_steps(tmp_path / "small")
    assert list(kept) == [len(scored) - 2, len(scored) - 1]
    recorded_run(tmp_path / "one", groups_of([9] * 4, length=12), max_bytes=1)
    assert list(recorded_steps(tmp_path / "one")) == [len(scored) - 1]  # the newest always stays


def test_a_crash_while_writing_leaves_whole_files(tmp_path, monkeypatch):
    import pyarrow.parquet

    recorded_run(tmp_path, stream())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def crash(table, file, **options):
        file.write(b"PAR1 and then the lights went out")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "write_table", crash)
        with pytest.raises(KeyboardInterrupt):
            recorded_run(tmp_path, stream())
    assert {path.name: path.read_bytes() for path in recorded_steps(tmp_path).values()} == before
    assert len(list(tmp_path.iterdir())) == len(before) + 1  # what was half written, under another name
    recorded_run(tmp_path, stream())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{i:08d}.parquet" for i in range(2 * len(before))]
    for path in recorded_steps(tmp_path).values():
        read_recorded_step(path)


def test_micro_batches_that_were_never_scored_are_let_go(tmp_path):
    recorder = StepRecorder(tmp_path, settings=SETTINGS)
    options = {"num_processes": 1, "steps": 1, "token_budget": 40, "samples_per_row": 0, "scorers": [], "metrics": {}}
    planned = list(StepPlanner(groups_of([3, 3, 3], length=12), **options))
    batches = [ScoringCollator(0, recorder=recorder)([rows]) for rows in planned]
    assert len(batches) == 3
    scores = score_step(LocalTrainer(torch.nn.Identity(), []), batches[1:2])
    assert read_rollouts(recorder.write(scores)).uid.tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="scores must be of micro-batches that were collated, got uid 3 in one only"):
        recorder.write(scores)


def test_untrained_tokens_may_lack_log_probs(tmp_path):
    samples = stream()
    for s in samples:
        s["old_log_probs"][s["completion_mask"] == 0] = np.nan
    recorded_run(tmp_path, samples)
    for path in recorded_steps(tmp_path).values():
        assert np.isfinite(read_recorded_step(path).rollouts.old_log_probs).all()


def test_what_is_no_recorded_step(tmp_path):
    recorded_run(tmp_path, stream())
    path = recorded_steps(tmp_path)[0]
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(RolloutError, match="not a recorded step"):
        read_recorded_step(path)
    (tmp_path / "step-mine.parquet").write_text("")
    assert 0 in recorded_steps(tmp_path)


def test_settings_travel(tmp_path):
    settings = dataclasses.replace(
        SETTINGS, placement="balanced", estimator="rloo", scale="none", reward_weights=[1.0, 2.0], share_prefixes=False
    )
    recorder = StepRecorder(tmp_path, settings=settings)
    options = {"token_budget": 40, "scorers": [], "metrics": defaultdict(list)}
    rows = next(iter(StepPlanner(group(0, [9, 9]), num_processes=1, steps=1, samples_per_row=0, **options)))
    batch = ScoringCollator(0, recorder=recorder)([rows])
    path = recorder.write(score_step(LocalTrainer(torch.nn.Identity(), []), [batch]))
    assert read_recorded_step(path).settings == settings


def test_refusals(tmp_path, monkeypatch):
    for name in ("max_steps", "max_bytes"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            StepRecorder(tmp_path, settings=SETTINGS, **{name: 0})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"StepRecorder needs pyarrow: pip install 'treepack\[score\]'"):
        recorder_module.StepRecorder(tmp_path, settings=SETTINGS)
