"""Recurrent layers on packed rows: tree-recurrence's hooks on a transformers model, and the tree that they read.

Attention reads the tree off `position_ids`. tree-recurrence (the extra `hybrid`) makes Gated DeltaNet, Mamba2 and
short-conv layers follow it too, from TRL's arguments; here every call of a prepared model gets them, whichever way its
caller describes the row.

Legend: N tokens, S segments.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from treepack.kernels.hf_attention import ATTENTION_NAMES
from treepack.kernels.levels import segment_parents
from treepack.kernels.plan import TreePlan, plan_memo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class HybridSupport:
    """How a prepared model packs its rows; returned by `prepare_model`.

    Attributes:
        mode: "tree": its rows may share prefixes. "chains": some layer keeps samples apart but follows no branches, so
            that every sample must be a chain of its own.
        reason: why, in tree-recurrence's words.
        layer_types: the configuration's `layer_types` that follow the tree besides attention.
    """

    mode: Literal["tree", "chains"]
    reason: str
    layer_types: frozenset[str]
    _model: "weakref.ref[PreTrainedModel]"
    _handles: tuple[RemovableHandle, ...]

    @property
    def shares_prefixes(self) -> bool:
        """What `StepPlanner`, `pack_sequences` and the scorers take as `share_prefixes`."""
        return self.mode == "tree"

    def uninstall(self) -> None:
        """Take the hooks off again; the model computes what it did before. Calling it twice changes nothing.

        What models of one architecture share goes with the last of them.
        """
        import tree_recurrence

        model = self._model()
        if model is None or _prepared.get(model) is not self:
            return
        for handle in self._handles:
            handle.remove()
        tree_recurrence.uninstall(model)
        for module in _entrances(model):
            del _prepared[module]


_prepared: "weakref.WeakKeyDictionary[nn.Module, HybridSupport]" = weakref.WeakKeyDictionary()


def prepare_model(model: nn.Module) -> HybridSupport:
    """Make the recurrent layers of a transformers model follow packed rows.

    Covers what tree-recurrence does: Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid), Mamba2 (Mamba2, Bamba,
    Nemotron-H, Granite-MoE-Hybrid) and gated short convolutions (LFM2). They run on the kernels that transformers
    finds, or else, slowly, on its PyTorch versions. A model without such layers is left as it is (mode "tree").

    Call it once the model is loaded, before `check_tree_support` and before a scorer or a trainer takes the model; a
    second call returns the first one's answer. Under another attention than "treepack" and "tree_fa3", calls without
    tree arguments run as ever.

    Args:
        model: a transformers model, or a wrapper (PEFT, DDP) that contains one.

    Returns:
        The mode, and `uninstall()`. In mode "chains" rows must be packed with `share_prefixes=False`: scorers do so by
        themselves, `StepPlanner` is to be told.

    Raises:
        ImportError: tree-recurrence is not installed.
        NotImplementedError: some recurrent layer would mix samples; the message says which. Nothing is left installed.
        ValueError: `model` contains no transformers model.

    Source: `tree_recurrence.install` (axolotl).
    """
    try:
        import tree_recurrence
    except ImportError as error:
        raise ImportError('prepare_model needs tree-recurrence: pip install "treepack[hybrid]"') from error
    pretrained = outermost_pretrained(model)
    if (present := _prepared.get(pretrained)) is not None:
        return present
    found = tree_recurrence.install(pretrained)
    if found.mode == "none":
        tree_recurrence.uninstall(pretrained)
        raise NotImplementedError(f"{type(pretrained).__name__} cannot run tree-packed rows: {found.reason}")
    families = [family for family in tree_recurrence.families() if not found.owners.keys().isdisjoint(family.mixers)]
    # Ahead of tree-recurrence's own hooks, which turn the cache off where they see a tree.
    hook = partial(_describe_tree, shares_prefixes=found.mode == "tree")
    handles = [
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        for module in (_entrances(pretrained) if families else ())
    ]
    support = HybridSupport(
        mode=found.mode,
        reason=found.reason,
        layer_types=frozenset(layer_type for family in families for layer_type in family.layer_types),
        _model=weakref.ref(pretrained),
        _handles=tuple(handles),
    )
    for module in _entrances(pretrained):
        _prepared[module] = support
    return support


def hybrid_support(model: nn.Module) -> HybridSupport | None:
    """What `prepare_model` answered for this transformers model; None where it was not called."""
    return _prepared.get(model)


def outermost_pretrained(model: nn.Module) -> "PreTrainedModel":
    """The outermost transformers model in `model`.

    Raises:
        ValueError: there is none.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"model must contain a transformers PreTrainedModel, got {type(model).__name__}")


def text_decoder(pretrained: "PreTrainedModel") -> "PreTrainedModel":
    """The part of a transformers model that reads the packed row."""
    from transformers import PreTrainedModel

    decoder = pretrained.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else pretrained  # some models call their head "decoder"


def _entrances(pretrained: "PreTrainedModel") -> "list[PreTrainedModel]":
    """The modules that are called with packed rows: a trainer runs the whole, a scorer the base model."""
    return list(dict.fromkeys([pretrained, pretrained.base_model, text_decoder(pretrained)]))


def _describe_tree(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, shares_prefixes: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: a packed row's arguments in full, as tree-recurrence wants them."""
    config: Any = module.config
    cu_seqlens_q, cu_seqlens_k = kwargs.get("tree_cu_seqlens_q"), kwargs.get("tree_cu_seqlens_k")
    # tree-recurrence hands the arguments on like this where a model would drop them.
    bound = getattr(vars(module).get("forward"), "keywords", {})
    if "tree_segment_parents" in kwargs.keys() | bound.keys():  # an outer module's hook has been here
        return None
    if cu_seqlens_q is None:
        if config.get_text_config()._attn_implementation not in ATTENTION_NAMES:
            return None
        cu_seqlens_q, cu_seqlens_k = _boundaries(kwargs.get("position_ids"))
    if cu_seqlens_k is None:
        raise ValueError("tree_cu_seqlens_q and tree_cu_seqlens_k must be passed together, got one of them")
    row_bounds, path_bounds = (x.cpu().long().numpy() for x in (cu_seqlens_q, cu_seqlens_k))
    start, stop = row_bounds[:-1], row_bounds[1:]
    parents = segment_parents(start, stop, np.diff(path_bounds) - (stop - start))
    if not shares_prefixes and (parents >= 0).any():
        raise ValueError("share_prefixes must be False for this model's rows (mode 'chains'), got a shared prefix")
    tree = {
        # tree-recurrence keeps its plan on this tensor without looking at its values again: a view is new every time.
        "tree_cu_seqlens_q": cu_seqlens_q.view(-1),
        "tree_cu_seqlens_k": cu_seqlens_k,
        "tree_segment_parents": torch.from_numpy(parents),
    }
    return args, {**kwargs, **tree}


def _boundaries(position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """TRL's `tree_cu_seqlens_q` and `tree_cu_seqlens_k`, (S + 1,) int32, of a row of positions."""
    if position_ids is None:
        raise ValueError(
            "position_ids (1, N) or tree_cu_seqlens_q and tree_cu_seqlens_k must be passed by name to a model with "
            "recurrent layers, got neither"
        )
    if position_ids.dim() == 3 and len(position_ids) == 4:  # vision-language models: text, time, height, width
        position_ids = position_ids[0]
    plan = plan_memo.get(position_ids, "plan", lambda: TreePlan.from_position_ids(position_ids))
    segments = plan.segments
    lengths = torch.from_numpy(segments.stop - segments.start)
    path_lengths = torch.from_numpy(segments.depth) + lengths
    q, k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int().to(position_ids.device) for x in (lengths, path_lengths))
    return q, k
