"""Which models and options TRL's construction takes under treepack, and that nothing of it stays behind."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from transformers import AttentionInterface, AutoModelForCausalLM

from support.models import CAUSAL_LMS, HYBRID_LMS, tiny_config
from support.trl_training import QueuedRollouts, losses_of, reset_accelerate, save_policy, scoring_trainer
from treepack import LogProbScorer, register_attention
from treepack.scoring import trl_init
from treepack.scoring.trl_layout import trainer_module

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

REPLACED = (
    "register_tree_attention",
    "get_peak_flops_per_device",
    "create_model_from_path",
    "add_fused_lm_head",
    "AsyncRolloutWorker",
    "compute_flops_per_token",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def untouched():
    """TRL's module is after the test as it was before."""
    before = {name: getattr(trainer_module, name) for name in REPLACED}
    yield
    assert {name: getattr(trainer_module, name) for name in REPLACED} == before


@pytest.mark.usefixtures("untouched")
def test_attention_sinks_train(tmp_path):
    """TRL refuses the model, and cannot count its FLOPs; here it trains, its sinks with it."""
    settings = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}
    policy = save_policy(tmp_path / "policy", "gpt_oss", **settings)
    trainer = scoring_trainer(policy, tmp_path, QueuedRollouts(20), more={"max_steps": 2})
    assert "named_parameters" not in vars(trainer.model)
    assert set(trainer.model.config.layer_types) == {"full_attention", "sliding_attention"}
    sinks = {name: sink.clone() for name, sink in trainer.model.named_parameters() if name.endswith(".sinks")}
    assert len(sinks) == 2
    trainer.train()
    assert all(torch.isfinite(torch.tensor(losses_of(trainer))))
    assert all(not torch.equal(sink, trainer.model.get_parameter(name)) for name, sink in sinks.items())


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba"])
def test_recurrent_layers_train_as_if_nothing_were_shared(tmp_path, name):
    """TRL refuses the models. Whatever leaks from sample to sample in a shared row shows against chains."""
    model_type, shape = HYBRID_LMS[name]
    shape = {"num_hidden_layers": 3, **shape}
    policy = save_policy(tmp_path / "policy", model_type, **shape)
    losses = {}
    for share_prefixes in (True, False):
        more = {"max_steps": 2, "groups_per_step": 2, "token_budget": 128, "share_prefixes": share_prefixes}
        more["router_aux_loss_coef"] = 0.0  # in a shared row the router's own loss counts a shared token once
        trainer = scoring_trainer(policy, tmp_path, QueuedRollouts(12), more=more)
        assert not set(trainer.model.config.layer_types) <= {"full_attention", "sliding_attention"}  # what TRL takes
        trainer.train()
        losses[share_prefixes] = losses_of(trainer)
        ratio = trainer.state.log_history[0]["batch/packing_ratio"]
        assert (ratio > 1.2) is share_prefixes
    assert losses[True] == pytest.approx(losses[False], abs=1e-5)


@pytest.mark.usefixtures("untouched")
def test_a_model_that_packed_rows_are_wrong_for_is_refused_with_the_reason(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    policy = save_policy(tmp_path / "policy", "llama", rope_parameters=rope)
    with pytest.raises(NotImplementedError, match="dynamic rope depends on the longest position"):
        scoring_trainer(policy, tmp_path, QueuedRollouts(1))


class Config:
    def __init__(self, layer_types):
        self.layer_types = layer_types

    def get_text_config(self):
        return self


class Model(torch.nn.Module):
    """What TRL's check of a model reads."""

    def __init__(self, layer_types):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(1))
        self.attention = torch.nn.Linear(1, 1)
        self.attention.sinks = torch.nn.Parameter(torch.zeros(1))
        self.config = Config(layer_types)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("layer_types", [["full_attention", "mlp"], None])
@pytest.mark.parametrize("fails", [False, True])
def test_what_trl_would_refuse_is_hidden_until_its_check_is_over(monkeypatch, layer_types, fails):
    model = Model(layer_types)
    names = [name for name, _ in model.named_parameters()]
    heads = []
    monkeypatch.setattr(trl_init, "prepare_model", lambda model: None)
    monkeypatch.setattr(trl_init, "check_tree_support", lambda model: None)
    monkeypatch.setattr(trainer_module, "create_model_from_path", lambda path: model)
    monkeypatch.setattr(
        trainer_module, "add_fused_lm_head", lambda model: heads.append([name for name, _ in model.named_parameters()])
    )

    def construct():
        with trl_init.adapted_construction(register=lambda: None, make_worker=lambda: None):
            loaded = trainer_module.create_model_from_path("somewhere")
            assert not any(name.endswith(".sinks") for name, _ in loaded.named_parameters())
            assert loaded.config.layer_types is None
            if fails:
                raise InterruptedError
            trainer_module.add_fused_lm_head(loaded)
            assert loaded.config.layer_types == layer_types

    if fails:
        with pytest.raises(InterruptedError):
            construct()
    else:
        construct()
        assert heads == [names]
    assert [name for name, _ in model.named_parameters()] == names
    assert vars(model.config) == {"layer_types": layer_types}
    assert type(model.config) is Config
    monkeypatch.undo()


def test_backend_and_determinism_reach_the_op(policy, tmp_path, monkeypatch):
    from treepack.kernels import hf_attention

    seen = set()

    def spy(*args, backend, deterministic, **options):
        seen.add((torch.is_grad_enabled(), backend, deterministic))
        return attend(*args, backend=backend, deterministic=deterministic, **options)

    register_attention()
    attend = hf_attention.tree_attention
    try:
        more = {"max_steps": 1, "attention_backend": "reference", "deterministic": True}
        frozen = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="treepack")
        scorers = [LogProbScorer(frozen, token_budget=64)]
        trainer = scoring_trainer(policy, tmp_path, QueuedRollouts(12), scorers=scorers, more=more)
        assert isinstance(AttentionInterface()["tree_fa3"], partial)
        monkeypatch.setattr(hf_attention, "tree_attention", spy)
        trainer.train()
    finally:
        register_attention()
    assert seen == {(True, "reference", True), (False, "reference", True)}  # the policy, the scorer


@pytest.mark.parametrize("name", [*CAUSAL_LMS, *HYBRID_LMS])
def test_layer_types_are_hidden_in_every_configuration(name):
    """Derived ones too, as Mamba2 and Bamba have them."""
    model = torch.nn.Module()
    model.config = tiny_config(name)
    before = model.config.to_dict()
    with trl_init._hidden_from_trl(model):
        assert model.config.get_text_config().layer_types is None
        assert model.config.model_type == before["model_type"]
    assert model.config.to_dict() == before


def first_losses(policy, folder, **more):
    trainer = scoring_trainer(policy, folder, QueuedRollouts(20), more={"max_steps": 2, **more})
    trainer.train()
    return losses_of(trainer)


def test_gradient_checkpointing_changes_no_loss(policy, tmp_path):
    plain = first_losses(policy, tmp_path / "a")
    assert first_losses(policy, tmp_path / "b", gradient_checkpointing=True) == pytest.approx(plain, abs=1e-6)


def test_step_normalization_is_one_mean_however_a_step_is_cut(policy, tmp_path):
    """The same groups in one micro-batch or in four."""
    shape = {"groups_per_step": 2, "loss_normalization": "step", "token_budget": 128, "placement": "balanced"}
    whole = first_losses(policy, tmp_path / "a", gradient_accumulation_steps=1, **shape)
    assert first_losses(policy, tmp_path / "b", gradient_accumulation_steps=4, **shape) == pytest.approx(
        whole, abs=1e-6
    )


def test_lora_trains_the_adapter_alone(policy, tmp_path):
    trainer = scoring_trainer(
        policy,
        tmp_path,
        QueuedRollouts(20),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    # Merging the adapter for each weight transfer and taking it out again rounds the base weights.
    changed = {
        name
        for name, parameter in trainer.model.named_parameters()
        if not torch.allclose(before[name], parameter, rtol=0, atol=1e-5)
    }
    assert changed == {name for name in before if "lora_" in name}
    assert len(changed) == 8


def test_an_adapter_on_the_head_is_trls_to_refuse(policy, tmp_path):
    head = LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="adapter on `lm_head`"):
        scoring_trainer(policy, tmp_path, QueuedRollouts(1), peft_config=head)
    reset_accelerate()
