"""`treepack train-demo`: the reward rises, and what is written says so."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from treepack import register_attention
from treepack.scoring.train_demo import MARGIN, DemoReport, DemoStep, plot_curve
from treepack.scoring.train_demo_model import byte_tokenizer, make_judge, make_prompts, save_policy, tiny_model


def report(rewards):
    steps = tuple(DemoStep(reward=reward, samples=32, seconds=float(i)) for i, reward in enumerate(rewards))
    return DemoReport(steps=steps, of_the_text=-0.1, before="?", after="the", requests=32 * len(rewards))


@pytest.mark.parametrize(
    ("rewards", "quarters", "rose"),
    [
        ([-9.0, -8.0, -7.0, -6.0], (-9.0, -6.0), True),
        ([-9.0, -9.0, -5.0, -5.0, -5.0, -5.0, -8.6, -8.6], (-9.0, -8.6), False),
        ([-6.0, -6.0, -6.0, -9.0], (-6.0, -9.0), False),
    ],
)
def test_rising_is_judged_by_the_quarters(rewards, quarters, rose):
    found = report(rewards)
    assert found.quarters == quarters
    assert found.rose is rose
    assert found.to_dict()["rose"] is rose


def test_the_curve_is_drawn(tmp_path):
    plot_curve(tmp_path / "curve.png", report([-9.0 + 0.1 * i for i in range(30)]))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_judge_knows_its_sentence_and_the_tokenizer_all_bytes(tmp_path):
    register_attention()
    tokenizer, prompts = byte_tokenizer(), make_prompts(8)
    judge, of_the_text = make_judge(tokenizer, prompts, "so it is. ", seed=1, steps=60)
    assert -1.0 < of_the_text < 0.0
    assert judge.config._attn_implementation == "treepack"
    assert tokenizer.decode(tokenizer.encode("é ~\n")) == "é ~\n"
    save_policy(tmp_path, seed=3)
    assert (tmp_path / "tokenizer_config.json").exists()
    first, again, other = (tiny_model(tokenizer, seed=seed).lm_head.weight.detach().numpy() for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.slow
def test_the_demo_shows_the_reward_rise(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from treepack.scoring.cli import main; main()", "train-demo", "--json"]
    result = subprocess.run(
        [*command, "--steps", "48", "--out", tmp_path / "demo"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "demo" / "curve.json").read_text())
    rewards = [step["reward"] for step in found["steps"]]
    assert len(rewards) == 48
    assert np.mean(rewards[-12:]) > np.mean(rewards[:12]) + MARGIN
    assert all(step["samples"] == 32 for step in found["steps"])
    assert found["requests"] >= 48 * 32
    assert (tmp_path / "demo" / "curve.png").stat().st_size > 5000
    assert "Traceback" not in result.stderr
