"""Tree attention as an attention implementation of transformers (`attn_implementation="treepack"`).

Shapes: B = batch, always 1; H = query heads; G = key/value heads; N = tokens of the packed row; D = head dim;
E = value head dim; S = segments. transformers is imported by `register_attention` and by a running model, not before.
"""

from functools import partial
from typing import Any, get_args

import torch

from treepack.kernels.checks import Backend
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import PlanMemo, TreePlan, plan_memo

# The second name is the one TRL's AsyncGRPOTrainer puts in the model's config and its compute_loss tests for.
ATTENTION_NAMES = ("treepack", "tree_fa3")

# Arguments that some models hand to their attention function and that change its result in a way a tree cannot honour.
_UNSUPPORTED_OPTIONS = {
    "position_bias": "an additive bias (T5, ALiBi) is not supported",
    "alibi": "an additive bias (ALiBi) is not supported",
    "head_mask": "masked heads are not supported",
    "layer_head_mask": "masked heads are not supported",
    "indices": "sparse attention with an indexer is not supported",
    "block_indices": "sparse attention with an indexer is not supported",
    "sinks": "sinks are supported under the name s_aux alone",
    "cu_seq_lens_q": "position_ids or tree_cu_seqlens_q/k already define the row",
    "cu_seq_lens_k": "position_ids or tree_cu_seqlens_q/k already define the row",
    "output_attentions": "the attention weights are never formed",
}


def register_attention(*, backend: Backend | None = None, deterministic: bool = False) -> None:
    """Make tree attention available to every transformers model, as "treepack" and "tree_fa3".

    A model loaded with `attn_implementation="treepack"` then runs a packed row:
    `model(input_ids=(1, N), position_ids=(1, N), use_cache=False)`, int64, positions counted from 0 along each path.
    Where TRL's `tree_cu_seqlens_q` and `tree_cu_seqlens_k` ((S+1,) int32) are passed too, they define the tree;
    TRL's other `tree_*` arguments are accepted and not needed. A row padded at the end with zeros (tokens and
    positions) is fine: each padding token is a root of its own. "tree_fa3" is TRL's name: registering replaces TRL's
    own function, so that its trainer runs unchanged.

    In vision-language models give the name to the text part alone:
    `attn_implementation={"text_config": "treepack"}`. Call `check_tree_support(model)` once for what no attention
    function can see (recurrent layers, rope types, ...). `torch.compile(fullgraph=True)` works.

    Args:
        backend: as in `tree_attention`.
        deterministic: as in `tree_attention`. The names are the process's, so the latest call's options hold for every
            model that runs under them.

    Raises:
        ValueError: there is no such backend.

    The model's forward raises:
        ValueError: an attention_mask was given, the batch is not 1, queries and keys differ in number (a KV cache),
            neither position_ids nor TRL's two boundaries reach the attention, or they do not fit the row.
        NotImplementedError: attention dropout, bidirectional attention, a mask of the model's own, an additive bias,
            masked heads, an indexer, or `output_attentions`.

    Source: transformers' `AttentionInterface` and `AttentionMaskInterface`; TRL's `register_tree_attention`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if backend is not None and backend not in get_args(Backend):
        raise ValueError(f"backend must be None or one of {', '.join(get_args(Backend))}, got {backend!r}")
    attention: Any = _tree_attention_forward
    if backend is not None or deterministic:
        attention = partial(_tree_attention_forward, tree_backend=backend, tree_deterministic=deterministic)
    for name in ATTENTION_NAMES:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, _refuse_mask)


def _tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    tree_cu_seqlens_q: torch.Tensor | None = None,
    tree_cu_seqlens_k: torch.Tensor | None = None,
    tree_backend: Backend | None = None,
    tree_deterministic: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, H, N, D), key (1, G, N, D), value (1, G, N, E) -> (1, N, H, E), in the signature of transformers."""
    _check_call(module, query, key, attention_mask, dropout=dropout, is_causal=is_causal, options=kwargs)
    tree = _tree_of(position_ids, tree_cu_seqlens_q, tree_cu_seqlens_k, num_tokens=query.shape[2])
    dtype = _compute_dtype(module, query)
    q_NHD, k_NGD, v_NGE = (x_BHND[0].transpose(0, 1).to(dtype) for x_BHND in (query, key, value))
    out_NHE = tree_attention(
        q_NHD,
        k_NGD,
        v_NGE,
        **tree,
        scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        backend=tree_backend,
        deterministic=tree_deterministic,
    )
    return out_NHE.unsqueeze(0), None


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool | None,
    options: dict[str, Any],
) -> None:
    if attention_mask is not None:
        raise ValueError(_mask_message(attention_mask))
    if query.shape[0] != 1:
        raise ValueError(f"input_ids must be one packed row (1, N), got a batch of {query.shape[0]}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"keys must be as many as queries, got {key.shape[2]} and {query.shape[2]}: "
            "a packed row goes without a KV cache (use_cache=False)"
        )
    if dropout > 0:
        raise NotImplementedError(
            f"dropout must be 0 in tree attention, got {dropout}: set the model's attention dropout to 0"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError(
            f"is_causal must be True in tree attention, got False in {type(module).__name__}; for the encoder of a "
            'multimodal model choose another attention: attn_implementation={"text_config": "treepack"}'
        )
    for name, reason in _UNSUPPORTED_OPTIONS.items():
        option = options.get(name)
        if option is not None and option is not False:
            raise NotImplementedError(f"{name} must be None in tree attention: {reason}")


def _refuse_mask(
    *,
    q_length: int,
    attention_mask: torch.Tensor | None = None,
    mask_function: Any,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> None:
    """The mask a model asks for: None, once it is sure that the tree alone says all of it.

    transformers keeps a user's attention_mask from the attention function when this returns None, so that here is
    the only place where one can be seen. All ones are refused like any other: whoever makes a mask means padding, of
    which a packed row has none.
    """
    if attention_mask is not None:
        raise ValueError(_mask_message(attention_mask))
    if use_vmap:
        raise NotImplementedError("a model's own mask function cannot be combined with a tree-packed row")
    if torch.compiler.is_compiling():
        return
    # Bidirectional attention and image blocks differ as functions; what they share is that some token sees the next.
    # Reading the answer waits for the device, as transformers' own search for packed sequences just did.
    index_N = torch.arange(q_length, device=device)
    if bool(mask_function(0, 0, index_N[:-1], index_N[1:]).any()):
        raise NotImplementedError("the mask must be causal in tree attention, got one where a token sees a later one")


def _mask_message(attention_mask: torch.Tensor) -> str:
    return (
        f"attention_mask must be None for a tree-packed row, got one of shape {tuple(attention_mask.shape)}: "
        "position_ids (or tree_cu_seqlens_q/k) define what each token sees, padding included"
    )


def _compute_dtype(module: torch.nn.Module, query: torch.Tensor) -> torch.dtype:
    """The dtype TRL's tree attention computes in: autocast's, or the projections' where norms were kept in float32."""
    from transformers.integrations.flash_attention import get_target_dtype

    try:
        return get_target_dtype(query, module) or query.dtype
    except StopIteration:  # gpt2's projections are no nn.Linear
        return query.dtype


def _tree_of(
    position_ids: torch.Tensor | None,
    tree_cu_seqlens_q: torch.Tensor | None,
    tree_cu_seqlens_k: torch.Tensor | None,
    num_tokens: int,
) -> dict[str, Any]:
    """The tree as arguments of `tree_attention`: from both boundaries where TRL passes them, else from the positions.

    All layers, and their recomputation in the backward, receive the same tensors and so share one plan. A compiled
    graph holds the plan as an op instead, the same one in all layers, which the compiler then runs once.
    """
    compiling = torch.compiler.is_compiling()
    if tree_cu_seqlens_q is not None and tree_cu_seqlens_k is not None:
        boundaries = tree_cu_seqlens_q, tree_cu_seqlens_k
        if compiling:
            return {"plan": TreePlan(*_plan_op(*boundaries, num_tokens))}
        plans = plan_memo.get(tree_cu_seqlens_q, "plans by tree_cu_seqlens_k", PlanMemo)
        return {"plan": plans.get(tree_cu_seqlens_k, "plan", lambda: TreePlan.from_cu_seqlens(*boundaries))}
    if tree_cu_seqlens_q is not None or tree_cu_seqlens_k is not None:
        raise ValueError("tree_cu_seqlens_q and tree_cu_seqlens_k must be passed together, got one of them")
    if position_ids is None:
        raise ValueError(
            "position_ids (1, N) or tree_cu_seqlens_q and tree_cu_seqlens_k must reach the attention layers, "
            "got neither: pass them to the model; where it keeps position_ids to itself, pass the boundaries"
        )
    if compiling:
        return {"position_ids": position_ids}
    return {"plan": plan_memo.get(position_ids, "plan", lambda: TreePlan.from_position_ids(position_ids))}


@torch.library.custom_op("treepack::tree_plan_from_boundaries", mutates_args=())
def _plan_op(
    tree_cu_seqlens_q: torch.Tensor, tree_cu_seqlens_k: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = TreePlan.from_cu_seqlens(tree_cu_seqlens_q, tree_cu_seqlens_k)
    if plan.num_tokens != num_tokens:  # The graph was promised outputs of this size.
        raise ValueError(f"tree_cu_seqlens_q must end at the row's {num_tokens} tokens, got {plan.num_tokens}")
    return plan.subtree_end, plan.depth


@_plan_op.register_fake
def _(
    tree_cu_seqlens_q: torch.Tensor, tree_cu_seqlens_k: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    subtree_end, depth = (tree_cu_seqlens_q.new_empty(num_tokens, dtype=torch.int32) for _ in range(2))
    return subtree_end, depth
