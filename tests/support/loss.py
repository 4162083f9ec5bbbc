"""TRL's own compute_loss on micro-batches, and a policy on which it is exact in float64."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from support.models import tiny_model


class OneProcess:
    """accelerate's collectives on one process that stands for `num_processes` ranks, one after the other."""

    def __init__(self, num_processes):
        self.num_processes = num_processes

    def reduce(self, tensor, reduction):
        return tensor

    def gather(self, tensor):
        return tensor


class ExactPolicy(nn.Module):
    """A language model in float64, its head too, called as TRL calls its policy.

    `compute_loss` keeps float64, but TRL's fused head does not: `ChunkedLogProbFunction` holds log-probabilities and
    accumulates gradients in float32 whatever it is given. gpt2 has no float32 inside, unlike RMSNorm and rotary
    embeddings.
    """

    def __init__(self):
        super().__init__()
        self.model = tiny_model("gpt2", attn_implementation="tree_fa3").double()

    def forward(self, *, shift_labels, fused_lm_head, **inputs):
        assert fused_lm_head
        log_probs = self.model(**inputs, use_cache=False).logits.log_softmax(-1)
        of_labels = log_probs.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return FusedCausalLMOutput(
            log_probs=of_labels.masked_fill(shift_labels < 0, 0.0),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
        )


def trl_loss(model, inputs, grad_accumulation, accelerator):
    """TRL's loss of one rank's slice of a micro-batch, and the metrics it logs."""
    trainer = SimpleNamespace(
        accelerator=accelerator,
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=grad_accumulation,
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )
    return AsyncGRPOTrainer.compute_loss(trainer, model, inputs), trainer._metrics["train"]


def loss_over_ranks(model, batch, grad_accumulation):
    """The mean of the ranks' losses of a whole micro-batch, in this process, and the metrics of all."""
    ranks = len(batch["token_index"])
    rows = [{key: tensor[r : r + 1] for key, tensor in batch.items()} for r in range(ranks)]
    results = [trl_loss(model, row, grad_accumulation, OneProcess(ranks)) for row in rows]
    metrics = {name: [value for _, of_row in results for value in of_row[name]] for name in results[0][1]}
    return sum(loss for loss, _ in results) / ranks, metrics


def gradient(model, batches):
    """Loss and gradient of a step whose ranks this process stands for."""
    model.zero_grad()
    loss = sum(loss_over_ranks(model, batch, len(batches))[0] for batch in batches)
    loss.backward()
    return loss.item(), flat_gradient(model)


def flat_gradient(model):
    """The gradients of all parameters, laid end to end."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
