"""`treepack inspect`: its forecast is what the planner does, its recommendation follows from it, its output is safe."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from support.prompts import POLICY, TextTokenizer, prompt_rows
from support.rollout_files import rollout_rows, write_rollouts
from support.traces import BUNDLED
from treepack.scoring.commands import app
from treepack.scoring.display import BarDisplay
from treepack.scoring.errors import ModelError, OptionError
from treepack.scoring.inspect_forecast import Forecast, ModelShape, Setting, forecast, read_model_shape, recommend
from treepack.scoring.inspection import InspectOptions, inspect_rollouts
from treepack.scoring.rollouts import read_rollouts
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions
from treepack.scoring.token_cost import token_cost


def run(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


@pytest.fixture
def dated(tmp_path):
    """Rollouts with a date of each row's own, and their tokenizer."""
    tokenizer = TextTokenizer()
    rows = prompt_rows(tokenizer, lambda group, row: f"Today is 2024-05-{10 + 4 * group + row}. {POLICY}")
    return write_rollouts(tmp_path / "dated.jsonl", rows), tokenizer.save(tmp_path / "tokenizer.json")


@pytest.fixture
def quiet():
    from rich.console import Console

    return BarDisplay(Console(quiet=True))


# The forecast


@pytest.mark.parametrize("placement", ["least_loaded", "balanced"])
def test_the_forecast_is_what_scoring_reports(tmp_path, quiet, placement):
    options = {"ranks": 2, "steps": 2, "token_budget": 4096, "placement": placement}
    report = score_rollouts(ScoreOptions(scorer="none", out=tmp_path, **options), quiet)
    model = ModelShape()
    found = forecast(list(read_rollouts(BUNDLED).samples()), Setting(**options), model)
    assert found.optimizer_steps == len(report.steps) > 1
    assert found.packing_ratio == report.packing_ratio
    assert found.dropped_samples == report.not_trained["oversize"] + report.not_trained["group_too_large"]
    assert found.attention_tflops == pytest.approx(model.training_flops(report.total("pairs")) / 1e12, rel=1e-12)
    assert found.unshared_attention_tflops == pytest.approx(model.training_flops(report.total("raw_pairs")) / 1e12)
    largest = max(row.tokens for step in report.steps for row in step.rows)
    assert found.memory_gib == model.activation_bytes(largest) / 2**30
    assert 0.5 < found.busy <= 1


def test_everything_dropped(caplog):
    samples = list(read_rollouts(BUNDLED).samples(limit_groups=3))
    found = forecast(samples, Setting(2, 2, 8, "balanced"), ModelShape())
    assert (found.optimizer_steps, found.dropped_groups, found.dropped_samples) == (0, 3, len(samples))
    assert found.packing_ratio is None
    assert caplog.records == []
    assert recommend([found]) is None


def test_the_shape_of_a_model(tmp_path):
    config = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, head_dim=24)
    config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    assert shape == ModelShape(tmp_path.name, 3, 64, 160, 4, 4, 24, token_cost(config))
    assert shape.training_flops(10) == 14 * 3 * 4 * 24 * 10
    layer = 4 * 64 + 2 * 8 * 24 + 3 * 160
    assert shape.activation_bytes(5) == 2 * 5 * (3 * 64 + 2 * layer)
    with pytest.raises(ModelError, match="not a checkpoint folder"):
        read_model_shape(tmp_path / "none")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_model_shape(tmp_path)


def test_the_recommendation():
    base = Forecast(Setting(2, 2, 8192, "balanced"), 9, 0, 0, 2.0, 4.0, 1.0, 2.0, 0.9, 100.0)

    def other(*, ranks=2, budget=8192, **changes):
        return replace(base, setting=Setting(ranks, 2, budget, "balanced"), **changes)

    large = other(budget=32768, device_cost=80.0, memory_gib=16.0)
    middle = other(budget=16384, device_cost=81.0, memory_gib=8.0)
    lossy = other(budget=4096, device_cost=50.0, dropped_samples=3, dropped_groups=1, memory_gib=2.0)
    everything = [base, large, middle, lossy]
    found = recommend(everything)
    assert found.setting == middle.setting  # within 3 % of the least time, at half the memory
    assert "drops nothing (1 of 4 settings drop more)" in found.reason
    assert "1.2 % more device time a sample than the best (2 ranks x 32,768 tokens, balanced)" in found.reason
    assert recommend(everything, memory_gib=5.0).setting == base.setting
    assert recommend([large, lossy], memory_gib=3.0).setting == lossy.setting
    assert "drops 3 samples, no setting fewer" in recommend([lossy]).reason
    assert recommend(everything, memory_gib=1.0) is None
    wide = other(ranks=8, budget=16384, device_cost=82.0, memory_gib=8.0)
    assert recommend([*everything, wide]).setting == wide.setting  # done sooner


def test_options_of_no_use():
    with pytest.raises(OptionError, match="--ranks must be at least 1, got \\[2, 0\\]"):
        InspectOptions(ranks=(2, 0))
    with pytest.raises(OptionError, match="--token-budget must be at least 1, got \\[\\]"):
        InspectOptions(token_budgets=())


# The command


def test_a_planted_date_from_the_command(dated, tmp_path):
    rollouts, tokenizer = dated
    file = tmp_path / "found.json"
    result = run(rollouts, "--tokenizer", tokenizer, "--json", file, "--ranks", 1, "--token-budget", 4096)
    assert result.exit_code == 0
    assert "1. a date or time:" in result.stdout
    assert "Today is [2024-05-" in result.stdout
    assert "recommended: --ranks 1 --steps 2 --token-budget 4096 --placement" in result.stdout
    found = json.loads(file.read_text())
    first = found["divergences"][0]
    assert (first["kind"], first["title"]) == ("date", "a date or time")
    assert first["example"]["left"].startswith("2024-05-")
    assert found["groups"] == len(found["by_group"]) == 5
    assert found["examples"] == "text"
    assert [one["setting"]["placement"] for one in found["forecasts"]] == ["least_loaded", "balanced"]
    assert found["recommendation"]["setting"]["token_budget"] == 4096
    assert found["sharing"]["within_groups"]["packing_ratio"] < 1.1


def test_the_bundled_rollouts_without_a_tokenizer():
    result = run("--limit-groups", 4, "--ranks", 2, "--token-budget", 8192)
    assert result.exit_code == 0
    for text in (
        "rollouts.npz: sharing",
        "each group by itself",
        "packing ratio of 4 groups",
        "--tokenizer shows text",
    ):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines()[:8])) <= 80


def test_top_and_what_is_left_out(tmp_path):
    tokenizer = TextTokenizer()
    rows = prompt_rows(tokenizer, lambda group, row: f"It is {4 + group}:30. {POLICY} user_{10 + row} begins. {POLICY}")
    path = write_rollouts(tmp_path / "rollouts.jsonl", rows)
    result = run(path, "--top", 1, "--ranks", 1, "--token-budget", 4096)
    assert "\n1. a part that differs" in result.stdout
    assert "\n2. " not in result.stdout
    assert "... and 1 more cause, " in result.stdout


def test_text_of_rollouts_commands_no_terminal(tmp_path):
    tokenizer = TextTokenizer()
    hostile = ["\x1b[31m", "[bold]", "\r", "\u202e"]
    pieces = tokenizer.ids(hostile)
    rows = prompt_rows(tokenizer, lambda group, row: f"It is {8 + row}:30 now. {POLICY}", groups=1)
    for row in rows:
        row["input_ids"] = pieces + row["input_ids"]
        row["completion_mask"] = [0] * len(pieces) + row["completion_mask"]
    result = run(
        write_rollouts(tmp_path / "rollouts.jsonl", rows),
        *("--tokenizer", tokenizer.save(tmp_path / "tokenizer.json"), "--ranks", 1, "--token-budget", 4096),
    )
    assert result.exit_code == 0
    assert "\\x1b[31m[bold]\\r\\u202eIt is [8:30 | " in result.stdout
    assert not {"\x1b", "\r", "\u202e"} & set(result.stdout)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.npz"], "none.npz: no such file"),
        (["--tokenizer", "none"], "none: no such tokenizer"),
        (
            ["--tokenizer", "rollouts.jsonl"],
            "a tokenizer must be a tokenizer.json, a checkpoint folder or a .gguf file",
        ),
        (["--tokenizer", "damaged.json"], "damaged.json: cannot be read"),
        (["--model", "none"], "none: not a checkpoint folder: it has no config.json"),
        # Before any work: the tokenizer, which is not there either, is not looked for.
        (["--tokenizer", "none", "--json", "none/found.json"], "cannot be written: No such file or directory"),
        (["--tokenizer", "none", "--json", "."], "--json .: cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0]]))
    (tmp_path / "damaged.json").write_text("{")
    result = run(*args, "--ranks", 1, "--token-budget", 4096)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert line.startswith("error: ")
    assert message in line


def test_rewards_are_not_needed(tmp_path, quiet):
    rows = [{name: value for name, value in row.items() if name != "reward"} for row in rollout_rows([[1.0, 0.0]])]
    options = InspectOptions(rollouts=write_rollouts(tmp_path / "rollouts.npz", rows), ranks=(1,))
    found = inspect_rollouts(options, quiet)
    assert (found.longest_row, found.within_groups.rows, found.divergences.sampled) == (20, 2, 1)
