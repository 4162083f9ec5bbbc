"""`treepack replay`: nothing differs in a fresh record; what was changed is found and shown."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from typer.testing import CliRunner

from support.rollout_files import rollout_rows, write_rollouts
from treepack.scoring import commands, score_job
from treepack.scoring.commands import app
from treepack.scoring.display import make_display
from treepack.scoring.errors import OptionError
from treepack.scoring.recorder import read_recorded_step, recorded_steps
from treepack.scoring.replay import replay_step
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions


@pytest.fixture(autouse=True)
def _leave_logging_alone(monkeypatch):
    monkeypatch.setattr(commands, "_quiet_libraries", lambda: None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoint folders by scorer."""
    folder = tmp_path_factory.mktemp("models")
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        initializer_range=0.2,
        num_labels=1,
    )
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward-model")
    LlamaForCausalLM(config).save_pretrained(folder / "log-prob")
    return {"reward-model": folder / "reward-model", "log-prob": folder / "log-prob", "ebft": folder / "log-prob"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, models):
    """A recorded run by scorer: several steps of the same rollouts."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(1)
    rows = rollout_rows([rng.integers(0, 3, 12).astype(float).tolist() for _ in range(5)], length=24)
    rows += [{**row, "group_id": 9} for row in rollout_rows([[1.0, 0.0]], length=101)]  # longer than a row: dropped
    rollouts = write_rollouts(folder / "rollouts.jsonl", rows)
    monkeypatch = pytest.MonkeyPatch()
    for plot in ("plot_tokens", "plot_rows", "plot_tree"):  # a second each
        monkeypatch.setattr(score_job, plot, lambda path, *args: None)
    for scorer in ("none", *models):
        options = {"placement": "balanced"} if scorer == "log-prob" else {"estimator": "rloo", "scale": "none"}
        score_rollouts(
            ScoreOptions(
                rollouts=rollouts,
                model=models.get(scorer),
                scorer=scorer,
                token_budget=100,
                record=True,
                out=folder / scorer,
                **options,
            ),
            make_display(quiet=True),
        )
        assert len(recorded_steps(folder / scorer / "record")) >= 2
    monkeypatch.undo()
    return {scorer: folder / scorer / "record" for scorer in ("none", *models)}


@pytest.mark.parametrize("scorer", ["none", "reward-model", "ebft", "log-prob"])
def test_a_fresh_record_replays_alike(recorded, scorer):
    for number in recorded_steps(recorded[scorer]):
        report = replay_step(recorded[scorer], step=number)
        assert report.step == number
        assert report.samples > 0
        assert report.differences == ()
        assert report.moved == 0
        assert report.max_advantage_difference <= 1e-12
        assert report.max_reward_difference is None


@pytest.mark.parametrize("scorer", ["reward-model", "ebft", "log-prob"])
def test_the_same_model_gives_the_recorded_rewards(recorded, models, scorer):
    report = replay_step(recorded[scorer], scorer=scorer, model=models[scorer])
    assert report.differences == ()
    assert report.max_reward_difference is not None
    assert report.max_reward_difference <= 1e-5


def test_references_are_those_of_the_record(models, tmp_path, monkeypatch):
    """Not what the rollouts would give: a group's reference answer is its own, or there is none."""

    def with_other_references(samples):
        for s in samples:
            yield s if s["group_id"] == 1 else {**s, "reference_ids": [3 + s["group_id"], 5]}

    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0, 2.0]] * 3, length=24))
    monkeypatch.setattr(score_job, "with_references", with_other_references)
    options = {"rollouts": rollouts, "model": models["ebft"], "scorer": "ebft", "token_budget": 100, "record": True}
    score_rollouts(ScoreOptions(**options, steps=1, out=tmp_path), make_display(quiet=True))
    monkeypatch.undo()
    steps = [read_recorded_step(path) for path in recorded_steps(tmp_path / "record").values()]
    rewards = np.concatenate([step.rewards[:, 1] for step in steps])
    groups = np.concatenate([step.rollouts.group_id for step in steps])
    np.testing.assert_array_equal(np.isnan(rewards), groups == 1)
    for step in steps:
        report = replay_step(tmp_path / "record", step=step.number, scorer="ebft", model=models["ebft"])
        assert report.differences == ()
        assert report.max_reward_difference <= 1e-5


def test_another_model_does_not(recorded, models):
    report = replay_step(recorded["reward-model"], scorer="reward-model", model=models["log-prob"], seed=5)
    assert report.moved == 0
    assert report.max_reward_difference > 0.01
    assert len(report.differences) > 0
    assert all(d.recorded.place == d.replayed.place for d in report.differences)


def changed(folder: Path, to: Path, **columns):
    """A copy of a record whose first step has other values in some columns, by a function of the old ones."""
    shutil.copytree(folder, to)
    path = recorded_steps(to)[0]
    table = pq.read_table(path)
    for name, change in columns.items():
        at = table.schema.get_field_index(name)
        values = pa.array(change(table[name].to_pylist()), table[name].type)
        table = table.set_column(at, table.schema.field(at), values)
    pq.write_table(table, path)
    return to


def test_a_sample_that_was_elsewhere_is_shown(recorded, tmp_path):
    folder = changed(recorded["none"], tmp_path / "record", rank=lambda ranks: [1 - ranks[0], *ranks[1:]])
    report = replay_step(folder, step=0)
    (difference,) = report.differences
    assert report.moved == 1
    micro_batch, rank = difference.recorded.place
    assert difference.replayed.place == (micro_batch, 1 - rank)
    assert difference.recorded.advantage == pytest.approx(difference.replayed.advantage)


def test_other_advantages_and_reasons_are_shown(recorded, tmp_path):
    folder = changed(
        recorded["none"],
        tmp_path / "record",
        advantage=lambda values: [values[0], values[1] + 1e-6, *values[2:]],
        reason=lambda values: [*values[:-1], "truncated"],
    )
    report = replay_step(folder, step=0)
    assert len(report.differences) == 2
    assert report.max_advantage_difference == pytest.approx(1e-6, rel=1e-3)
    assert report.differences[1].recorded.reason == "truncated"


def test_a_sample_that_is_not_planned_any_more(recorded, tmp_path, monkeypatch):
    report = replay_step(recorded["none"], step=0)
    monkeypatch.setattr("treepack.scoring.replay.StepPlanner.__iter__", lambda self: iter([]))
    gone = replay_step(recorded["none"], step=0)
    assert gone.moved == len(gone.differences) == report.samples
    assert {d.replayed.reason for d in gone.differences} == {"not planned"}


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_command(recorded, models, tmp_path):
    result = run("replay", recorded["reward-model"], "--model", models["reward-model"])
    assert result.exit_code == 0
    assert "moved to another row" in result.stdout
    assert "largest reward difference" in result.stdout
    assert run("replay", recorded["reward-model"].parent).exit_code == 0  # the folder of the score
    folder = changed(recorded["none"], tmp_path / "record", rank=lambda ranks: [1 - rank for rank in ranks])
    result = run("replay", folder, "--step", 0)
    assert result.exit_code == 4
    assert result.stdout.count("uid ") == 10
    assert "more (--json has all)" in result.stdout
    result = run("replay", folder, "--step", 0, "--json")
    assert result.exit_code == 4
    report = json.loads(result.stdout)
    assert report["moved"] == len(report["differences"]) == report["samples"]
    empty = folder.parent / "empty"
    result = run("replay", empty)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"error: {empty}: holds no recorded steps"


@pytest.mark.parametrize("option", [("--scorer", "ebft"), ("--seed", 0)])
def test_options_of_a_model_that_is_not_given(recorded, option):
    result = run("replay", recorded["none"], *option)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: --scorer and --seed need --model")


def test_refusals(recorded, models):
    with pytest.raises(OptionError, match="--step must be one of those recorded, 0 to [0-9]+, got 99"):
        replay_step(recorded["none"], step=99)
    with pytest.raises(OptionError, match=r"--scorer must be one the step was scored with, \[\], got 'reward_model'"):
        replay_step(recorded["none"], model=models["reward-model"])


def test_a_record_is_a_rollout_file(recorded, tmp_path):
    path = recorded_steps(recorded["none"])[0]
    report = score_rollouts(ScoreOptions(rollouts=path, scorer="none", out=tmp_path), make_display(quiet=True))
    assert report.total("samples") == pq.read_metadata(path).num_rows
    with pytest.raises(OptionError, match="the job would write over the rollouts"):
        score_rollouts(ScoreOptions(rollouts=path, scorer="none", out=path.parent.parent), make_display(quiet=True))
