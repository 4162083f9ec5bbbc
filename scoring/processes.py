"""The processes of one job on CPUs: started by torchrun and joined by gloo, or this one alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from treepack.scoring.trainer import LocalAccelerator, ScoringAccelerator


@dataclass(frozen=True)
class GlooAccelerator:
    """What scoring uses of an accelerator, over the default process group."""

    num_processes: int
    process_index: int

    @property
    def device(self) -> torch.device:
        """Where gloo's tensors are."""
        return torch.device("cpu")

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and tells people."""
        return self.process_index == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """No autocast."""
        return nullcontext()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The processes' tensors, of one shape, laid end to end in dim 0."""
        gathered = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.cat(gathered)


@contextmanager
def joined_processes() -> Iterator[ScoringAccelerator]:
    """The accelerator of this process among those that torchrun started, or of this process alone."""
    if not dist.is_torchelastic_launched():
        yield LocalAccelerator()
        return
    dist.init_process_group("gloo")
    try:
        yield GlooAccelerator(dist.get_world_size(), dist.get_rank())
    finally:
        dist.destroy_process_group()


def own_ranks(batch: dict[str, Any], accelerator: ScoringAccelerator) -> dict[str, Any]:
    """The rows of a collated micro-batch that this process scores.

    With P processes, process p holds ranks p, p + P, p + 2P, ...; the tensors are views of the batch's.
    """
    return {
        key: own_ranks(value, accelerator)
        if isinstance(value, dict)
        else value[accelerator.process_index :: accelerator.num_processes]
        for key, value in batch.items()
    }
