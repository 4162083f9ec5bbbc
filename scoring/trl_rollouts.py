"""Rollouts for scorers on the trainer: TRL's rollout worker, whose child leaves advantages to the trainer.

The worker lives in the trainer's process and starts a child; the loop runs in the child, talks HTTP to the server,
calls the reward functions and puts rows on the queue. Neither touches a GPU or needs the vLLM package.
"""

import asyncio
import json
import logging
import math
import multiprocessing
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import count
from numbers import Real
from typing import Any

from treepack.scoring.child_channels import ChildQueue, StopSignal
from treepack.scoring.progress import IdRanges
from treepack.scoring.queue import GroupShrunk
from treepack.scoring.trl_layout import (
    AsyncRolloutLoop,
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    worker_module,
)

logger = logging.getLogger(__name__)

REPORT_S = 5.0
"""How long the parent waits for a failed child's own words, in seconds."""

METRICS_MAXSIZE = 4096
"""Metrics that wait for the trainer at most, as in TRL's worker; the child drops what is more."""

FULL_QUEUE_POLL_S = 0.1
"""How often a child that is held back by a full queue looks for room, in seconds."""

RewardFunction = Callable[..., Any]


class RolloutFailedError(RuntimeError):
    """A conversation that could not be generated or scored; the message says why."""


@dataclass(slots=True, kw_only=True)
class ScoringSample(RolloutSample):  # type: ignore[misc]
    """A row on the rollout queue: TRL's sample with its advantage pending (NaN), and what scoring needs.

    Attributes:
        uid: int >= 0, rising in the order in which rows are queued.
        rollout_id: the conversation; a fork gives one several rows.
        group_size: rows of the group, forks counted.
        rewards: {reward function: its reward, NaN = not applicable}.
        finished: whether the conversation ended on a stop token.
        columns: {dataset column: its value}, those the worker was asked to carry.
    """

    uid: int
    rollout_id: str
    group_size: int
    rewards: dict[str, float]
    finished: bool
    columns: dict[str, Any]


class ScoringRolloutLoop(AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's generate and score loops, run in the child; see `ScoringRolloutWorker` for what differs."""

    def __init__(
        self,
        *,
        reward_funcs: Sequence[RewardFunction],
        sample_columns: Sequence[str] = (),
        vocab_size: int | None = None,
        max_attempts: int,
        max_failures: int,
        consumed: Sequence[tuple[int, int]] = (),
        dataset_start_index: int = 0,
        **loop_kwargs: Any,
    ) -> None:
        # TRL wants a reward from somewhere; trainer-side scorers are such a place, and it cannot know them.
        checked = [_checked(function) for function in reward_funcs] or [_scored_on_the_trainer]
        super().__init__(reward_funcs=checked, dataset_start_index=dataset_start_index, **loop_kwargs)
        self._first_group = dataset_start_index
        self._consumed = IdRanges(consumed)
        self._sample_columns = tuple(sample_columns)
        self._vocab_size = vocab_size
        self._max_attempts = max_attempts
        self._max_failures = max_failures
        self._failures_in_a_row = 0
        self._uids = count()

    def run(self) -> None:
        """Run until stopped; end with the parent, and without waiting for a reader of the queues."""
        threading.Thread(target=_end_with_parent, daemon=True, name="treepack-parent-watcher").start()
        for outgoing in (self.rollout_buffer, self._metrics_queue):
            outgoing.cancel_join_thread()  # else rows that no trainer reads any more would keep the child alive
        try:
            super().run()
        except BaseException:
            self._loop.set_exception_handler(lambda *_: None)  # tasks it leaves behind end with the process
            raise

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """TRL's prompts under group ids that go on across resumes, without the groups that were consumed."""
        for index, row in super()._repeat_iterator():
            group_id = self._first_group + index
            if group_id not in self._consumed:
                yield group_id, row

    async def _retry(self, coro_factory: Callable[[], Awaitable[Any]], *, label: str, max_attempts: int = 1) -> Any:
        return await super()._retry(coro_factory, label=label, max_attempts=min(max_attempts, self._max_attempts))

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        """TRL's request; refuse an answer the loss could not use, where its cause is still known."""
        where = f"{self.vllm_server_url}/v1/completions"
        try:
            token_ids, log_probs = await super()._generate_one_turn(prompt_ids)
        except TimeoutError as error:
            raise RolloutFailedError(
                f"{where} gave no answer within request_timeout {self.request_timeout} s"
            ) from error
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise RolloutFailedError(
                f"{where} must answer with choices[0].token_ids and .logprobs.token_logprobs, got an answer that gives "
                f"{type(error).__name__}: {error}"
            ) from error
        if not _are_integers(token_ids):
            raise RolloutFailedError(f"token_ids of {where} must be a list of integers, got {_short(token_ids)}")
        size = self._vocab_size
        if unknown := [token for token in token_ids if token < 0 or (size is not None and token >= size)]:
            raise RolloutFailedError(
                f"token_ids of {where} must be in the policy's vocabulary, [0, {size or '...'}), got {_short(unknown)}"
            )
        if not _are_finite(log_probs) or len(log_probs) != len(token_ids):
            raise RolloutFailedError(
                f"token_logprobs of {where} must be {len(token_ids)} finite numbers, one a token, got "
                f"{_short(log_probs)}"
            )
        return token_ids, log_probs

    async def _generate_one(
        self, prompt: Any, tool_dict: dict[str, Any], tools: list[Any], group_id: int = 0
    ) -> tuple[list[Any], list[int], list[Any], int, int, float | None]:
        """TRL's conversation, or an empty one where it failed, unless too many in a row did."""
        try:
            conversation: tuple[list[Any], list[int], list[Any], int, int, float | None]
            conversation = await super()._generate_one(prompt, tool_dict, tools, group_id)
        except Exception as error:
            self._failures_in_a_row += 1
            self._counters["rollout/failed_generations_total"] += 1
            cause = str(error) if isinstance(error, RolloutFailedError) else f"{type(error).__name__}: {error}"
            if self._failures_in_a_row >= self._max_failures:
                raise RolloutFailedError(
                    f"{self._failures_in_a_row} generations failed in a row, the last: {cause}"
                ) from error
            logger.warning("a generation of group %d failed, its group shrinks: %s", group_id, cause)
            return [], [], [], 0, 0, None
        self._failures_in_a_row = 0
        return conversation

    async def _score_group(self, group: RolloutGroup) -> list[ScoringSample]:
        """TRL's rows of the conversations that did not fail; tell the queue where they are fewer than planned."""
        group = _without_failed(group)
        samples: list[ScoringSample] = []
        if any(group.completions_sequences):
            rows = iter(await super()._score_group(group))
            size = sum(map(len, group.completions_sequences))
            samples = [
                self._pending(next(rows), group, conversation, sequence.rollout_id, size)
                for conversation, sequences in enumerate(group.completions_sequences)
                for sequence in sequences
            ]
        if len({sample.rollout_id for sample in samples}) < self.num_generations:
            await self._announce(GroupShrunk(group.group_id, len(samples)))
        return samples

    def _pending(
        self, row: RolloutSample, group: RolloutGroup, conversation: int, rollout_id: str, group_size: int
    ) -> ScoringSample:
        """TRL's row of one conversation, with its advantage left open."""
        inherited = {field.name: getattr(row, field.name) for field in fields(row)}
        metrics = {name: value for name, value in row.metrics.items() if not name.startswith("reward")}
        names = [name for name in self.reward_func_names if name != _scored_on_the_trainer.__name__]
        stops = (*self.eos_token_ids, self.tokenizer.pad_token_id)  # as TRL's completions/clipped_ratio has it
        completion_ids = group.completions_ids[conversation]
        return ScoringSample(
            # TRL's log_completions prints metrics["reward"]; NaN keeps it out of the trainer's means.
            **inherited | {"advantage": math.nan, "metrics": {**metrics, "reward": math.nan}},
            uid=next(self._uids),
            rollout_id=rollout_id,
            group_size=group_size,
            rewards={name: row.metrics[f"rewards/{name}"] for name in names},
            finished=bool(completion_ids) and completion_ids[-1] in stops,
            columns={name: group.reward_kwargs[name][conversation] for name in self._sample_columns},
        )

    async def _announce(self, shrunk: GroupShrunk) -> None:
        while not self._stop_event.is_set():
            try:
                self.rollout_buffer.put_nowait(shrunk)
                return
            except queue.Full:
                await asyncio.sleep(FULL_QUEUE_POLL_S)


class ScoringRolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """TRL's rollout worker for a trainer that scores.

    Rows come as `ScoringSample`s with their advantage pending. What differs from TRL's worker:
      - Reward functions may be left out: scorers on the trainer are a source of rewards too.
      - A generation that fails (the server refuses, times out, or answers without finite log-probabilities or with
        tokens that the policy does not know) shrinks its group instead of ending the run: a `GroupShrunk` precedes
        the group's rows. So does a conversation without a trained token. `max_failures` failures in a row end the run,
        with the last cause.
      - Group ids go on across resumes: group g is made from prompt g modulo the dataset's length, and groups that
        `skip_consumed` named are not generated again.
      - What a reward function returns is checked, and an error names the function.
      - `check_health` tells at once that the child is gone, and nothing waits for a child that was killed, wherever
        that met it. The child ends with its parent, however that ends.

    Args:
        sample_columns: dataset columns that scorers read, carried to `ScoringSample.columns`.
        vocab_size: of the policy; None takes any token id from 0 on.
        max_attempts: TRL tries a request 3 times in each of 30 rounds, with waits that double from 1 to 16 s; both
            numbers are cut to this one.
        max_failures: generations that may fail in a row, over all groups.
        loop_kwargs: the arguments of TRL's `AsyncRolloutWorker`.

    Raises:
        ValueError: two reward functions have one name, a number is below 1, or the dataset lacks a column.
        ImportError: aiohttp is not installed.

    Source: `trl.experimental.async_grpo.AsyncRolloutWorker` (TRL 1.16).
    """

    _loop_cls = ScoringRolloutLoop

    def __init__(
        self,
        *,
        reward_funcs: Sequence[RewardFunction] = (),
        sample_columns: Sequence[str] = (),
        vocab_size: int | None = None,
        max_attempts: int = 30,
        max_failures: int = 64,
        **loop_kwargs: Any,
    ) -> None:
        for name, value in (("max_attempts", max_attempts), ("max_failures", max_failures)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        names = [worker_module.get_callable_name(function) for function in reward_funcs]
        if len(set(names)) < len(names):
            raise ValueError(f"reward_funcs must have names of their own, got {names}")
        known = loop_kwargs["dataset"].column_names
        if known is not None and (missing := [name for name in sample_columns if name not in known]):
            raise ValueError(f"sample_columns must be columns of the dataset, {known}, got {missing}")
        with _without_vllm():
            super().__init__(
                reward_funcs=list(reward_funcs),
                sample_columns=tuple(sample_columns),
                vocab_size=vocab_size,
                max_attempts=max_attempts,
                max_failures=max_failures,
                **loop_kwargs,
            )
        self.rollout_buffer = ChildQueue(self._loop_kwargs["queue_maxsize"], ctx=self._mp_ctx)
        self.metrics_queue = ChildQueue(METRICS_MAXSIZE, ctx=self._mp_ctx)
        self._stop_event_mp = StopSignal(self._mp_ctx)
        self._skipped: tuple[int, tuple[int, ...]] | None = None
        self._failure: RuntimeError | None = None

    def skip_consumed(self, watermark: int, past_watermark: Sequence[int] = ()) -> None:
        """Generate no group below `watermark` and none of `past_watermark`; call it before `start`.

        See `GroupProgress.watermark` and `GroupProgress.consumed_past_watermark`.
        """
        self._skipped = (watermark, tuple(past_watermark))

    def start(self) -> None:
        """Start the child and wait until it is ready."""
        if self._skipped is not None:
            watermark, past_watermark = self._skipped
            # A stream cannot be entered in the middle: there all consumed prompts are drawn and left out.
            streamed = not isinstance(self._loop_kwargs["dataset"], worker_module.Dataset)
            self._loop_kwargs["dataset_start_index"] = 0 if streamed else watermark
            self._loop_kwargs["consumed"] = [(0, watermark), *((group, group + 1) for group in past_watermark)]
        super().start()
        self.rollout_buffer.close_writing_end()
        self.metrics_queue.close_writing_end()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the child does not run, failed, is gone, or gave no sign of life for `stale_after_s` seconds.

        Raises:
            RuntimeError: with the child's own error in the message, where it could still tell.
        """
        if self._process is None:
            raise RuntimeError(
                "the rollout child does not run: TRL's trainer starts its worker in the first train() alone"
            )
        is_gone = not self._process.is_alive()
        if self._failure is None and (is_gone or self._failed_event.is_set()):
            self._failure = self._await_report()
        if self._failure is not None:
            raise self._failure
        super().check_health(stale_after_s)

    def _await_report(self) -> RuntimeError:
        """Why the child failed: its own words travel through a queue and may come after the sign that it failed."""
        try:
            name, message, trace = self._exception_info_queue.get(timeout=REPORT_S)
        except queue.Empty:
            return RuntimeError(f"the rollout child is gone without a word, exit code {self._process.exitcode}")
        failure = RuntimeError(f"the rollout child failed: {name}: {message}")
        failure.__cause__ = RuntimeError(trace)
        return failure


def _end_with_parent() -> None:
    """End this process when its parent is gone, killed perhaps: nobody reads its rows, and nothing is left to save."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _without_vllm() -> Iterator[None]:
    """TRL's worker asks for the vLLM package, of which it uses nothing: it talks HTTP."""
    asked = worker_module.is_vllm_available
    worker_module.is_vllm_available = lambda: True
    try:
        yield
    finally:
        worker_module.is_vllm_available = asked


def _without_failed(group: RolloutGroup) -> RolloutGroup:
    """The group without the conversations that have no message: those that `_generate_one` gave up."""
    kept = [index for index, completion in enumerate(group.completions) if completion]

    def keep(value: Any) -> Any:  # every list of a group has an entry a conversation, or none at all
        if isinstance(value, Mapping):
            return {name: keep(column) for name, column in value.items()}
        return [value[index] for index in kept] if isinstance(value, list) and value else value

    return replace(group, **{field.name: keep(getattr(group, field.name)) for field in fields(group)})


def _scored_on_the_trainer(completions: Sequence[Any], **_: Any) -> list[None]:
    """The reward function of a run without one: it applies to nothing, and its column is left out."""
    return [None] * len(completions)


def _checked(function: RewardFunction) -> RewardFunction:
    """The reward function under its own name, with errors that give it."""
    name = worker_module.get_callable_name(function)

    async def checked(*, completions: Sequence[Any], **kwargs: Any) -> list[Any]:
        try:
            if worker_module.is_async_callable(function):
                rewards = await function(completions=completions, **kwargs)
            else:
                rewards = await asyncio.to_thread(function, completions=completions, **kwargs)
            numbers = [None if reward is None else float(reward) for reward in rewards]
        except Exception as error:
            raise RolloutFailedError(f"reward function {name!r} failed with {type(error).__name__}: {error}") from error
        if len(numbers) != len(completions):
            raise RolloutFailedError(
                f"reward function {name!r} must return a reward for each of {len(completions)} completions, got "
                f"{len(numbers)}"
            )
        if any(number is not None and math.isinf(number) for number in numbers):
            raise RolloutFailedError(
                f"reward function {name!r} must return finite numbers, NaN or None, got {_short(numbers)}"
            )
        return numbers

    checked.__name__ = name
    return checked


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) for value in values)


def _are_finite(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, Real) and math.isfinite(value) for value in values)


def _short(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= 80 else f"{text[:77]}..."
