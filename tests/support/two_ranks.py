"""The main of a file that torchrun starts on two ranks: checks by name, raising on the rank that finds them wrong."""

import sys
from datetime import timedelta

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import InitProcessGroupKwargs

from support.rank_checks import RANKS


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
