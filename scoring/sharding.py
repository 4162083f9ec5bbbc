"""Shard a scorer's frozen model over all ranks with FSDP2, which accelerate refuses to do without an optimizer."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from treepack.scoring.trainer import ScoringAccelerator


def shard_frozen(model: nn.Module, accelerator: ScoringAccelerator) -> None:
    """Shard `model` over all processes: each of its blocks, and the rest with the root.

    Its forward must then be called as a whole (`model(...)`), on every rank alike.

    Args:
        model: a transformers base model; the modules of its first `nn.ModuleList` are its blocks.
        accelerator: the trainer's.

    Raises:
        ValueError: the model has no list of blocks.
    """
    blocks = next((child for child in model.children() if isinstance(child, nn.ModuleList)), None)
    if blocks is None:
        raise ValueError(f"model must have its blocks in a ModuleList, got none in {type(model).__name__}")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def reshard(model: nn.Module) -> None:
    """Give the memory of gathered parameters back: without a backward, nothing else does after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
