"""check_tree_support: what a packed row would silently get wrong is refused with its reason; nothing else is."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from support.models import CAUSAL_LMS, tiny_config, tiny_model
from treepack import check_tree_support

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_PER_LAYER_ROPE = {
    "full_attention": _DYNAMIC,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_OTHER_MIXING = "mix tokens otherwise"
_NO_INTERFACE = "does not go through transformers' AttentionInterface"
_RECURRENT = "recurrent layers would carry state"

# Model type, settings, a part of the reason.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, _RECURRENT),
    ("mamba2", {"num_heads": 8, "head_dim": 16, "expand": 2}, _RECURRENT),
    ("falcon_mamba", {}, _RECURRENT),
    ("rwkv", {}, _RECURRENT),
    ("xlstm", {"num_heads": 4}, _RECURRENT),
    ("recurrent_gemma", {"head_dim": 16}, _RECURRENT),
    ("jamba", {"num_experts": 2}, _RECURRENT),
    ("bamba", {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16}, _RECURRENT),
    ("falcon_h1", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128}, _RECURRENT),
    ("qwen3_next", {}, "layers of type linear_attention"),
    ("minimax", {"layer_types": ["linear_attention", "full_attention", "full_attention"]}, _OTHER_MIXING),
    (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"]},
        "its convolution layers.0.conv.conv would mix neighbours",
    ),
    ("llama4_text", {"num_local_experts": 2, "head_dim": 16}, "layers of type chunked_attention"),
    ("phi3", {"rope_parameters": _LONGROPE}, "longrope rope depends on the longest position"),
    ("llama", {"rope_parameters": _DYNAMIC}, "dynamic rope depends on the longest position"),
    ("gemma3_text", {"rope_parameters": _PER_LAYER_ROPE, "head_dim": 16}, "dynamic rope depends"),
    ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 16}, "its attention is bidirectional"),
    ("llama", {"is_causal": False}, "its configuration asks for bidirectional attention"),
    ("gpt2", {"add_cross_attention": True}, "it has cross-attention"),
    ("bert", {}, "its attention is bidirectional"),
    ("bloom", {}, _NO_INTERFACE),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, _NO_INTERFACE),
    ("falcon", {"alibi": True}, _NO_INTERFACE),
    ("stablelm", {}, _NO_INTERFACE),
    ("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}, _NO_INTERFACE),
    (
        "phimoe",
        {"sliding_window": 6, "num_local_experts": 4},
        "PhimoeAttention leaves its sliding window to the attention mask",
    ),
]


def build(model_type: str, auto_class: Any = AutoModelForCausalLM, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return auto_class.from_config(tiny_config(model_type, **settings))


@pytest.mark.parametrize(("model_type", "settings", "reason"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_with_the_reason(model_type: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match="cannot run tree-packed rows: .*" + re.escape(reason)):
        check_tree_support(build(model_type, **settings))


@pytest.mark.parametrize(
    ("model_type", "auto_class", "reason"),
    [
        ("t5", AutoModelForSeq2SeqLM, "it is an encoder-decoder"),
        ("modernbert", AutoModelForTokenClassification, "its attention is bidirectional"),
        ("eurobert", AutoModel, "its attention is bidirectional"),
    ],
)
def test_encoders_are_refused(model_type: str, auto_class: Any, reason: str) -> None:
    settings = {"d_kv": 16} if model_type == "t5" else {}
    with pytest.raises(NotImplementedError, match=reason):
        check_tree_support(build(model_type, auto_class, **settings))


def test_all_reasons_are_given() -> None:
    model = build("llama", rope_parameters=_DYNAMIC, is_causal=False)
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM .*bidirectional attention; .*dynamic rope"):
        check_tree_support(model)


@pytest.mark.parametrize("name", CAUSAL_LMS)
@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModel])
def test_equal_models_are_accepted(name: str, auto_class: Any) -> None:
    check_tree_support(build(name, auto_class))


def test_wrapped_models_and_heads_are_accepted() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    check_tree_support(Wrapper(build("llama", AutoModelForSequenceClassification)))
    check_tree_support(tiny_model("qwen3", attn_implementation="sdpa"))


def test_remote_rope_known_only_to_its_module() -> None:
    model = build("llama")
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(NotImplementedError, match="dynamic rope"):
        check_tree_support(model)


def test_a_model_of_another_library() -> None:
    with pytest.raises(ValueError, match="must contain a transformers PreTrainedModel, got Linear"):
        check_tree_support(nn.Linear(2, 2))
