"""`--config`: the same names and checks as the command line, which wins."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from support.rollout_files import rollout_rows, write_rollouts
from treepack.scoring import commands
from treepack.scoring.commands import app

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commands, "_quiet_libraries", lambda: None)
    monkeypatch.chdir(tmp_path)
    write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0], [0.5, 0.5, 0.5]]))
    return tmp_path


def score(config: str, *args: object) -> Result:
    Path("job.toml").write_text(config)
    return CliRunner().invoke(app, ["score", "--config", "job.toml", *map(str, args)])


def test_options_and_arguments_from_a_file(folder: Path) -> None:
    config = 'rollouts = "rollouts.jsonl"\nscorer = "none"\ntoken-budget = 99\nmask_truncated = true\nout = "scored"\n'
    result = score(config, "--token-budget", 77, "--json")
    assert result.exit_code == 0, result.output
    options = json.loads(result.stdout)["options"]
    assert options["token_budget"] == 77  # the command line wins
    assert options["mask_truncated"] is True
    assert options["scorer"] == "none"
    assert (folder / "scored" / "scored.parquet").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("tokens-budget = 9", "'tokens-budget' is no option of `score`; did you mean 'token-budget'?"),
        ("zzz = 9", "'zzz' is no option of `score`; known are compare, estimator,"),
        ('config = "other.toml"', "'config' is no option of"),
        ("token-budget = [1, 2]", "'token-budget' must be a single value, got [1, 2]"),
        ("mask-truncated = 1", "'mask-truncated' must be true or false, got 1"),
        ("steps = true", "'steps' must be a value, not true or false, got True"),
        ("steps = 2.5", "should be a valid integer"),
        ("token-budget = 9\ntoken_budget = 8", "'token-budget' and 'token_budget' are the same option"),
        ("steps = 0", "should be greater than or equal to 1"),
        ('scorer = "best"', "'best' is not one of 'reward-model', 'ebft', 'log-prob', 'none'"),
        ("steps 2", "not valid TOML: Expected '=' after a key"),
    ],
)
def test_wrong_files(folder: Path, config: str, message: str) -> None:
    result = score(config)
    assert result.exit_code == 2
    text = " ".join(result.stderr.replace("│", " ").split())
    assert message in text


def test_no_such_file(folder: Path) -> None:
    result = CliRunner().invoke(app, ["score", "--config", "none.toml"])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_options_that_are_repeated(folder: Path) -> None:
    config = 'rollouts = "rollouts.jsonl"\ntoken-budget = [64, 128]\nranks = 3\njson = "found.json"\n'
    Path("job.toml").write_text(config)
    result = CliRunner().invoke(app, ["inspect", "--config", "job.toml"])
    assert result.exit_code == 0, result.output
    settings = [one["setting"] for one in json.loads(Path("found.json").read_text())["forecasts"]]
    assert {(one["token_budget"], one["ranks"]) for one in settings} == {(64, 3), (128, 3)}
    Path("job.toml").write_text('suites = ["no-such-suite", "packing"]')
    result = CliRunner().invoke(app, ["bench", "--config", "job.toml"])
    assert result.exit_code == 2
    assert "got 'no-such-suite'" in result.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("token-budget = [8192, 2.5]", "should be a valid integer"),
        ("token-budget = [[1], 2]", "'token-budget' must be a single value, got [1]"),
        ("ranks = [true]", "'ranks' must be a value, not true or false, got True"),
    ],
)
def test_wrong_lists(folder: Path, config: str, message: str) -> None:
    Path("job.toml").write_text(config)
    result = CliRunner().invoke(app, ["inspect", "--config", "job.toml"])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_every_command_that_takes_long_has_it() -> None:
    help_of = {name: CliRunner().invoke(app, [name, "--help"]).stdout for name in COMMANDS}
    assert [name for name in COMMANDS if "--config" not in help_of[name]] == ["doctor"]
    for name, text in help_of.items():
        codes = ("0    ", "1    ", "2    ", "130  interrupted")
        assert [code for code in codes if code not in text.partition("Exit codes:")[2]] == [], name
