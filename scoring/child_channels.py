"""What a parent and its child use to talk, where the child may be killed at any moment."""

import queue
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Queue = Queue[Any]
else:
    _Queue = Queue  # generic in its stub alone


class ChildQueue(_Queue):
    """A queue whose reader does not hang when its writer was killed in the middle of an item.

    An item larger than a pipe's buffer is written in parts. If the writer dies between two of them, `get` waits for the
    rest whatever its timeout, as long as any process holds the writing end: the reader itself does. Once it has called
    `close_writing_end`, `get` raises `queue.Empty` instead.

    Args:
        maxsize: items, or 0 for no bound.
        ctx: the context that starts the child.
    """

    def __init__(self, maxsize: int, *, ctx: BaseContext) -> None:
        super().__init__(maxsize, ctx=ctx)

    def close_writing_end(self) -> None:
        """In the parent, once the child has started: nothing is put from here."""
        self._writer.close()  # type: ignore[attr-defined]

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See `queue.Queue.get`."""
        try:
            return super().get(block, timeout)
        except (EOFError, OSError):  # the end of the pipe, between two items or within one
            raise queue.Empty from None


class StopSignal:
    """What TRL's worker needs of `multiprocessing.Event`, without its wait for whoever is woken.

    `multiprocessing.Event.set` waits until each process that waits for the event has answered, also one that died.
    """

    def __init__(self, ctx: BaseContext) -> None:
        self._reader, self._writer = ctx.Pipe(duplex=False)

    def set(self) -> None:
        """In the parent, once: tell the child to stop."""
        self._writer.send_bytes(b"stop")

    def wait(self) -> None:
        """In the child: return once it is to stop."""
        self._reader.poll(None)
