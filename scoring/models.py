"""The models that `treepack score` runs: a checkpoint folder, a GGUF file, or a small seeded one made on the spot."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from treepack.kernels.hf_attention import register_attention
from treepack.kernels.hybrid import prepare_model
from treepack.scoring.ebft import EBFTScorer
from treepack.scoring.errors import ModelError
from treepack.scoring.log_prob_scorer import LogProbScorer
from treepack.scoring.packed_scorer import PackedModelScorer
from treepack.scoring.reward_model import RewardModelScorer
from treepack.scoring.rows import ScoredRow
from treepack.scoring.scorer import TrainerScorer
from treepack.scoring.trainer import ScoringTrainer

ScorerKind = Literal["reward-model", "ebft", "log-prob"]


def scorer_name(kind: ScorerKind) -> str:
    """The reward column of a scorer of `treepack score`."""
    return kind.replace("-", "_")


class TimedScorer(TrainerScorer):
    """A scorer of packed rows that adds up the time of its forwards and tells of each.

    Args:
        inner: the scorer that does the work.

    Attributes:
        wall_s, cpu_s: seconds of all `features` calls so far.
        on_scored: called after each forward with the number of samples it scored.
    """

    def __init__(self, inner: PackedModelScorer) -> None:
        self.inner = inner
        self.name = inner.name
        self.sharded = inner.sharded
        self.rows = inner.rows
        self.wall_s = self.cpu_s = 0.0
        self.on_scored: Callable[[int], None] | None = None

    def prepare(self, trainer: ScoringTrainer) -> None:
        """See `TrainerScorer.prepare`."""
        self.inner.prepare(trainer)

    def group_extras(self, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """See `TrainerScorer.group_extras`."""
        return self.inner.group_extras(samples)

    def collate(
        self, rows: Sequence[ScoredRow], index: int
    ) -> tuple[list[dict[str, torch.Tensor]], dict[str, int | float]]:
        """See `TrainerScorer.collate`."""
        return self.inner.collate(rows, index)

    def features(self, trainer: ScoringTrainer, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TrainerScorer.features`."""
        wall, cpu = time.perf_counter(), time.process_time()
        uids, features = self.inner.features(trainer, inputs)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        if self.on_scored is not None:
            self.on_scored(int((uids >= 0).sum()))
        return uids, features

    def group_rewards(
        self, sample_features: torch.Tensor, extra_features: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64] | torch.Tensor, dict[str, float]]:
        """See `TrainerScorer.group_rewards`."""
        return self.inner.group_rewards(sample_features, extra_features)


@dataclass(frozen=True)
class LoadedScorer:
    """A scorer and what people should know of its model, which is fp32, in eval mode, on tree attention.

    Attributes:
        scorer: the scorer.
        description: the model in a few words.
        notes: sentences for the report.
    """

    scorer: TimedScorer
    description: str
    notes: tuple[str, ...]


def load_scorer(
    kind: ScorerKind, path: Path | None, *, vocab_size: int, longest_row: int, token_budget: int, seed: int
) -> LoadedScorer:
    """Load a scorer's model from `path`, or make a small seeded one where it is None.

    Args:
        kind: which scorer. "reward-model" wants a classification head with one label, "log-prob" a language model's
            head, "ebft" none.
        path: a transformers checkpoint folder or a .gguf file. A head that is missing in it is made and seeded.
        vocab_size: the vocabulary that the rollouts need, their largest token + 1.
        longest_row: tokens of the longest row.
        token_budget: unique tokens of one forward.
        seed: of every weight that is not loaded.

    Raises:
        ModelError: there is no such model, its vocabulary is too small, it has several labels, or a packed row would go
            wrong in it.
    """
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if path is None:
            model, description, notes = _seeded_model(kind, vocab_size, longest_row, seed)
        else:
            model, description, notes = _read_model(kind, path, seed)
    config = model.config.get_text_config()
    if config.vocab_size < vocab_size:
        raise ModelError(
            f"the model's vocabulary must hold the rollouts' tokens, up to {vocab_size - 1}, got {config.vocab_size}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and longest_row > positions:
        notes.append(f"the longest row, {longest_row} tokens, exceeds the model's {positions} positions")
    try:
        if find_spec("tree_recurrence") is not None:  # without the extra `hybrid` recurrent models are refused
            prepare_model(model)
        scorer = _scorer(kind, model.requires_grad_(False), token_budget)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"{path}: cannot score: {error}") from error
    return LoadedScorer(TimedScorer(scorer), description, tuple(notes))


def _scorer(kind: ScorerKind, model: Any, token_budget: int) -> PackedModelScorer:
    name = scorer_name(kind)
    if kind == "reward-model":
        return RewardModelScorer(model, token_budget=token_budget, name=name)
    if kind == "ebft":
        return EBFTScorer(model, token_budget=token_budget, name=name)
    return LogProbScorer(model, token_budget=token_budget, name=name)


def _seeded_model(kind: ScorerKind, vocab_size: int, longest_row: int, seed: int) -> tuple[Any, str, list[str]]:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=longest_row,
        # About 1 / sqrt(hidden_size): activations and scores of the size of a trained model's, so that a wrong mask
        # would show.
        initializer_range=0.06,
        num_labels=1,
        attn_implementation="treepack",
    )
    model = _auto_class(kind).from_config(config)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    description = f"llama, 2 layers of 256, {size:.1f} M parameters, random weights (seed {seed})"
    return model, description, ["the model's weights are random: its scores mean nothing"]


def _auto_class(kind: ScorerKind) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    classes = {"reward-model": AutoModelForSequenceClassification, "ebft": AutoModel, "log-prob": AutoModelForCausalLM}
    return classes[kind]


def _read_model(kind: ScorerKind, path: Path, seed: int) -> tuple[Any, str, list[str]]:
    from transformers import AutoConfig

    folder, gguf = _source(path)
    try:
        config = AutoConfig.from_pretrained(folder, **gguf)
        is_classifier = any("SequenceClassification" in name for name in config.architectures or ())
        one_label = {"num_labels": 1} if kind == "reward-model" else {}
        if one_label and is_classifier and config.num_labels != 1:
            raise ModelError(f"{path}: a reward model must have 1 label, got {config.num_labels}")
        model, info = _auto_class(kind).from_pretrained(
            folder,
            **gguf,
            **one_label,
            dtype=torch.float32,
            attn_implementation="treepack",
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:  # whatever the readers of a damaged or unknown file run into
        raise ModelError(f"{path}: cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    missing = sorted(info["missing_keys"])
    notes = [f"{', '.join(missing)} not in the checkpoint: random (seed {seed})"] if missing else []
    return model, f"{path.name}, {type(model).__name__}, {size:.1f} M parameters", notes


def _source(path: Path) -> tuple[Path, dict[str, str]]:
    """The folder to load from and, for a GGUF file, the argument that names it."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: not a checkpoint folder: it has no config.json")
        return path, {}
    if path.exists():
        raise ModelError(f"{path}: a model must be a checkpoint folder or a .gguf file")
    raise ModelError(f"{path}: no such model")
