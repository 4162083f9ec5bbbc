"""Tree-packed rows through real transformers models equal separate runs: logits, hidden states, gradients."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.models import (
    CAUSAL_LMS,
    VOCAB_SIZE,
    checkpoint_activations,
    sample_sequences,
    tiny_model,
    vision_language_models,
)
from support.packed_runs import (
    FORWARD_ABSOLUTE,
    WRONG_MASK,
    assert_gradients_close,
    gradients,
    run_packed,
    run_separate,
    tree_kwargs,
)
from treepack import check_tree_support, pack_sequences, register_attention

register_attention()


@pytest.fixture(scope="module")
def sequences() -> list[Tensor]:
    return sample_sequences()


@pytest.fixture(scope="module")
def packed(sequences: list[Tensor]) -> dict[str, Tensor]:
    return pack_sequences(sequences)


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_packed_equals_separate(name: str, sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    reference, model = tiny_model(name), tiny_model(name, attn_implementation="treepack")
    check_tree_support(model)
    expected, actual = run_separate(reference, sequences), run_packed(model, packed)

    assert actual.difference(expected) <= FORWARD_ABSOLUTE
    assert_gradients_close(gradients(model, actual), gradients(reference, expected))


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_plain_attention_would_fail_the_bound(name: str, sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        expected, actual = run_separate(model, sequences), run_packed(model, packed)
    assert actual.difference(expected) >= WRONG_MASK


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("attn_implementation", ["treepack", "tree_fa3"])
def test_trl_arguments_define_the_tree(
    name: str, attn_implementation: str, sequences: list[Tensor], packed: dict[str, Tensor]
) -> None:
    model = tiny_model(name, attn_implementation=attn_implementation)
    with torch.no_grad():
        expected = run_packed(model, packed)
        assert run_packed(model, packed, **tree_kwargs(packed)).difference(expected) == 0
        # The boundaries win over positions that describe another tree (here: rope alone sees the difference).
        boundaries = {key: packed[key] for key in ("tree_cu_seqlens_q", "tree_cu_seqlens_k")}
        shifted = run_packed(model, packed, position_ids=packed["position_ids"][None] + 5, **boundaries)
    assert shifted.difference(expected) <= 10 * FORWARD_ABSOLUTE


def test_rows_without_sharing(sequences: list[Tensor]) -> None:
    unshared = pack_sequences(sequences, share_prefixes=False)
    with torch.no_grad():
        expected = run_separate(tiny_model("qwen3"), sequences)
        actual = run_packed(tiny_model("qwen3", attn_implementation="treepack"), unshared)
    assert actual.difference(expected) <= FORWARD_ABSOLUTE


def test_model_without_position_ids_runs_one_sequence(sequences: list[Tensor]) -> None:
    with torch.no_grad():
        expected = run_separate(tiny_model("llama"), sequences[:1])
        actual = run_separate(tiny_model("llama", attn_implementation="treepack"), sequences[:1])
    assert actual.difference(expected) <= FORWARD_ABSOLUTE


def test_zero_padded_tail_is_harmless(packed: dict[str, Tensor]) -> None:
    model = tiny_model("mistral", attn_implementation="treepack")
    padded = {
        **packed,
        **{key: torch.cat([packed[key], packed[key].new_zeros(7)]) for key in ("input_ids", "position_ids")},
    }
    expected, actual = run_packed(model, packed), run_packed(model, padded)
    assert actual.difference(expected) <= FORWARD_ABSOLUTE
    assert_gradients_close(gradients(model, actual), gradients(model, expected))


def test_siblings_do_not_see_each_other() -> None:
    """Changing the tokens of A leaves every logit of B bit for bit unchanged (verl#6689)."""
    generator = torch.Generator().manual_seed(3)
    prompt, first, second, *tails = (
        torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in (10, 7, 6, 5, 8, 4, 9)
    )
    other_first = (first - 4) % (VOCAB_SIZE - 5) + 5
    model = tiny_model("llama", attn_implementation="treepack")

    def logits(branch: Tensor) -> list[Tensor]:
        rollouts = [torch.cat([prompt, branch, tail]) for tail in tails[:2]]
        rollouts += [torch.cat([prompt, second, tail]) for tail in tails[2:]]
        with torch.no_grad():
            return run_packed(model, pack_sequences(rollouts)).logits

    before, after = logits(first), logits(other_first)
    assert all(torch.equal(a, b) for a, b in zip(before[2:], after[2:]))
    assert all((a - b).abs().max() > WRONG_MASK for a, b in zip(before[:2], after[:2]))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradient_checkpointing(name: str, use_reentrant: bool, packed: dict[str, Tensor]) -> None:
    model = tiny_model(name, attn_implementation="treepack").train()
    expected = gradients(model, run_packed(model, packed))
    checkpoint_activations(model, use_reentrant=use_reentrant)
    actual = gradients(model, run_packed(model, packed))
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(actual[key], gradient), key


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_autocast(name: str, sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    model, exact = tiny_model(name, attn_implementation="treepack"), tiny_model(name)
    with torch.no_grad():
        expected = run_separate(exact, sequences)
        with torch.autocast("cpu", torch.bfloat16):
            low_precision, actual = run_separate(exact, sequences), run_packed(model, packed)
    # bf16 separately is this far from float32; the packed row may be twice as far.
    assert actual.difference(expected) <= 2 * low_precision.difference(expected)


@pytest.fixture(scope="module")
def vision_language() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny Qwen2.5-VL twice, with eager attention and with tree attention in its text part."""
    return vision_language_models(
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    )


def test_vision_language_text_path(
    vision_language: tuple[PreTrainedModel, PreTrainedModel], sequences: list[Tensor], packed: dict[str, Tensor]
) -> None:
    reference, model = vision_language
    positions_3N = packed["position_ids"].expand(3, 1, -1)
    expected = run_separate(reference, sequences)
    # Three rows of positions: the attention layers get none, so TRL's boundaries define the tree.
    actual = run_packed(model, packed, position_ids=positions_3N, **tree_kwargs(packed))
    assert actual.difference(expected) <= FORWARD_ABSOLUTE
    assert_gradients_close(gradients(model, actual), gradients(reference, expected))
    # Four rows: the first is the text position, and reaches them.
    with torch.no_grad():
        four = run_packed(model, packed, position_ids=packed["position_ids"].expand(4, 1, -1))
    assert four.difference(expected) <= FORWARD_ABSOLUTE
    with pytest.raises(ValueError, match="got neither"):
        run_packed(model, packed, position_ids=positions_3N)
