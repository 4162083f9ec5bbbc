"""The rollout loop in this process, on real queues, against a loopback server: all of a child but the process."""

import asyncio
import gc
import multiprocessing
import queue
import sys
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

from accelerate.state import PartialState
from datasets import Dataset

from treepack.scoring.loopback_server import LoopbackServer
from treepack.scoring.queue import GroupShrunk
from treepack.scoring.train_demo_model import byte_tokenizer, tiny_model
from treepack.scoring.trl_rollouts import ScoringRolloutLoop

NAME = "toy"
PATIENCE_S = 60


def prompts(count=16, **columns):
    """A dataset of `count` prompts."""
    asked = [[{"role": "user", "content": f"q{i}"}] for i in range(count)]
    return Dataset.from_dict({"prompt": asked, **columns})


def toy_server(server_class=LoopbackServer, seed=0, **options):
    """A server of a tiny model."""
    tokenizer = byte_tokenizer()
    return server_class(tiny_model(tokenizer, seed=seed), name=NAME, **options)


def loop_options(url, **options):
    """What TRL's trainer would pass to the worker, small."""
    tokenizer = byte_tokenizer()
    defaults = {
        "model_name": NAME,
        "dataset": prompts(),
        "reward_funcs": [],
        "processing_class": tokenizer,
        "eos_token_ids": [tokenizer.eos_token_id],
        "vocab_size": len(tokenizer),
        "num_generations": 4,
        "max_inflight_tasks": 8,
        "vllm_server_url": url,
        "max_tokens": 6,
        "request_timeout": 20,
        "max_attempts": 1,
        "max_failures": 8,
    }
    return defaults | options


class LoopRun:
    """A running loop and what it has put on its queue."""

    def __init__(self, url, *, queue_maxsize=0, **options):
        PartialState()  # TRL logs through accelerate
        context = multiprocessing.get_context("spawn")
        self.rows = context.Queue(maxsize=queue_maxsize)
        self.failed = context.Event()
        self.report = context.Queue(maxsize=1)
        self.metrics = context.Queue()
        self.version = SimpleNamespace(value=0)
        self.loop = ScoringRolloutLoop(
            **loop_options(url, **options),
            rollout_buffer=self.rows,
            model_version_value=self.version,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=self.failed,
            exception_info_queue=self.report,
            metrics_queue=self.metrics,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error = None

    def _run(self):
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def start(self):
        self._thread.start()

    def stop(self):
        if self._thread.is_alive():
            self.loop._loop.call_soon_threadsafe(self.loop._stop_event.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the loop does not stop"
        if self.error is not None:
            self._let_go()

    def _let_go(self):
        """Of requests under way when the loop failed: a child takes them along, here they would warn later."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            for task in asyncio.all_tasks(self.loop._loop):
                with suppress(RuntimeError):  # the event loop is closed, which TRL's clean-up does not expect
                    task.get_coro().close()
            gc.collect()
        finally:
            sys.unraisablehook = hook

    def discard(self):
        """Let go of a loop that was never started."""
        self.loop._loop.close()

    def wait_for_error(self):
        """The loop's error, once it has ended by one."""
        self._thread.join(PATIENCE_S)
        assert self.error is not None, "the loop goes on"
        return self.error

    def take(self, count):
        """The next `count` items of the queue."""
        return [self.rows.get(timeout=PATIENCE_S) for _ in range(count)]

    def take_groups(self, count):
        """The next `count` groups as {group id: rows}, and all `GroupShrunk`s on the way by group id."""
        groups, shrunk, complete = {}, {}, 0
        while complete < count:
            item = self.rows.get(timeout=PATIENCE_S)
            if isinstance(item, GroupShrunk):
                shrunk[item.group_id] = item.group_size
                complete += item.group_size == 0
                continue
            rows = groups.setdefault(item.group_id, [])
            rows.append(item)
            complete += len(rows) == item.group_size
        return groups, shrunk

    def metric_total(self, name, patience_s=10):
        """The first value of a metric that is counted."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                values = self.metrics.get(timeout=1)
            except queue.Empty:
                continue
            if name in values:
                return values[name]
        raise AssertionError(f"no metric {name}")


@contextmanager
def running(url, **options):
    """A `LoopRun` that is stopped at the end."""
    run = LoopRun(url, **options)
    run.start()
    try:
        yield run
    finally:
        run.stop()
