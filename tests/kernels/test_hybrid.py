"""`prepare_model`: packed rows through models with recurrent layers equal separate runs, and nothing is left behind."""

import copy
import gc
import re
import sys
import weakref
from typing import Any

import pytest
import torch
import tree_recurrence
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.models import (
    HYBRID_LMS,
    checkpoint_activations,
    randomize,
    sample_sequences,
    tiny_config,
    tiny_model,
    vision_language_models,
)
from support.packed_runs import (
    WRONG_MASK,
    assert_gradients_close,
    gradients,
    run_packed,
    run_separate,
    tree_kwargs,
)
from treepack import check_tree_support, pack_sequences, register_attention, unpack_sequences
from treepack.kernels.hybrid import hybrid_support, prepare_model

# One model of each way in which tree-recurrence hooks a model.
FAMILIES = ["qwen3_5_text", "mamba2", "bamba", "lfm2"]
# Of logits up to 5: states add up in float32 along a path, in chunks that start elsewhere when it is packed.
FORWARD_ABSOLUTE = 5e-5

register_attention()


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    tree_recurrence.uninstall()


@pytest.fixture(scope="module")
def sequences() -> list[Tensor]:
    return sample_sequences()


@pytest.fixture(scope="module")
def packed(sequences: list[Tensor]) -> dict[str, Tensor]:
    return pack_sequences(sequences)


def prepared(name: str, **overrides: Any) -> PreTrainedModel:
    model = tiny_model(name, attn_implementation="treepack", **overrides)
    assert prepare_model(model).mode == "tree"
    return model


@pytest.mark.parametrize("name", HYBRID_LMS)
def test_packed_equals_separate(name: str, sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    reference, model = tiny_model(name), prepared(name)
    check_tree_support(model)
    expected = run_separate(reference, sequences)
    with torch.no_grad():
        trl = run_packed(model, packed, **tree_kwargs(packed))
    actual = run_packed(model, packed)  # position_ids alone
    assert actual.difference(expected) <= FORWARD_ABSOLUTE
    assert trl.difference(expected) <= FORWARD_ABSOLUTE
    assert_gradients_close(gradients(model, actual), gradients(reference, expected))


@pytest.mark.parametrize("name", HYBRID_LMS)
def test_without_the_hooks_it_would_fail_the_bound(
    name: str, sequences: list[Tensor], packed: dict[str, Tensor]
) -> None:
    model = tiny_model(name, attn_implementation="treepack")
    with torch.no_grad():
        expected = run_separate(tiny_model(name), sequences)
        actual = run_packed(model, packed, **tree_kwargs(packed))
    assert actual.difference(expected) >= WRONG_MASK


@pytest.mark.parametrize("name", FAMILIES)
def test_the_base_model_runs_what_scorers_pass(name: str, sequences: list[Tensor]) -> None:
    """Boundaries without `tree_kv_index`, and a call that does not pass through the head."""
    reference, model = tiny_model(name), prepared(name)
    inputs, positions, offsets = unpack_sequences(pack_sequences(sequences, kv_index=False))
    with torch.no_grad():
        hidden = model.base_model(**inputs).last_hidden_state[0]
        for index, ids in enumerate(sequences):
            alone = reference.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            path = positions[offsets[index] : offsets[index + 1]]
            torch.testing.assert_close(hidden[path], alone, rtol=0, atol=FORWARD_ABSOLUTE)


@pytest.mark.parametrize("name", FAMILIES)
def test_siblings_do_not_see_each_other(name: str) -> None:
    """Case 20: no state passes from one sample to the next."""
    prompt, first, second = torch.arange(5, 15), torch.arange(20, 26), torch.arange(40, 47)
    model = prepared(name)

    def logits(branch: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return run_packed(model, pack_sequences([torch.cat([prompt, x]) for x in (branch, second)])).logits

    before, after = logits(first), logits(first + 60)
    assert torch.equal(before[1], after[1])
    assert (before[0] - after[0]).abs().max() > WRONG_MASK


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing(name: str, use_reentrant: bool, packed: dict[str, Tensor]) -> None:
    model = prepared(name).train()
    expected = gradients(model, run_packed(model, packed))
    checkpoint_activations(model, use_reentrant=use_reentrant)
    actual = gradients(model, run_packed(model, packed))
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(actual[key], gradient), key


def test_a_description_changed_in_place_is_read_again() -> None:
    model = prepared("qwen3_5_text")
    two = pack_sequences([torch.arange(5, 11), torch.arange(15, 21)])
    one = pack_sequences([torch.cat([torch.arange(5, 11), torch.arange(15, 21)])])
    names = ("position_ids", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    one["tree_cu_seqlens_q"], one["tree_cu_seqlens_k"] = two["tree_cu_seqlens_q"], torch.tensor([0, 6, 18]).int()

    def logits(**kwargs: Tensor) -> Tensor:
        with torch.no_grad():
            return model(input_ids=two["input_ids"][None], use_cache=False, **kwargs).logits

    for keys in (names[:1], names[1:]):
        described = {key: two[key].clone() for key in keys}
        kwargs = {key: x[None] if key == "position_ids" else x for key, x in described.items()}
        apart = logits(**kwargs)
        for key, tensor in described.items():
            tensor.copy_(one[key])
        joined = logits(**kwargs)
        torch.testing.assert_close(apart[:, :6], joined[:, :6], rtol=0, atol=FORWARD_ABSOLUTE)
        assert (apart[:, 6:] - joined[:, 6:]).abs().max() > WRONG_MASK, keys


@pytest.mark.parametrize("name", HYBRID_LMS)
def test_uninstalling_restores(name: str, sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    model = tiny_model(name, attn_implementation="treepack")
    modeling = sys.modules[type(model).__module__]

    def state() -> tuple[dict[str, Any], list[Any], list[tuple[Any, ...]]]:
        classes = [value for value in vars(modeling).values() if isinstance(value, type)]
        hooks = [(*m._forward_pre_hooks, *m._forward_pre_hooks_with_kwargs, *vars(m)) for m in model.modules()]
        return dict(vars(modeling)), [dict(vars(kind)) for kind in classes], hooks

    before = state()
    with pytest.raises(NotImplementedError, match="unless prepare_model"):
        check_tree_support(model)
    support = prepare_model(model)
    assert prepare_model(model) is support
    check_tree_support(model)
    assert state() != before
    support.uninstall()
    assert state() == before
    assert hybrid_support(model) is None
    with pytest.raises(NotImplementedError, match="unless prepare_model"):
        check_tree_support(model)
    again = prepare_model(model)
    support.uninstall()  # the old handle is spent
    assert hybrid_support(model) is again


def test_models_of_one_architecture_share_hooks(sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    policy, frozen = prepared("lfm2"), prepared("lfm2", seed=1)
    with torch.no_grad():
        expected = run_separate(tiny_model("lfm2", seed=1), sequences)
        support = hybrid_support(policy)
        assert support is not None
        support.uninstall()
        assert run_packed(frozen, packed).difference(expected) <= FORWARD_ABSOLUTE


def test_other_attention_runs_as_ever(sequences: list[Tensor]) -> None:
    model = tiny_model("qwen3_5_text")
    ids = torch.stack([sequences[0][:8], sequences[5][:8]])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        prepare_model(model)
        assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, expected)
        generated = model.generate(input_ids=ids[1:], max_new_tokens=3, do_sample=False)
    assert generated.shape[1] == 11


def test_a_row_must_be_described() -> None:
    model, ids = prepared("mamba2"), torch.arange(5, 12)[None]
    for entrance in (model, model.base_model):
        with pytest.raises(ValueError, match="position_ids .* must be passed by name .* got neither"):
            entrance(input_ids=ids, use_cache=False)
        with pytest.raises(ValueError, match="must be passed together, got one of them"):
            entrance(input_ids=ids, tree_cu_seqlens_q=torch.tensor([0, 7]), use_cache=False)


def test_vision_language_text_path(sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    reference, model = vision_language_models(
        "qwen3_5",
        {
            **tiny_config("qwen3_5_text").to_dict(),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.25,
            },
        },
    )
    prepare_model(model)
    check_tree_support(model)
    four = packed["position_ids"].expand(4, 1, -1)
    expected, actual = run_separate(reference, sequences), run_packed(model, packed, position_ids=four)
    assert actual.difference(expected) <= FORWARD_ABSOLUTE
    assert_gradients_close(gradients(model, actual), gradients(reference, expected))
    with torch.no_grad():
        trl = run_packed(model, packed, position_ids=four[:3], **tree_kwargs(packed))
    assert trl.difference(expected) <= FORWARD_ABSOLUTE
    with pytest.raises(ValueError, match=r"position_ids must be \(N,\) or \(1, N\), got \(3, 1"):
        run_packed(model, packed, position_ids=four[:3])


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "falcon_h1",
            {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
            "FalconH1Mixer at model.layers.0.mamba",
        ),
        ("jamba", {"num_experts": 2}, "JambaMambaMixer at model.layers.0.mamba"),
        ("mamba", {}, "mamba has recurrent layers without tree support"),
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "linear_attention layers",
        ),
    ],
)
def test_the_rest_is_refused_with_the_reason(model_type: str, settings: dict[str, Any], reason: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **settings))
    with pytest.raises(NotImplementedError, match="cannot run tree-packed rows: .*" + re.escape(reason)):
        prepare_model(model)
    assert hybrid_support(model) is None
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_recurrent_layers_is_left_alone() -> None:
    model = tiny_model("llama", attn_implementation="treepack")
    support = prepare_model(model)
    assert support.mode == "tree"
    assert not any(module._forward_pre_hooks for module in model.modules())
    check_tree_support(model)
    support.uninstall()
    assert hybrid_support(model) is None


def test_a_prepared_model_is_still_checked_for_the_rest() -> None:
    model = prepared("qwen3_next", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(NotImplementedError, match="dynamic rope depends") as raised:
        check_tree_support(model)
    assert "recurrent" not in str(raised.value)


def test_wrappers_and_copies() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = tiny_model("lfm2", attn_implementation="treepack")
    support = prepare_model(Wrapper(model))
    check_tree_support(Wrapper(model))
    check_tree_support(model.base_model)
    twin = copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match="unless prepare_model"):
        check_tree_support(twin)
    assert prepare_model(twin).mode == "tree"
    check_tree_support(twin)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None, "the handle keeps the model alive"
    support.uninstall()
    check_tree_support(twin)
    with pytest.raises(ValueError, match="must contain a transformers PreTrainedModel, got Linear"):
        prepare_model(nn.Linear(2, 2))


# peft asks for it under its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_train_on_packed_rows(sequences: list[Tensor], packed: dict[str, Tensor]) -> None:
    adapted = []
    for model in (tiny_model("lfm2"), prepared("lfm2")):
        lora = LoraConfig(target_modules=["in_proj", "out_proj", "q_proj"], r=4)
        adapted.append(get_peft_model(model, lora))
        randomize(adapted[-1])
    reference, model = adapted
    check_tree_support(model)
    expected, actual = run_separate(reference, sequences), run_packed(model, packed)
    assert actual.difference(expected) <= FORWARD_ABSOLUTE
    trained = gradients(model, actual)
    assert trained
    assert all("lora" in name for name in trained)
    assert_gradients_close(trained, gradients(reference, expected))


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_recurrence", None)
    with pytest.raises(ImportError, match=r'pip install "treepack\[hybrid\]"'):
        prepare_model(tiny_model("lfm2"))
