"""What every rank of test_loss.py runs under torchrun: TRL's loss on two ranks, sharded and not."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from support.loss import ExactPolicy, gradient, trl_loss
from support.models import VOCAB_SIZE
from support.rank_checks import RANKS, own_slice, trainer_with
from support.removals import REMOVED, collated, dropped_before_packing
from support.two_ranks import run_checks
from treepack import register_attention, score_step
from treepack.scoring.trainer import LocalTrainer, ScoringArgs


def replicated(accelerator):
    model = accelerator.prepare(ExactPolicy())
    assert isinstance(model, DistributedDataParallel)
    return model


def sharded(accelerator):
    """FSDP2 on the torch level: accelerate would fall back to DDP on a CPU without a word."""
    model = ExactPolicy()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def masking_equals_dropping(accelerator):
    """Each rank trains its masked rows; the gradient is that of one process on rows packed without what was removed."""
    register_attention()
    args = {"mask_truncated_completions": True}
    scores = score_step(LocalTrainer(ExactPolicy(), [], ScoringArgs(**args)), collated(VOCAB_SIZE))
    assert {int(uid) for uid, reason in zip(scores.uids, scores.reasons, strict=True) if reason} == REMOVED
    _, want = gradient(ExactPolicy(), dropped_before_packing(VOCAB_SIZE, scores))
    for wrapped in (replicated, sharded):
        model = wrapped(accelerator)
        batches = [own_slice(batch, accelerator.process_index) for batch in collated(VOCAB_SIZE)]
        score_step(trainer_with(accelerator, [], model, **args), batches)
        for batch in batches:
            loss, _ = trl_loss(model, batch, len(batches), accelerator)
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(grad, DTensor) is (wrapped is sharded) for grad in gradients)
        whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
        got = torch.cat([grad.flatten() for grad in whole])
        assert got.dtype == torch.float64
        error = float((got - want).norm() / want.norm())
        assert error <= 1e-10, (wrapped.__name__, error)


if __name__ == "__main__":
    run_checks({"masking_equals_dropping": masking_equals_dropping})
