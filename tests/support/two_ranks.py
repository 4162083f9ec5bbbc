"""What the files that torchrun starts on two ranks share: checks by name, raising on the rank that finds them wrong."""

import sys
from datetime import timedelta

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import InitProcessGroupKwargs

from treepack.scoring.trainer import LocalTrainer, ScoringArgs

RANKS = 2


def own_slice(value, rank):
    """What the dispatcher gives to `rank`: nested dicts of tensors, cut in dim 0."""
    if isinstance(value, dict):
        return {key: own_slice(entry, rank) for key, entry in value.items()}
    return value[rank : rank + 1].clone()


def trainer_with(accelerator, scorers, model=None, **args):
    return LocalTrainer(model or torch.nn.Identity(), scorers, ScoringArgs(**args), accelerator)


def run_checks(checks):
    """Run the checks (functions of the accelerator, by name) that the command line names, on this rank."""
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))],
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True),  # as TRL's trainer has it
    )
    assert accelerator.num_processes == RANKS
    for name in sys.argv[1:]:
        checks[name](accelerator)
        print(f"{name}: rank {accelerator.process_index} ok", flush=True)
    accelerator.end_training()
