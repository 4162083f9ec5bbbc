"""The one door to TRL: what treepack uses of it, checked at import, since `trl.experimental` moves between releases.

What `scoring/trl_*.py` agree on:

- A row on the rollout queue is TRL's `RolloutSample` plus `uid`, `rollout_id`, `group_size`, `rewards` {column: float,
  NaN = not applicable}, `finished`, and `columns` {dataset column: value}, those of
  `ScoringGRPOConfig.sample_columns`, for scorers to read. Its `metrics` hold no rewards: `score_step` logs those. A
  group that will have fewer rows than announced is told by a `GroupShrunk` on the same queue.
- Group ids go on across resumes: group g is made from prompt g modulo the dataset's length. A checkpoint of
  `ScoringGRPOTrainer` holds `GroupProgress.state_dict()`. On every start of a training the trainer calls
  `worker.skip_consumed(watermark, past_watermark)` before `worker.start()`: no group below `watermark` and none of the
  list `past_watermark` is generated.
- The trainer makes its worker as TRL does, `ScoringRolloutWorker(**TRL's arguments, sample_columns=(...))`.
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

TESTED_VERSIONS = ("1.16",)

_HOME = "trl.experimental.async_grpo"

# Module -> what must be in it; a dot reaches into a class. Names that TRL's own code looks up in its module when called
# (so that `trl_init` can replace them there) are listed with that module.
_LAYOUT: dict[str, tuple[str, ...]] = {
    f"{_HOME}.async_grpo_config": ("AsyncGRPOConfig",),
    f"{_HOME}.async_grpo_trainer": (
        "AsyncGRPOTrainer.compute_loss",
        "AsyncGRPOTrainer.get_batch_samples",
        "AsyncGRPOTrainer.get_train_dataloader",
        "AsyncGRPOTrainer._inner_training_loop",
        "AsyncGRPOTrainer._log_step_metrics",
        "AsyncGRPOTrainer._save_checkpoint",
        "AsyncRolloutWorker",
        "RolloutWorkerProtocol",
        "WeightTransferProtocol",
        "add_fused_lm_head",
        "compute_flops_per_token",
        "create_model_from_path",
        "get_peak_flops_per_device",
        "register_tree_attention",
    ),
    f"{_HOME}.async_rollout_worker": (
        "AsyncRolloutWorker._loop_cls",
        "AsyncRolloutWorker.start",
        "RolloutGroup",
        "RolloutSample",
        "TrainingSequence",
        "_AsyncRolloutLoop._generate_loop",
        "_AsyncRolloutLoop._generate_one",
        "_AsyncRolloutLoop._generate_one_turn",
        "_AsyncRolloutLoop._repeat_iterator",
        "_AsyncRolloutLoop._retry",
        "_AsyncRolloutLoop._score_group",
        "Dataset",
        "get_callable_name",
        "is_async_callable",
        "is_vllm_available",
    ),
    f"{_HOME}.packing": ("TREE_ATTENTION", "TreeRow", "register_tree_attention"),
    "trl.chat_template_utils": ("qwen3_chat_template",),
    f"{_HOME}.vllm_client": ("VLLMClient.get_max_model_len", "VLLMClient.wait_for_server_ready"),
}


def missing_names(layout: dict[str, tuple[str, ...]]) -> list[str]:
    """The full names in `layout` (module -> names in it) that the installed packages do not have."""
    missing = []
    for module_name, names in layout.items():
        try:
            module: ModuleType | None = import_module(module_name)
        except ModuleNotFoundError:
            module = None
        for name in names:
            found: object = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                missing.append(f"{module_name}.{name}")
    return missing


def check_layout(layout: dict[str, tuple[str, ...]] = _LAYOUT) -> None:
    """Refuse a TRL that is laid out otherwise.

    Raises:
        ModuleNotFoundError: TRL is not installed.
        ImportError: names are missing.
    """
    import_module("trl")
    if missing := missing_names(layout):
        raise ImportError(
            f"treepack.scoring.trl_hooks works with TRL {', '.join(TESTED_VERSIONS)} (pip install 'trl~=1.16.0'), got "
            f"TRL {version('trl')}, which lacks {', '.join(missing)}"
        )


check_layout()

import trl.experimental.async_grpo.async_grpo_trainer as trainer_module  # noqa: E402
import trl.experimental.async_grpo.async_rollout_worker as worker_module  # noqa: E402
from trl.chat_template_utils import qwen3_chat_template  # noqa: E402
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import (  # noqa: E402
    AsyncGRPOTrainer,
    RolloutWorkerProtocol,
    WeightTransferProtocol,
)
from trl.experimental.async_grpo.async_rollout_worker import (  # noqa: E402
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    TrainingSequence,
)
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop as AsyncRolloutLoop  # noqa: E402

__all__ = [
    "TESTED_VERSIONS",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "AsyncRolloutLoop",
    "AsyncRolloutWorker",
    "RolloutGroup",
    "RolloutSample",
    "RolloutWorkerProtocol",
    "TrainingSequence",
    "WeightTransferProtocol",
    "check_layout",
    "missing_names",
    "qwen3_chat_template",
    "trainer_module",
    "worker_module",
]
