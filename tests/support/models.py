"""Tiny random transformers models, strong enough in their weights that a wrong mask shows in every output."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 120
# Shorter than the test sequences, so that a window measured in packed index instead of along the path shows.
WINDOW = 6

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

# By test name: the model type, and what is set besides _COMMON. Head dim and hidden_size / heads differ where they can.
CAUSAL_LMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 24, "num_experts": 4, "decoder_sparse_step": 1, **_MOE}),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", {}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "logit_scale": 1.0}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            **_MOE,
        },
    ),
    # Learned positions, and projections that are no nn.Linear.
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
}

_GATED_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,  # shorter than the test sequences, so that states pass from chunk to chunk
}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_EXPERTS = {"num_experts": 4, "shared_expert_intermediate_size": 32, **_MOE}

# Models with recurrent layers, which `prepare_model` makes follow the tree.
HYBRID_LMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**_GATED_DELTA_NET, **_EXPERTS}),
    "qwen3_5_text": ("qwen3_5_text", _GATED_DELTA_NET),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_GATED_DELTA_NET, **_EXPERTS}),
    "olmo_hybrid": ("olmo_hybrid", _GATED_DELTA_NET),
    "mamba2": (
        "mamba2",  # no attention at all
        {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1], **_MAMBA2}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            **_MAMBA2,
        },
    ),
    "lfm2": ("lfm2", _SHORT_CONV),
    "lfm2_moe": ("lfm2_moe", {"num_dense_layers": 1, "num_experts": 4, **_SHORT_CONV, **_MOE}),
}


def tiny_config(name: str, **overrides: Any) -> PretrainedConfig:
    """That of a tiny model of CAUSAL_LMS or HYBRID_LMS, or of the bare model type `name`, with `overrides` set."""
    model_type, settings = {**CAUSAL_LMS, **HYBRID_LMS}.get(name, (name, {}))
    return AutoConfig.for_model(model_type, **{**_COMMON, **settings, **overrides})


def tiny_model(
    name: str,
    *,
    attn_implementation: str = "eager",
    auto_class: Any = AutoModelForCausalLM,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A tiny float32 model in evaluation mode; the same name and seed give the same weights under any attention."""
    config = tiny_config(name, **overrides)
    model = auto_class.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    randomize(model, seed=seed)
    return model.eval()


def randomize(model: nn.Module, *, seed: int = 0) -> None:
    """Draw weights large enough for attention that differs from uniform; norms vary around what they start at."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.3
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + noise if "norm" in name and parameter.dim() == 1 else noise)


def sample_sequences(seed: int = 0) -> list[torch.Tensor]:
    """Two prompts and their samples: branches at two depths, a duplicate, a strict prefix, a one-token tail."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(5, VOCAB_SIZE, (length,), generator=generator)

    sequences = []
    for _ in range(2):
        prompt, turn = tokens(9), tokens(4)
        sequences += [torch.cat([prompt, turn, tokens(length)]) for length in (3, 12, 1)]
        sequences += [torch.cat([prompt, tokens(length)]) for length in (8, 2)]
    return [*sequences, sequences[1].clone(), sequences[1][:11]]


def checkpoint_activations(model: PreTrainedModel, *, use_reentrant: bool) -> None:
    """Turn gradient checkpointing on, by the name that this version of transformers has for it."""
    kwargs = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def vision_language_models(model_type: str, text_config: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One tiny vision-language model twice, with eager attention and with tree attention in its text part.

    `text_config` is what is set besides the dimensions of the causal language models.
    """
    eager, packed = (
        AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(
                model_type,
                text_config={**_COMMON, **text_config},
                vision_config={
                    "depth": 1,
                    "hidden_size": 32,
                    "intermediate_size": 32,
                    "num_heads": 2,
                    "out_hidden_size": 64,
                },
                image_token_id=VOCAB_SIZE - 1,
                video_token_id=VOCAB_SIZE - 2,
                vision_start_token_id=VOCAB_SIZE - 3,
                vision_end_token_id=VOCAB_SIZE - 4,
            ),
            attn_implementation={"text_config": text_attention, "vision_config": "eager"},
            dtype=torch.float32,
        )
        for text_attention in ("eager", "treepack")
    )
    for model in (eager, packed):
        randomize(model)
        model.eval()
    return eager, packed
