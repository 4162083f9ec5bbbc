"""What tests of the trainer share: a tiny policy on disk, rollouts in place of a server, no weight transfer."""

import queue
from itertools import count

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from treepack.scoring.train_demo_model import byte_tokenizer
from treepack.scoring.trl_hooks import ScoringGRPOConfig, ScoringGRPOTrainer
from treepack.scoring.trl_rollouts import ScoringSample

VOCAB_SIZE = 300
PROMPTS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": f"q{i}"}] for i in range(16)], "number": list(range(16))}
)


def save_policy(folder, model_type="qwen3", **settings):
    """A random model of two layers and its tokenizer, as a checkpoint folder."""
    tokenizer = byte_tokenizer()
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**shape, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)  # far from uniform
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class NoTransfer:
    """A weight transfer to nowhere."""

    def init_weight_transfer(self):
        pass

    def pause(self):
        pass

    def send_weights(self, iterator):
        for _ in iterator:
            pass

    def resume(self):
        pass

    def destroy(self):
        pass


class QueuedRollouts:
    """A rollout worker in the trainer's process: all rows are on the queue when it starts.

    Args:
        num_groups: groups queued.
        size: rows of each.
        rewards: gives a row's reward column, from the group's and the row's number.
        groups: group ids; by default 0, 1, ...
    """

    def __init__(self, num_groups, *, size=4, rewards=None, groups=None, seed=0, version=1, **fields):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.calls = []
        generator, uids = np.random.default_rng(seed), count()
        self.rows = []
        for group in range(num_groups):
            prompt = generator.integers(3, VOCAB_SIZE, generator.integers(4, 9))
            values = generator.normal(size=size) if rewards is None else [rewards(group, i) for i in range(size)]
            for i in range(size):
                completion = generator.integers(3, VOCAB_SIZE, generator.integers(2, 9))
                mask = np.r_[np.zeros(len(prompt)), np.ones(len(completion))].astype(np.int64)
                self.rows.append(
                    ScoringSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.r_[prompt, completion],
                        completion_mask=mask,
                        old_log_probs=np.where(mask, generator.normal(-5.7, 0.2, len(mask)), 0.0).astype(np.float32),
                        advantage=float("nan"),
                        model_version=version,
                        group_id=group if groups is None else groups[group],
                        metrics={},
                        uid=next(uids),
                        rollout_id=f"{group}-{i}",
                        group_size=size,
                        rewards={} if values[i] is None else {"solved": float(values[i])},
                        **{"finished": True, "columns": {}, **fields},
                    )
                )

    def start(self):
        self.calls.append("start")
        for row in self.rows:
            self.rollout_buffer.put(row)

    def stop(self):
        self.calls.append("stop")

    def update_model_version(self, version):
        self.calls.append(version)

    def check_health(self, stale_after_s):
        if self.rollout_buffer.empty():
            raise RuntimeError("the test's rollouts are used up")


def settings(folder, **more):
    """Arguments of a short run on a CPU: steps of two rows of 64 tokens, a log line each."""
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "token_budget": 64,
        "learning_rate": 1e-2,
        "max_staleness": 100,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        **more,
    }


def reset_accelerate():
    """Let the next trainer have an accelerator of its own, so that one process can hold many in turn."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def scoring_trainer(policy, folder, worker, *, trainer_class=ScoringGRPOTrainer, more=None, **arguments):
    """A trainer whose rollouts are `worker`'s; `more` are arguments of the config."""
    reset_accelerate()
    return trainer_class(
        model=policy,
        args=ScoringGRPOConfig(**settings(folder, **(more or {}))),
        train_dataset=PROMPTS,
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
        **arguments,
    )


def losses_of(trainer):
    """The logged losses, a step each."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def leave_ranks():
    """End this process's part in a job of several, which it must not do while another's traffic is under way."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
