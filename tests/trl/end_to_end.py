"""Runs that test_end_to_end.py starts, by name: python end_to_end.py FOLDER NAME..., or the same under torchrun."""

import math

import torch
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from support.fsdp_on_cpu import use_fsdp
from support.trl_end_to_end import (
    IS_MAIN,
    assert_on_policy,
    assert_served_is_trained,
    ebft,
    log_lines,
    reward_model,
    run_named,
    served_training,
    vllm_server,
)
from support.trl_rewards import lengths
from treepack import register_attention


def reward_function(folder):
    """A reward from the child alone, with its column and TRL's metrics; weights reach the server."""
    with served_training(folder, reward_funcs=[lengths]) as (trainer, server):
        trainer.train()
        assert_on_policy(trainer)
        assert_served_is_trained(trainer, server)
        assert trainer.model_version == 3
        for line in log_lines(trainer):
            assert line["rewards/lengths"] == line["reward"] > 0
            assert line["completions/mean_length"] <= 8
            assert line["batch/packing_ratio"] > 1.5
        assert trainer.rollout_worker._process is None, "the child has ended"
        # A prompt's group is asked for by four requests, some of groups that were under way at the end.
        assert server.num_requests["/v1/completions"] >= 32


def two_scorers(folder):
    """No reward function: a reward model and EBFT, whose references come from a dataset column."""
    seen = []
    with served_training(
        folder,
        scorers=[reward_model(), ebft()],
        on_rollouts_scored=[seen.append],
        config={"sample_columns": ["reference_ids"]},
    ) as (trainer, _):
        trainer.train()
        assert_on_policy(trainer)
        assert [scores.names for scores in seen] == [("reward_model", "ebft")] * 2
        assert all(scores.rewards.shape == (16, 2) for scores in seen)
        assert not any(torch.isnan(torch.from_numpy(scores.rewards)).any() for scores in seen)
        assert all(-1 <= line["ebft/alignment"] <= 1 for line in log_lines(trainer))


def adapter():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def lora(folder):
    """Adapters reach the server as folders, over HTTP, and requests name their version."""
    with served_training(folder, lora=8, scorers=[reward_model()], peft_config=adapter()) as (trainer, server):
        trainer.train()
        assert_on_policy(trainer)
        assert server.num_requests["/v1/load_lora_adapter"] == 3
        assert server.num_requests["/pause"] == server.num_requests["/resume"] == 3
        trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert all(parameter.abs().max() > 0 for parameter in trained)


def lora_on_vllm(folder):
    """The same against vLLM's own server; adapters need no NCCL between trainer and server."""
    with (
        vllm_server(folder / "policy") as url,
        served_training(
            folder, url=url, lora=8, scorers=[reward_model()], peft_config=adapter(), config={"max_inflight_tasks": 4}
        ) as (trainer, _),
    ):
        trainer.train()
        assert_on_policy(trainer, tolerance=1e-2)
        assert trainer.model_version == 3


def resume(folder):
    """Over a checkpoint and a resume every group is trained once; group g is made from prompt g."""
    first, second = [], []
    config = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    with served_training(folder, reward_funcs=[lengths], on_rollouts_scored=[first.append], config=config) as (
        trainer,
        _,
    ):
        trainer.train()
    with served_training(
        folder, reward_funcs=[lengths], on_rollouts_scored=[second.append], config={**config, "max_steps": 4}
    ) as (trainer, _):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        assert [line["step"] for line in log_lines(trainer)] == [1, 2, 3, 4]
        groups = [group for scores in (first[0], *second) for group in sorted(set(map(int, scores.groups)))]
        assert len(groups) == 16 == len(set(groups)), groups
        state = trainer.progress.state_dict()
        assert state["num_trained"] == 16
        assert not state["num_dropped"]
        # What is missing below the highest group was under way at the end.
        consumed = state["watermark"] + sum(stop - start for start, stop in state["consumed_past_watermark"])
        assert consumed == 16


def data_parallel(folder):
    """Two ranks: both scorers and a reward function, two rows a micro-batch, as one run."""
    seen = []
    with served_training(
        folder,
        reward_funcs=[lengths],
        scorers=[reward_model(), ebft()],
        on_rollouts_scored=[seen.append],
        config={"sample_columns": ["reference_ids"]},
    ) as (trainer, server):
        assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
        trainer.train()
        assert_on_policy(trainer)
        assert_served_is_trained(trainer, server)
        assert len(seen) == (2 if IS_MAIN else 0)
        for scores in seen:
            assert scores.names == ("lengths", "reward_model", "ebft")
            assert len(set(scores.uids.tolist())) == 16


def fully_sharded(folder):
    """FSDP2 over two ranks, with a sharded scorer too; the server gets whole weights."""
    use_fsdp()
    with served_training(
        folder,
        scorers=[reward_model(shard=True), ebft()],
        config={"sample_columns": ["reference_ids"]},
    ) as (trainer, server):
        assert trainer.accelerator.distributed_type == DistributedType.FSDP
        trainer.train()
        assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        assert_on_policy(trainer)
        assert_served_is_trained(trainer, server)
        assert not IS_MAIN or all(not math.isnan(line["reward"]) for line in log_lines(trainer))


if __name__ == "__main__":
    register_attention()
    run_named((reward_function, two_scorers, lora, lora_on_vllm, resume, data_parallel, fully_sharded))
