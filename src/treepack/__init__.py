"""treepack: tree-packed prefix-sharing attention and the trainer-side scoring core of async GRPO.

Every public name is importable from here and loaded on first use (PEP 562), so `import treepack` costs nothing and
pulls in neither triton, transformers nor TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treepack._version import __version__

if TYPE_CHECKING:
    from treepack.kernels.gather import gather_positions
    from treepack.kernels.hf_attention import register_attention
    from treepack.kernels.hybrid import prepare_model
    from treepack.kernels.ops import tree_attention
    from treepack.kernels.plan import TreePlan
    from treepack.kernels.tree_support import check_tree_support
    from treepack.scoring.advantages import group_advantages
    from treepack.scoring.collator import ScoringCollator
    from treepack.scoring.ebft import EBFTScorer
    from treepack.scoring.log_prob_scorer import LogProbScorer
    from treepack.scoring.log_probs import token_log_probs
    from treepack.scoring.metrics_callback import MetricsCallback
    from treepack.scoring.planner import StepPlanner, check_step_capacity
    from treepack.scoring.progress import GroupProgress
    from treepack.scoring.queue import GroupedQueue, GroupShrunk
    from treepack.scoring.recorder import RecordSettings, StepRecorder
    from treepack.scoring.reward_model import RewardModelScorer
    from treepack.scoring.rows import ScoredRow, TreeRow
    from treepack.scoring.scorer import TrainerScorer
    from treepack.scoring.sequences import chunk_inputs, chunk_sequences, pack_sequences, unpack_sequences
    from treepack.scoring.step import StepScores, score_step
    from treepack.scoring.token_cost import token_cost

_HOMES = {
    "kernels.gather": ("gather_positions",),
    "kernels.hf_attention": ("register_attention",),
    "kernels.hybrid": ("prepare_model",),
    "kernels.ops": ("tree_attention",),
    "kernels.plan": ("TreePlan",),
    "kernels.tree_support": ("check_tree_support",),
    "scoring.advantages": ("group_advantages",),
    "scoring.collator": ("ScoringCollator",),
    "scoring.ebft": ("EBFTScorer",),
    "scoring.log_prob_scorer": ("LogProbScorer",),
    "scoring.log_probs": ("token_log_probs",),
    "scoring.metrics_callback": ("MetricsCallback",),
    "scoring.planner": ("StepPlanner", "check_step_capacity"),
    "scoring.progress": ("GroupProgress",),
    "scoring.queue": ("GroupShrunk", "GroupedQueue"),
    "scoring.recorder": ("RecordSettings", "StepRecorder"),
    "scoring.reward_model": ("RewardModelScorer",),
    "scoring.rows": ("ScoredRow", "TreeRow"),
    "scoring.scorer": ("TrainerScorer",),
    "scoring.sequences": ("chunk_inputs", "chunk_sequences", "pack_sequences", "unpack_sequences"),
    "scoring.token_cost": ("token_cost",),
    "scoring.step": ("StepScores", "score_step"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "EBFTScorer",
    "GroupProgress",
    "GroupShrunk",
    "GroupedQueue",
    "LogProbScorer",
    "MetricsCallback",
    "RecordSettings",
    "RewardModelScorer",
    "ScoredRow",
    "ScoringCollator",
    "StepPlanner",
    "StepRecorder",
    "StepScores",
    "TrainerScorer",
    "TreePlan",
    "TreeRow",
    "__version__",
    "check_step_capacity",
    "check_tree_support",
    "chunk_inputs",
    "chunk_sequences",
    "gather_positions",
    "group_advantages",
    "pack_sequences",
    "prepare_model",
    "register_attention",
    "score_step",
    "token_cost",
    "token_log_probs",
    "tree_attention",
    "unpack_sequences",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'treepack' has no attribute {name!r}")
    value = getattr(import_module(f"treepack.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
