"""Which transformers models compute the right thing on a tree-packed row: a check of the model, without running it."""

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from treepack.kernels.hybrid import HybridSupport, hybrid_support, outermost_pretrained, text_decoder

# Layers that tree attention with a window along the path gets right, and layers without attention. Any other type
# mixes tokens in a way of its own.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "mlp", "moe"})


def check_tree_support(model: nn.Module) -> None:
    """Raise, with the reason, if `model` would get a tree-packed row wrong under tree attention.

    The check reads the configuration and the modules and runs nothing, so that it works on sharded and meta models.
    It looks at the text decoder of the outermost transformers model in `model` (wrappers such as DDP or PEFT are fine)
    and refuses
      - encoders, encoder-decoders, cross-attention and bidirectional attention;
      - layers that mix tokens in another way than full or sliding-window attention: recurrent, convolutional, linear,
        chunked or sparse ones, but for those that `prepare_model` made follow the tree. A model that it prepared in
        mode "chains" is accepted, for rows without shared prefixes;
      - rotary frequencies that depend on the row's longest position (dynamic NTK, longrope), which other samples set;
      - attention that does not go through transformers' AttentionInterface (ALiBi models among them), is not handed
        the caller's arguments, or leaves its sliding window to the mask.
    Not verified: what remote code does inside a layer, mixing of neighbours in an embedding, losses over router
    logits (a shared token counts once), and heads that pool one vector a row. Those heads see one row where there are
    many sequences: run the base model and apply them to each sequence's last token.

    Raises:
        NotImplementedError: the model is refused; the message gives every reason found.
        ValueError: `model` contains no transformers model.
    """
    pretrained = outermost_pretrained(model)
    decoder = text_decoder(pretrained)
    support = hybrid_support(pretrained)
    config = decoder.config.get_text_config(decoder=True)
    reasons = [
        *_config_reasons(pretrained.config, config),
        *_rope_reasons(config, decoder),
        *_mixing_reasons(config, decoder, support),
        *_attention_reasons(config, decoder, support),
    ]
    if reasons:
        raise NotImplementedError(
            f"{type(pretrained).__name__} cannot run tree-packed rows: {'; '.join(dict.fromkeys(reasons))}"
        )


def _config_reasons(config: Any, text_config: Any) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    if getattr(text_config, "add_cross_attention", False):
        yield "it has cross-attention"
    if not getattr(text_config, "is_causal", True):
        yield "its configuration asks for bidirectional attention"


def _rope_reasons(config: Any, decoder: nn.Module) -> Iterator[str]:
    # Some models have one rope per layer type, others keep theirs in modules alone (remote code).
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    rope_types = [entry.get("rope_type") for entry in nested or [parameters]]
    for module in decoder.modules():
        rope_type = getattr(module, "rope_type", None)
        rope_types.extend(rope_type.values() if isinstance(rope_type, dict) else [rope_type])
    for rope_type in rope_types:
        # As in transformers' `dynamic_rope_update`, which recomputes exactly these from the longest position.
        if isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope"):
            yield f"its {rope_type} rope depends on the longest position in the row, hence on other samples"


def _mixing_reasons(config: Any, decoder: nn.Module, support: HybridSupport | None) -> Iterator[str]:
    known = _LAYER_TYPES | (support.layer_types if support is not None else set())
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        yield f"its layers of type {', '.join(others)} mix tokens otherwise than full or sliding-window attention"
    if support is not None:  # tree-recurrence has looked for the rest
        return
    remedy = 'unless prepare_model can make them follow the tree (pip install "treepack[hybrid]")'
    if any(getattr(module, "_is_stateful", False) for module in decoder.modules()):
        yield f"its recurrent layers would carry state from one sample into the next, {remedy}"
    convolutions = [name for name, module in decoder.named_modules() if isinstance(module, nn.Conv1d)]
    if convolutions:
        yield f"its convolution {convolutions[0]} would mix neighbours in the row, not in the tree, {remedy}"


def _attention_reasons(config: Any, decoder: nn.Module, support: HybridSupport | None) -> Iterator[str]:
    attentions = [module for module in decoder.modules() if _mentions(type(module), "ALL_ATTENTION_FUNCTIONS")]
    if support is not None and support.layer_types:
        # Hybrid models lack the flag below, and some have no attention at all.
        layer_types = set(getattr(config, "layer_types", None) or ())
        through_interface = bool(attentions) or layer_types <= support.layer_types
    else:
        through_interface = bool(attentions) and getattr(decoder, "_supports_attention_backend", False)
    if not through_interface:
        yield "its attention does not go through transformers' AttentionInterface"
    if any(not getattr(module, "is_causal", True) for module in attentions):
        yield "its attention is bidirectional"
    for kind in {type(module): None for module in [decoder, *attentions]}:
        if not _takes_kwargs(kind):
            yield f"{kind.__name__} does not take the arguments that define the tree"
    if _has_window(config):
        for kind in {type(module): None for module in attentions}:
            if not _mentions(kind, "sliding_window"):
                yield f"{kind.__name__} leaves its sliding window to the attention mask, which a packed row has none of"


def _has_window(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    return bool(getattr(config, "sliding_window", None)) and (not layer_types or "sliding_attention" in layer_types)


def _forward_code(kind: type[nn.Module]) -> CodeType | None:
    forward = inspect.unwrap(kind.forward)
    return forward.__code__ if inspect.isfunction(forward) else None


def _mentions(kind: type[nn.Module], name: str) -> bool:
    """Whether the class's forward uses the name: as a global, as an attribute, or as a keyword of a call."""
    code = _forward_code(kind)
    if code is None:
        return False
    return name in code.co_names or any(name in const for const in code.co_consts if isinstance(const, tuple))


def _takes_kwargs(kind: type[nn.Module]) -> bool:
    code = _forward_code(kind)
    return code is None or bool(code.co_flags & inspect.CO_VARKEYWORDS)
