"""ScoringGRPOConfig: what it refuses, and how it is read from a command line or a file."""

import pytest

from support.trl_training import settings
from treepack.scoring.trl_hooks import ScoringGRPOConfig
from trl import TrlParser

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advantage_estimator", "ppo", r"advantage_estimator must be one of \('grpo', 'rloo'\), got 'ppo'"),
        ("scale_rewards", "row", "scale_rewards must be one of .*, got 'row'"),
        ("loss_normalization", "sum", "loss_normalization must be one of .*, got 'sum'"),
        ("placement", "random", "placement must be one of .*, got 'random'"),
        ("oversize", "cut", "oversize must be one of .*, got 'cut'"),
        ("attention_backend", "fast", "attention_backend must be one of .*, got 'fast'"),
        ("groups_per_step", 0, "groups_per_step must be at least 1, got 0"),
        ("max_failed_generations", 0, "max_failed_generations must be at least 1, got 0"),
        ("num_generations", 1, "num_generations must be at least 2, got 1: advantages compare a group's rollouts"),
        ("flush_after_s", 0.0, "flush_after_s must be above 0, got 0.0"),
        ("flush_after_s", float("nan"), "flush_after_s must be above 0, got nan"),
        ("reward_weights", '{"solved": NaN}', "reward_weights must be finite, got {'solved': nan}"),
        ("sample_columns", ["prompt"], r"sample_columns must be other columns than \('prompt', .*, got \['prompt'\]"),
        ("reward_weights", "solved=1", "reward_weights must be JSON where it is a string, got 'solved=1'"),
    ],
)
def test_wrong_values_are_refused(tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        ScoringGRPOConfig(**settings(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward_weights", 3, "reward_weights must be a mapping by name or a sequence, got int"),
        ("reward_weights", {"solved": "much"}, "reward_weights must be numbers, got {'solved': 'much'}"),
        ("reward_weights", [1.0, None], r"reward_weights must be numbers, got \[1.0, None\]"),
        ("sample_columns", "number", "sample_columns must be a list of column names, got 'number'"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, name, value, message):
    with pytest.raises(TypeError, match=message):
        ScoringGRPOConfig(**settings(tmp_path, **{name: value}))


def parse(*arguments):
    (parsed,) = TrlParser([ScoringGRPOConfig]).parse_args_and_config(
        ["--output_dir", "out", "--use_cpu", "--bf16", "no", *arguments]
    )
    return parsed


def test_command_line():
    parsed = parse(
        *("--advantage_estimator", "rloo", "--placement", "balanced", "--no_share_prefixes"),
        *("--attention_backend", "reference", "--deterministic", "--groups_per_step", "4", "--flush_after_s", "2.5"),
        *("--reward_weights", '{"solved": 1, "reward_model": 0.5}', "--sample_columns", "reference_ids", "answer"),
        *("--record_dir", "steps", "--mask_truncated_completions", "--token_budget", "512"),
    )
    assert (parsed.advantage_estimator, parsed.placement, parsed.share_prefixes) == ("rloo", "balanced", False)
    assert (parsed.attention_backend, parsed.deterministic, parsed.groups_per_step) == ("reference", True, 4)
    assert (parsed.flush_after_s, parsed.record_dir, parsed.token_budget) == (2.5, "steps", 512)
    assert parsed.reward_weights == {"solved": 1.0, "reward_model": 0.5}
    assert parsed.sample_columns == ["reference_ids", "answer"]
    assert parsed.mask_truncated_completions
    assert parse("--reward_weights", "[1, 0.5]").reward_weights == [1.0, 0.5]


def test_defaults_are_those_of_the_parts():
    parsed = parse()
    assert (parsed.advantage_estimator, parsed.scale_rewards, parsed.loss_normalization) == (
        "grpo",
        "group",
        "microbatch",
    )
    assert (parsed.reward_weights, parsed.attention_backend, parsed.record_dir) == (None, None, None)
    assert (parsed.placement, parsed.share_prefixes, parsed.oversize) == ("least_loaded", True, "drop")


def test_a_choice_that_is_none_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        parse("--placement", "random")
    assert "--placement" in capsys.readouterr().err


def test_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("reward_weights:\n  solved: 2\nloss_normalization: step\ngroups_per_step: 3\n")
    parsed = parse("--config", str(file))
    assert (parsed.reward_weights, parsed.loss_normalization, parsed.groups_per_step) == ({"solved": 2.0}, "step", 3)
