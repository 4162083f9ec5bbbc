"""How the commands of `treepack` end: exit codes, and errors in one line."""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import typer

from treepack.scoring.errors import InputError, OptionError


class ExitCode(IntEnum):
    """The command's exit codes, as `--help` documents them."""

    FAILED = 1
    BAD_INPUT = 2
    NOTHING_TO_SCORE = 3
    DIFFERENT = 4
    INTERRUPTED = 130


def is_helper() -> bool:
    """Whether this is a process of torchrun's other than the first, which alone talks to people."""
    return os.environ.get("RANK", "0") != "0"


def fail(message: str, code: ExitCode) -> NoReturn:
    """End the command with a line on stderr and an exit code."""
    where = f"process {os.environ['RANK']}: " if is_helper() else ""
    typer.echo(f"error: {where}{message}", err=True)
    raise typer.Exit(code)


def require_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        OptionError: it is a folder, its folder is missing, or one of them is not writable.
    """
    problem = None
    if path.is_dir():
        problem = errno.EISDIR
    elif not path.parent.is_dir():
        problem = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = errno.EACCES
    if problem is not None:
        raise OptionError(f"{option} {path}: cannot be written: {os.strerror(problem)}")


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """Turn what goes wrong into a line on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", ExitCode.INTERRUPTED)
    except InputError as error:
        fail(_one_line(error), ExitCode.BAD_INPUT)
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        fail(f"{type(error).__name__}: {_one_line(error)} (--traceback shows where)", ExitCode.FAILED)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
