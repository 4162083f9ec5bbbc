"""ScoringGRPOTrainer: TRL's AsyncGRPOTrainer with treepack's attention, packing, planning and trainer-side scoring."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from treepack.kernels.hf_attention import ATTENTION_NAMES, register_attention
from treepack.kernels.hybrid import hybrid_support, outermost_pretrained
from treepack.kernels.tree_support import check_tree_support
from treepack.scoring.collator import ScoringCollator
from treepack.scoring.collectives import raised_on_all_ranks
from treepack.scoring.planner import StepPlanner, check_step_capacity
from treepack.scoring.progress import GroupProgress
from treepack.scoring.queue import GroupedQueue
from treepack.scoring.queue_dataset import QueueDataset
from treepack.scoring.recorder import RecordSettings, StepRecorder
from treepack.scoring.scorer import TrainerScorer
from treepack.scoring.step import StepScores, score_step
from treepack.scoring.token_cost import token_cost
from treepack.scoring.trl_config import ScoringGRPOConfig
from treepack.scoring.trl_init import adapted_construction, uncountable_flops_are_nan
from treepack.scoring.trl_layout import AsyncGRPOTrainer, worker_module
from treepack.scoring.trl_rollouts import ScoringRolloutWorker

__all__ = ["PROGRESS_FILE", "ScoringGRPOConfig", "ScoringGRPOTrainer", "ScoringRolloutWorker"]

PROGRESS_FILE = "treepack_progress.json"
"""The file of a checkpoint that holds `GroupProgress.state_dict()`."""

logger = logging.getLogger(__name__)

OnRolloutsScored = Callable[[StepScores], object]
Item = TypeVar("Item")


class ScoringGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's asynchronous GRPO trainer that computes rewards and advantages on the trainer, over packed rows.

    Differences from `AsyncGRPOTrainer` (TRL 1.16), all by design:
      - Policy and scorers run tree attention on every device, models with attention sinks included; recurrent
        layers follow the tree where tree-recurrence is installed (see `prepare_model`).
      - Groups are taken whole: each is planned into one optimizer step, is stale as a whole, and a resume neither
        skips nor repeats one.
      - Samples of zero advantage, without a reward, or (on request) truncated leave the loss and its token count as
        if they had not been packed; TRL counts their tokens. Without them, and with the same samples in each
        micro-batch, losses are TRL's. A step of which nothing is left to train does not move the policy.
      - Rewards may come from `scorers`, from reward functions, or from both.
      - Rollout traces are not sent to trackio.

    A checkpoint also holds which groups were trained or dropped (`PROGRESS_FILE`). Without it (a checkpoint of TRL's
    own), a resume starts from the first prompt.

    Args:
        model, reward_funcs, args, train_dataset, callbacks: as in `AsyncGRPOTrainer`; `args` is a `ScoringGRPOConfig`.
        scorers: run on every rank, in this order, after the reward functions' columns.
        on_rollouts_scored: called on the main process with each step's `StepScores`, before the step is trained.
        trl_arguments: the other arguments of `AsyncGRPOTrainer`. A `rollout_worker` of your own must put rows as in
            `RolloutRow` on its queue; `reward_funcs` and the options of generation are not for it, as in TRL.

    Attributes:
        scorers: as given.
        progress: the `GroupProgress` of the main process, which alone sees groups.

    Raises:
        TypeError: `args` is no `ScoringGRPOConfig`, a scorer no `TrainerScorer`, a reward function no function, or
            what should be a sequence none.
        ValueError: two scorers, or a scorer and a reward function, share a name; nothing gives a reward;
            `reward_weights` does not fit the columns; a group of `num_generations` cannot fit in an optimizer step.
        NotImplementedError: the policy, or a scorer's model under tree attention, would get a packed row wrong (see
            `check_tree_support`).
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Any = None,
        args: ScoringGRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        scorers: Sequence[TrainerScorer] = (),
        on_rollouts_scored: Sequence[OnRolloutsScored] = (),
        callbacks: Sequence[TrainerCallback] | None = None,
        **trl_arguments: Any,
    ) -> None:
        if args is None:
            args = ScoringGRPOConfig(f"{Path(model).name}-ScoringGRPO")
        if not isinstance(args, ScoringGRPOConfig):
            raise TypeError(f"args must be a ScoringGRPOConfig, got {type(args).__name__}")
        scorers = _listed("scorers", scorers)
        on_rollouts_scored = _listed("on_rollouts_scored", on_rollouts_scored)
        _check_scorers(scorers)
        _check_rewards(reward_funcs, scorers, args, trl_arguments)
        if args.token_budget is not None:
            _check_capacity(args, args.world_size)
        self.scorers = scorers
        self.progress = GroupProgress()
        self._on_rollouts_scored = on_rollouts_scored
        self._rollouts: GroupedQueue | None = None
        self._recorder: StepRecorder | None = None
        self._scores: StepScores | None = None  # of the step under way, on the main process
        self._trains = False  # whether any token of the step under way is trained, on any rank
        self._trained_tokens = 0  # of the step under way, on the main process
        self._prepared = False
        # Names that no sample has had a reward under yet; where they are known beforehand they are checked there.
        self._unmatched = set(args.reward_weights) if isinstance(args.reward_weights, Mapping) else set()
        with adapted_construction(
            register=partial(
                register_attention,
                backend=args.attention_backend,
                deterministic=args.deterministic,
            ),
            make_worker=partial(
                ScoringRolloutWorker,
                sample_columns=tuple(args.sample_columns or ()),
                max_attempts=args.max_request_attempts,
                max_failures=args.max_failed_generations,
            ),
        ):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                # Before TRL's own, which start the worker.
                callbacks=[*(callbacks or ()), _ScoringCallback(self)],
                **trl_arguments,
            )

    def get_train_dataloader(self) -> Any:
        """The queue's whole groups, planned into steps on the main process, a micro-batch an item."""
        args, accelerator, metrics = self.args, self.accelerator, self._metrics["train"]
        support = hybrid_support(outermost_pretrained(self.model))
        share_prefixes = args.share_prefixes and (support is None or support.shares_prefixes)
        cost = token_cost(accelerator.unwrap_model(self.model).config.get_text_config())
        samples = self._open_queue() if accelerator.is_main_process else ()
        token_budget = args.token_budget or 0  # where it comes from the server, only the main process knows it
        planner = StepPlanner(
            samples,
            num_processes=accelerator.num_processes,
            steps=args.gradient_accumulation_steps,
            token_budget=token_budget,
            samples_per_row=args.per_device_train_batch_size,
            scorers=self.scorers,
            metrics=metrics,
            share_prefixes=share_prefixes,
            placement=args.placement,
            token_cost=cost,
            groups_per_step=args.groups_per_step,
            oversize=args.oversize,
            progress=self.progress,
        )
        if accelerator.is_main_process and args.record_dir is not None:
            self._recorder = StepRecorder(args.record_dir, settings=_record_settings(args, share_prefixes, cost))
        collator = ScoringCollator(
            self.processing_class.pad_token_id,
            accelerator.num_processes,
            metrics=metrics,
            token_budget=max(token_budget, 0),
            recorder=self._recorder,
            scorers=self.scorers,
        )
        return accelerator.prepare(DataLoader(planner, batch_size=1, collate_fn=collator, num_workers=0))

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """The micro-batches of one optimizer step, scored."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._scores = score_step(self, batches) if batches else None
        self._trains = any(bool(batch["global_n_tokens"].any()) for batch in batches)
        with raised_on_all_ranks(self.accelerator, "handing out a step's scores"):
            if self._scores is not None:
                self._hand_out(self._scores)
        return batches, num_items

    def _open_queue(self) -> QueueDataset:
        """On the main process: the rollout queue by groups."""
        args = self.args
        if args.token_budget is None:
            self.vllm_client.wait_for_server_ready()
            args.token_budget = self.vllm_client.get_max_model_len()
            _check_capacity(args, self.accelerator.num_processes)
        self._rollouts = GroupedQueue(
            self.rollout_queue,
            model_version=lambda: self.model_version,
            max_staleness=args.max_staleness,
            check_health=partial(self.rollout_worker.check_health, args.heartbeat_stale_after_s),
            progress=self.progress,
        )
        # TRL's name: its step metrics read and reset `wait_s`.
        self._rollout_dataset = QueueDataset(
            self._rollouts,
            model_version=lambda: self.model_version,
            metrics=self._metrics["train"],
            flush_after_s=args.flush_after_s,
        )
        return self._rollout_dataset

    def _hand_out(self, scores: StepScores) -> None:
        """On the main process: to the log, the recorder and the callbacks."""
        assert self._rollouts is not None
        self._trained_tokens = int(scores.trained_tokens.sum())
        if unmatched := sorted(self._unmatched.difference(scores.names)):
            logger.warning("reward_weights name %s, the first step's columns are %s", unmatched, scores.names)
        self._unmatched.clear()
        for name, value in (scores.metrics | self._rollouts.pop_metrics()).items():
            self._metrics["train"][name].append(value)
        if self._recorder is not None:
            self._recorder.write(scores)
        for callback in self._on_rollouts_scored:
            callback(scores)

    def _begin(self) -> None:
        """Before TRL starts the worker: scorers are made ready, and the worker learns what is not to come again."""
        if not self._prepared:
            self._prepared = True
            for scorer in self.scorers:
                scorer.prepare(self)
        if self.accelerator.is_main_process:
            self._groups_before_resume = self.progress.num_trained - len(self._trained_groups)
            if isinstance(self.rollout_worker, ScoringRolloutWorker):
                self.rollout_worker.skip_consumed(self.progress.watermark, self.progress.consumed_past_watermark)

    def _before_optimizer_step(self) -> None:
        """Optimizers pass over what has no gradient; one of zeros would still let momentum and decay move weights."""
        if not self._trains:
            self.model.zero_grad(set_to_none=True)

    def _step_trained(self) -> None:
        """The optimizer has stepped on what was scored last."""
        if self._scores is not None:
            groups = {int(group) for group in self._scores.groups}
            self.progress.trained(groups)
            self._trained_groups.update(groups)
            self._scores = None

    def _log_step_metrics(self) -> None:
        if self.accelerator.is_main_process:  # which logs; TRL adds up what the micro-batches were normalized by
            self._step_trained_tokens = float(self._trained_tokens)
        with uncountable_flops_are_nan():
            super()._log_step_metrics()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.accelerator.is_main_process:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PROGRESS_FILE).write_text(json.dumps(self.progress.state_dict()))
        super()._save_checkpoint(model, trial)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = kwargs.get("resume_from_checkpoint")
        if checkpoint is not None and self.accelerator.is_main_process:
            self.progress.load_state_dict(_read_progress(Path(checkpoint)))
        return super()._inner_training_loop(*args, **kwargs)


class _ScoringCallback(TrainerCallback):  # type: ignore[misc]
    """Where in TRL's loop the trainer's own bookkeeping happens."""

    def __init__(self, trainer: ScoringGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The model is wrapped, the worker not started."""
        self._trainer._begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step of nothing must not move the policy."""
        self._trainer._before_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before TRL counts the step's groups, and before a checkpoint."""
        self._trainer._step_trained()


def _listed(name: str, values: Iterable[Item]) -> tuple[Item, ...]:
    """All of them: an iterator would be used up by the first look."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {type(values).__name__}")
    return tuple(values)


def _check_scorers(scorers: Sequence[TrainerScorer]) -> None:
    for scorer in scorers:
        if not isinstance(scorer, TrainerScorer):
            raise TypeError(f"scorers must be TrainerScorers, got a {type(scorer).__name__}")
    names = [scorer.name for scorer in scorers]
    if len(set(names)) < len(names):
        raise ValueError(f"scorers must have names of their own, got {names}")
    for model in (value for scorer in scorers for value in vars(scorer).values() if isinstance(value, PreTrainedModel)):
        if model.config.get_text_config()._attn_implementation in ATTENTION_NAMES:
            check_tree_support(model)


def _check_rewards(
    reward_funcs: Any, scorers: Sequence[TrainerScorer], args: ScoringGRPOConfig, trl_arguments: Mapping[str, Any]
) -> None:
    functions = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    if other := [function for function in functions if not callable(function)]:
        raise TypeError(f"reward_funcs must be a function or a list of functions, got {other[0]!r}")
    own = [worker_module.get_callable_name(function) for function in functions]
    scored = [scorer.name for scorer in scorers]
    if both := sorted(set(own) & set(scored)):
        raise ValueError(f"scorers must have other names than reward_funcs, got {both} twice")
    if any(trl_arguments.get(name) is not None for name in ("environment_factory", "rollout_worker")):
        return  # there are columns that show in the rollouts alone
    if not own and not scored:
        raise ValueError(
            "scorers or reward_funcs must be given, got neither, no environment_factory and no rollout_worker"
        )
    columns, weights = [*sorted(own), *scored], args.reward_weights
    if isinstance(weights, Mapping) and (unknown := sorted(weights.keys() - set(columns))):
        raise ValueError(f"reward_weights must name columns among {columns}, got {unknown}")
    if isinstance(weights, list) and len(weights) != len(columns):
        raise ValueError(f"reward_weights must have one weight for each of {columns}, got {weights}")


def _check_capacity(args: ScoringGRPOConfig, num_processes: int) -> None:
    check_step_capacity(
        args.num_generations,
        args.gradient_accumulation_steps,
        num_processes,
        args.token_budget,
        args.per_device_train_batch_size,
    )


def _record_settings(args: ScoringGRPOConfig, share_prefixes: bool, cost: float) -> RecordSettings:
    return RecordSettings(
        token_budget=args.token_budget,
        samples_per_row=args.per_device_train_batch_size,
        share_prefixes=share_prefixes,
        placement=args.placement,
        token_cost=cost,
        estimator=args.advantage_estimator,
        scale=args.scale_rewards,
        reward_weights=args.reward_weights,  # type: ignore[arg-type] # no string: the config has parsed it
        mask_truncated_completions=args.mask_truncated_completions,
    )


def _read_progress(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / PROGRESS_FILE
    if not file.is_file():
        logger.warning("%s is not there: rollouts start from the first prompt", file)
        return GroupProgress().state_dict()
    try:
        state: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} must hold a GroupProgress as JSON, got {error}") from None
    return state
