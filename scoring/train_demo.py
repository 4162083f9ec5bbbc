"""`treepack train-demo`: asynchronous GRPO as a whole on a CPU, with a reward that only the trainer can compute.

A tiny policy is served over HTTP, TRL's rollout child asks for completions, and a judge on the trainer, a small
language model that has learned one sentence, scores them on packed rows. The policy never sees the sentence and still
learns to write what the judge finds likely. A judge this small can be fooled, so that is seldom the sentence itself.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback

from treepack.kernels.hf_attention import register_attention
from treepack.scoring.display import Display
from treepack.scoring.log_prob_scorer import LogProbScorer
from treepack.scoring.loopback_server import LoopbackServer, LoopbackWeightTransfer
from treepack.scoring.plots import DPI, LIMIT, PACKED, RAW
from treepack.scoring.step import StepScores
from treepack.scoring.train_demo_model import byte_tokenizer, make_judge, make_prompts, save_policy, tiny_model
from treepack.scoring.trl_hooks import ScoringGRPOConfig, ScoringGRPOTrainer

TEXT = "the quick brown fox jumps over the lazy dog. "

MARGIN = 0.5
"""By how much the mean reward of the last quarter of the steps must exceed that of the first, in nats a token."""

_LINE_EVERY = 10
"""Steps from one reward that is shown to the next."""

_NUM_PROMPTS = 64
_GROUPS_PER_STEP = 4
_GROUP_SIZE = 8
_COMPLETION_TOKENS = 12


@dataclass(frozen=True)
class DemoStep:
    """One optimizer step.

    Attributes:
        reward: mean log-probability of a completion's tokens under the judge, over the step's samples, in nats.
        samples: how many samples it scored.
        seconds: since training began.
    """

    reward: float
    samples: int
    seconds: float


@dataclass(frozen=True)
class DemoReport:
    """What a demo showed.

    Attributes:
        steps: in order.
        of_the_text: the reward of the sentence the judge knows.
        before, after: a completion of the untrained and of the trained policy.
        requests: completions that the rollout child asked for.
    """

    steps: tuple[DemoStep, ...]
    of_the_text: float
    before: str
    after: str
    requests: int

    @property
    def quarters(self) -> tuple[float, float]:
        """Mean rewards of the first and the last quarter of the steps."""
        rewards = [step.reward for step in self.steps]
        size = max(1, len(rewards) // 4)
        return float(np.mean(rewards[:size])), float(np.mean(rewards[-size:]))

    @property
    def rose(self) -> bool:
        """Whether the reward rose by `MARGIN`."""
        first, last = self.quarters
        return last - first > MARGIN

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        first, last = self.quarters
        return {**asdict(self), "first_quarter": first, "last_quarter": last, "rose": self.rose}


def run_demo(steps: int, seed: int, out: Path, display: Display) -> DemoReport:
    """Train, and write curve.json and curve.png to `out`, which also gets the policy's folder.

    Args:
        steps: optimizer steps, at least 4.
        seed: of the models' weights. Sampling is not seeded: rollouts come as they are ready.
        out: a folder, made if needed.
        display: told of each step, counted in samples.
    """
    torch.set_num_threads(1)  # tensors are tiny, and trainer, server and child share few cores
    register_attention()
    display.phase("teaching the judge a sentence")
    tokenizer, prompts = byte_tokenizer(), make_prompts(_NUM_PROMPTS)
    judge, of_the_text = make_judge(tokenizer, prompts, TEXT, seed=seed + 1)
    folder = out / "policy"
    save_policy(folder, seed=seed)
    curve = _Curve(steps, display)
    with LoopbackServer(tiny_model(tokenizer, seed=seed), name=str(folder)) as server:
        before = _completion(server, tokenizer)
        display.phase("starting the trainer and its rollout child")
        trainer = ScoringGRPOTrainer(
            model=str(folder),
            args=_arguments(steps, seed, out, server.url),
            train_dataset=prompts,
            scorers=[LogProbScorer(judge, token_budget=8192, name="judge")],
            on_rollouts_scored=[curve.add],
            weight_transfer=LoopbackWeightTransfer(server),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        report = DemoReport(
            steps=tuple(curve.steps),
            of_the_text=of_the_text,
            before=before,
            after=_completion(server, tokenizer),
            requests=server.num_requests["/v1/completions"],
        )
    (out / "curve.json").write_text(json.dumps(report.to_dict(), indent=1))
    plot_curve(out / "curve.png", report)
    return report


class _Curve:
    """Collects a step's reward when it is scored."""

    def __init__(self, num_steps: int, display: Display) -> None:
        self.steps: list[DemoStep] = []
        self._num_steps = num_steps
        self._display = display
        self._start = 0.0

    def add(self, scores: StepScores) -> None:
        if not self.steps:
            self._start = time.monotonic()
        seconds = time.monotonic() - self._start
        self.steps.append(DemoStep(float(np.nanmean(scores.rewards)), len(scores.uids), seconds))
        if len(self.steps) % _LINE_EVERY == 1:
            self._display.phase(f"training, reward {self.steps[-1].reward:.2f}")
        per_step = _GROUPS_PER_STEP * _GROUP_SIZE
        self._display.advance(len(self.steps) * per_step, self._num_steps * per_step)


def _arguments(steps: int, seed: int, out: Path, url: str) -> ScoringGRPOConfig:
    return ScoringGRPOConfig(
        output_dir=str(out / "trainer"),
        vllm_server_base_url=url,
        max_steps=steps,
        learning_rate=5e-3,
        gradient_accumulation_steps=1,
        token_budget=4096,
        groups_per_step=_GROUPS_PER_STEP,
        num_generations=_GROUP_SIZE,
        max_completion_length=_COMPLETION_TOKENS,
        max_inflight_tasks=_GROUPS_PER_STEP * _GROUP_SIZE,
        request_timeout=60,
        heartbeat_stale_after_s=60.0,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _completion(server: LoopbackServer, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the served policy answers to the first prompt."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "0"}], return_dict=False, add_generation_prompt=True
    )
    request = {
        "model": server.name,
        "prompt": prompt,
        "max_tokens": 4 * _COMPLETION_TOKENS,
        "temperature": 1.0,
        "seed": 0,
    }
    return str(tokenizer.decode(server.complete(request)["choices"][0]["token_ids"]))


def plot_curve(path: Path, report: DemoReport) -> None:
    """The reward over the steps, its moving mean, and the reward of the sentence itself."""
    rewards = np.array([step.reward for step in report.steps])
    x = np.arange(1, len(rewards) + 1)
    width = max(1, len(rewards) // 10)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(x, rewards, color=RAW, lw=1, label="each step")
    axes.plot(
        x[width - 1 :],
        np.convolve(rewards, np.full(width, 1 / width), "valid"),
        color=PACKED,
        lw=2,
        label=f"mean of {width} steps",
    )
    axes.axhline(report.of_the_text, color=LIMIT, lw=1.2, ls="--", label="the judge's own sentence")
    first, last = report.quarters
    axes.set(xlabel="optimizer step", ylabel="log-probability under the judge,\nnats a token")
    axes.set_title(f"Reward on the trainer: {first:.2f} in the first quarter, {last:.2f} in the last", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=DPI)
