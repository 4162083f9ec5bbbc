"""The README does not lie: its snippets and commands run, and what it quotes is in the code."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from treepack.scoring.commands import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
TRAINER, *_ = [snippet for snippet in SNIPPETS if "ScoringGRPOTrainer(" in snippet]
COMMANDS = [
    command.strip()
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    for command in line.partition("#")[0].split("&&")
    if command.strip()
]


def test_snippets() -> None:
    """In the order a reader meets them, in one namespace."""
    names: dict[str, Any] = {}
    for snippet in SNIPPETS:
        if snippet != TRAINER:
            exec(compile(snippet, "README.md", "exec"), names)
    assert names["scores"].names == ("reward_model",)
    assert names["project"].weight.grad is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_trainer_snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written; only what a machine without a GPU and vLLM needs is put in between."""
    from treepack.kernels.hf_attention import register_attention
    from treepack.scoring import trl_hooks
    from treepack.scoring.loopback_server import LoopbackServer, LoopbackWeightTransfer
    from treepack.scoring.train_demo_model import byte_tokenizer, make_prompts, save_policy, tiny_model

    register_attention()
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    save_policy(tmp_path / "policy", seed=0)
    with LoopbackServer(tiny_model(tokenizer, seed=0), name=str(tmp_path / "policy")) as server:
        small = {"max_steps": 2, "max_completion_length": 8, "use_cpu": True, "bf16": False, "report_to": "none"}
        quick = {"gradient_checkpointing": False, "save_strategy": "no", "flush_after_s": 2.0, "groups_per_step": 2}

        class Config(trl_hooks.ScoringGRPOConfig):
            def __init__(self, **given: Any) -> None:
                super().__init__(**small, **quick, **given)

        class Trainer(trl_hooks.ScoringGRPOTrainer):
            def __init__(self, **given: Any) -> None:
                super().__init__(weight_transfer=LoopbackWeightTransfer(server), **given)

        monkeypatch.setattr(trl_hooks, "ScoringGRPOConfig", Config)
        monkeypatch.setattr(trl_hooks, "ScoringGRPOTrainer", Trainer)
        names = {
            "POLICY": str(tmp_path / "policy"),
            "SERVER": server.url,
            "PROMPTS": make_prompts(16),
            "judge": tiny_model(tokenizer, seed=1, attention="treepack"),
        }
        exec(compile(TRAINER, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 2
    assert list((tmp_path / "run" / "steps").glob("*.parquet"))


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    """Benchmarks at smoke size; what needs a GPU as far as it goes without one."""
    assert len(COMMANDS) >= 10
    for command in COMMANDS:
        words = shlex.split(command)
        if words == ["pytest"]:
            continue  # this is it
        if words[0] == "pip":
            check_installation(words)
        elif words[0] == "treepack" and words[1] == "train-demo":
            assert "train-demo" in (ROOT / "tests" / "trl" / "test_demo.py").read_text()  # its own slow test
        elif words[0] == "treepack" or words[1].startswith("benchmarks"):
            extra = {"bench": ["--smoke"], "benchmarks/gpu/run.py": ["--dry-run"]}.get(words[1], [])
            run(command, [*words, *extra], tmp_path)
        else:
            raise AssertionError(f"{command}: no test runs it")


def run(command: str, words: list[str], folder: Path) -> None:
    program, *arguments = words
    start = [str(Path(sys.executable).with_name("treepack"))] if program == "treepack" else [sys.executable]
    arguments = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*start, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"


def check_installation(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"[\w-]+", words[-1].partition("[")[2].partition("]")[0])) <= set(extras), words
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file(), words


def test_commands_and_files_that_the_text_names_exist() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"treepack ([a-z][a-z-]*)\b(?=[^\n]*`)", "\n".join(re.findall(r"`[^`\n]+`", README))))
    assert named <= commands, named - commands
    for path in set(re.findall(r"(?:benchmarks|docs|scoring|kernels)/[\w/]+\.(?:py|md)", README)):
        assert (ROOT / path).is_file(), path
    for extra in set(re.findall(r'"treepack\[([\w-]+)\]"', README)):
        check_installation(["pip", "install", f"treepack[{extra}]"])


def quoted_messages() -> Iterator[str]:
    _, _, section = README.partition("## Troubleshooting")
    for row in section.partition("\n## ")[0].splitlines():
        if row.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", row.split("|")[1])


def test_messages_under_troubleshooting_are_the_codes() -> None:
    # Joined string literals, so that a message may be broken over lines.
    source = "\n".join(path.read_text() for folder in ("kernels", "scoring") for path in (ROOT / folder).glob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    messages = list(quoted_messages())
    assert len(messages) >= 10
    for message in messages:
        assert message in source, message
