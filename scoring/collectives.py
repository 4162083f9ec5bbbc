"""The collectives of scoring, over whatever engine the trainer's accelerator runs on."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treepack.scoring.trainer import ScoringAccelerator

logger = logging.getLogger(__name__)


def gather_rows(accelerator: ScoringAccelerator, rows: torch.Tensor, what: str = "rows") -> torch.Tensor:
    """All processes' rows, in order of rank, on the CPU of each.

    Args:
        accelerator: the trainer's.
        rows: (n, ...), n differing between processes.
        what: what they are, for the message.

    Returns:
        (sum of n, ...), on the CPU.

    Raises:
        ValueError: the processes' rows differ in shape; raised on all of them.
    """
    if accelerator.num_processes == 1:
        return rows.cpu()
    shape = torch.tensor([rows.shape], dtype=torch.int64, device=accelerator.device)
    shapes = accelerator.gather(shape).tolist()
    if len({tuple(of_rank[1:]) for of_rank in shapes}) != 1:
        raise ValueError(f"{what} must have one shape on all ranks after dim 0, got {shapes} by rank")
    longest = max(of_rank[0] for of_rank in shapes)
    if longest == 0:
        return rows.cpu()
    padded = torch.zeros((longest, *rows.shape[1:]), dtype=rows.dtype, device=accelerator.device)
    padded[: len(rows)] = rows
    gathered = accelerator.gather(padded).cpu().view(len(shapes), *padded.shape)
    return torch.cat([of_rank[: sizes[0]] for of_rank, sizes in zip(gathered, shapes, strict=True)])


@contextmanager
def raised_on_all_ranks(accelerator: ScoringAccelerator, doing: str) -> Iterator[None]:
    """Make an error inside the block one on every rank, instead of a wait for the rank that has it.

    The block must run no collective of its own (see `exit_on_error`). The rank that failed raises its own error, the
    others a RuntimeError with its message.

    Args:
        accelerator: the trainer's.
        doing: what the block does, for the message.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if accelerator.num_processes == 1:
        if error is not None:
            raise error
        return
    failed = torch.tensor([error is not None], dtype=torch.int64, device=accelerator.device)
    ranks = accelerator.gather(failed).nonzero().flatten().tolist()
    if not ranks:
        return
    text = b"" if error is None else f"{type(error).__name__}: {error}\0".encode()
    messages = bytes(gather_rows(accelerator, torch.tensor(list(text), dtype=torch.uint8)).tolist())
    if error is not None:
        raise error
    first = messages.decode().split("\0")[0]
    raise RuntimeError(f"rank {ranks[0]} failed while {doing}: {first}")


@contextmanager
def exit_on_error(accelerator: ScoringAccelerator, doing: str) -> Iterator[None]:
    """End this process if the block fails, for blocks that run collectives of their own (a sharded forward).

    The other ranks then sit in that collective, where no error can reach them: the launcher, or the process group's
    timeout, ends them once this process is gone.
    """
    try:
        yield
    except Exception:
        if accelerator.num_processes == 1:
            raise
        logger.exception("failed while %s: this process ends, since its peers wait in a collective", doing)
        logging.shutdown()
        os._exit(1)
