"""Training end to end with real parts: a served model, TRL's spawned rollout child, the trainer. For scripts."""

import logging
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, Qwen3Config

from support.trl_training import leave_ranks, reset_accelerate
from support.trl_training import settings as training_settings
from treepack import EBFTScorer, RewardModelScorer
from treepack.scoring.loopback_server import LoopbackServer, LoopbackWeightTransfer
from treepack.scoring.train_demo_model import byte_tokenizer, make_prompts, save_policy, tiny_model
from treepack.scoring.trl_hooks import ScoringGRPOConfig, ScoringGRPOTrainer
from treepack.scoring.trl_layout import trainer_module

IS_MAIN = os.environ.get("RANK", "0") == "0"


def settings(folder, url, **more):
    """Arguments of a short run: steps of four groups of four, a log line each."""
    served = {
        "vllm_server_base_url": url,
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "token_budget": 1024,
        "groups_per_step": 4,
        "max_completion_length": 8,
        "max_inflight_tasks": 8,
        "max_staleness": 4,
        "request_timeout": 60,
        "heartbeat_stale_after_s": 60.0,
        "learning_rate": 5e-3,
    }
    return training_settings(folder, **{**served, **more})


def dataset():
    """Prompts with a reference answer each, as token ids."""
    prompts = make_prompts(16)
    tokenizer = byte_tokenizer()
    return prompts.add_column("reference_ids", [tokenizer.encode(f"answer {i}") for i in range(len(prompts))])


def reward_model(**options):
    torch.manual_seed(3)
    config = Qwen3Config.from_dict(tiny_model(byte_tokenizer(), seed=0).config.to_dict())
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="treepack")
    return RewardModelScorer(model, token_budget=512, **options)


def ebft(**options):
    return EBFTScorer(tiny_model(byte_tokenizer(), seed=4, attention="treepack"), token_budget=512, **options)


@contextmanager
def served_training(folder, *, url=None, lora=None, config=None, **arguments):
    """A trainer and, on the main process, the server that it talks to: (trainer, server), not trained yet.

    Args:
        folder: holds the checkpoint "policy" and gets the output.
        url: of a server that runs already, which is used instead of one of ours.
        lora: the server's `max_lora_rank`; weights then travel as adapters, over HTTP.
        config: more arguments of the config.
        arguments: more of the trainer's.
    """
    reset_accelerate()
    policy = folder / "policy"
    own = LoopbackServer(tiny_model(byte_tokenizer(), seed=0), name=str(policy), max_lora_rank=lora)
    with own if IS_MAIN and url is None else nullcontext() as server:
        trainer = ScoringGRPOTrainer(
            model=str(policy),
            args=ScoringGRPOConfig(**settings(folder, url or own.url, **(config or {}))),
            train_dataset=dataset(),
            weight_transfer=None if lora else LoopbackWeightTransfer(own),
            **arguments,
        )
        yield trainer, server


@contextmanager
def vllm_server(policy, *, port=8765, patience_s=300):
    """vLLM's own server of a policy, with adapters that are loaded while it runs; gives its URL."""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    lora = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "8"]
    process = subprocess.Popen(["vllm", "serve", str(policy), *options, *lora], env=environment)
    try:
        trainer_module.VLLMClient(f"http://127.0.0.1:{port}", patience_s).wait_for_server_ready()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def prepare(folder):
    """Write the policy that the trainer loads."""
    save_policy(folder / "policy", seed=0)


def log_lines(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_on_policy(trainer, tolerance=1e-5):
    """The first step's samples come from the very weights that are trained: importance ratios are 1."""
    first = log_lines(trainer)[0]
    assert abs(first["ratio"] - 1) < tolerance, first
    assert abs(first["kl"]) < tolerance, first


def assert_served_is_trained(trainer, server):
    """The last weight sync has brought the policy to the server; a collective under FSDP2."""
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if server is not None:
            torch.testing.assert_close(server._model.get_parameter(name).detach(), value.detach())


def run_named(runs):
    """The body of a script that is started as `python SCRIPT FOLDER NAME...`: call those of `runs`, in this order."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    named = {run.__name__: run for run in runs}
    folder, *names = sys.argv[1:]
    for name in names:
        named[name](Path(folder))
        print(f"{name}: rank {0 if IS_MAIN else 1} ok", flush=True)
    leave_ranks()
