"""What a token costs in a model's linear layers, beside what it costs in attention."""

from typing import Any

DENSE_8B_TOKEN_COST = 27_000.0
"""`token_cost` of a dense 8B decoder (32 layers, 32 heads of 128, MLP of 14,336)."""


def token_cost(config: Any) -> float:
    """Price of a token's linear layers in units of the attention FLOPs of one visible key.

    A token at depth d then costs `token_cost + d + 1`. TRL's load leaves the linear layers out, which at 8B are worth
    27,000 keys: a row of many short samples would look far too cheap.

    Args:
        config: configuration of a transformers decoder (its text part is read) with hidden_size, intermediate_size,
            num_hidden_layers, num_attention_heads; also num_key_value_heads, head_dim, vocab_size, and, of mixtures of
            experts, num_experts_per_tok, moe_intermediate_size and shared experts.

    Returns:
        FLOPs of the linear layers (2 a weight that a token passes, the head's included) over the attention FLOPs of one
        key (4 a head and head dim, in every layer).

    Raises:
        ValueError: the configuration lacks one of the first four.
    """
    text = config.get_text_config(decoder=True)
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if getattr(text, name, None) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(needed)}, got {type(text).__name__} without {missing}")
    hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * _mlp_width(text)) + hidden * text.vocab_size
    return float(2 * weights / (4 * layers * heads * head_dim))


def _mlp_width(text: Any) -> float:
    """Width of the MLP that one token passes: the experts it is routed to and the shared ones, or the dense one."""
    routed = getattr(text, "num_experts_per_tok", None)
    if not routed:
        return float(text.intermediate_size)
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "n_shared_experts", None) or 0
    return float(width * (routed + shared) + (getattr(text, "shared_expert_intermediate_size", None) or 0))
