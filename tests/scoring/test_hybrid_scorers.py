"""Scorers and planner on models with recurrent layers: as `prepare_model` says, trees or chains."""

import sys
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import tree_recurrence
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from support.models import sample_sequences, tiny_model
from support.samples import sample
from support.scorers import score_group
from treepack import (
    EBFTScorer,
    LogProbScorer,
    RewardModelScorer,
    StepPlanner,
    check_tree_support,
    pack_sequences,
    register_attention,
    unpack_sequences,
)
from treepack.kernels.hybrid import prepare_model
from treepack.scoring.errors import ModelError
from treepack.scoring.models import load_scorer

register_attention()


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    tree_recurrence.uninstall()


@pytest.fixture
def llama_by_chains() -> Iterator[None]:
    """tree-recurrence has no family of mode "chains" of its own: let it take a llama's MLPs for one."""
    family = tree_recurrence.TreeFamily("probe", ("llama",), ("LlamaMLP",), ("mlp",), support="chains")
    tree_recurrence.register_family(family)
    yield
    tree_recurrence.unregister_family(family.name)


def group_samples():
    sequences = sample_sequences()
    return [
        sample(i, 0, len(sequences), ids.numpy(), rewards={}, finished=True, reference_ids=[61, 62, 63])
        for i, ids in enumerate(sequences)
    ]


def prepared(name, **overrides):
    model = tiny_model(name, attn_implementation="treepack", **overrides)
    prepare_model(model)
    return model


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (RewardModelScorer, "qwen3_5_text"),
        (LogProbScorer, "lfm2"),
        (LogProbScorer, "mamba2"),
        (EBFTScorer, "bamba"),
    ],
)
def test_packed_scores_equal_scores_alone(kind, name):
    classes = {RewardModelScorer: AutoModelForSequenceClassification, EBFTScorer: AutoModel}
    model = prepared(name, auto_class=classes.get(kind, AutoModelForCausalLM), num_labels=1)
    scorer, samples = kind(model, token_budget=60), group_samples()
    assert scorer.share_prefixes
    rewards, _ = score_group(scorer, samples)
    # One sequence a forward, without tree arguments and under another attention: transformers' own path.
    scorer.token_budget = 1
    scorer.model.set_attn_implementation("eager")
    inputs_of = scorer.run_base
    alone = {"input_ids": None, "position_ids": None, "use_cache": None}
    scorer.run_base = lambda inputs: inputs_of({key: inputs[key] for key in alone})
    expected, _ = score_group(scorer, samples)
    np.testing.assert_allclose(rewards, expected, atol=2e-5, rtol=2e-5)
    assert np.ptp(expected) > 1e-2


def test_unprepared_models_are_refused():
    model = tiny_model("lfm2", attn_implementation="treepack")
    with pytest.raises(NotImplementedError, match="unless prepare_model can make them follow the tree"):
        LogProbScorer(model, token_budget=100)


def test_the_command_prepares_the_checkpoint_it_loads(tmp_path, monkeypatch):
    tiny_model("lfm2").save_pretrained(tmp_path)
    load = {"vocab_size": 100, "longest_row": 40, "token_budget": 60, "seed": 0}
    loaded = load_scorer("log-prob", tmp_path, **load)
    expected, _ = score_group(LogProbScorer(prepared("lfm2"), token_budget=60), group_samples())
    rewards, _ = score_group(loaded.scorer.inner, group_samples())
    np.testing.assert_array_equal(rewards, expected)
    monkeypatch.setitem(sys.modules, "tree_recurrence", None)
    with pytest.raises(ModelError, match=r'cannot score: .*pip install "treepack\[hybrid\]"'):
        load_scorer("log-prob", tmp_path, **load)


@pytest.mark.usefixtures("llama_by_chains")
def test_chains_need_no_asking_in_a_scorer():
    samples = group_samples()
    expected, _ = score_group(
        LogProbScorer(tiny_model("llama", attn_implementation="treepack"), token_budget=60), samples
    )
    scorer = LogProbScorer(prepared("llama"), token_budget=60)
    assert not scorer.share_prefixes
    rewards, _ = score_group(scorer, samples)
    np.testing.assert_allclose(rewards, expected, atol=2e-5)


@pytest.mark.usefixtures("llama_by_chains")
def test_the_planner_is_told_and_a_shared_row_refused():
    model = tiny_model("llama", attn_implementation="treepack")
    support = prepare_model(model)
    assert support.mode == "chains"
    assert "cannot follow a tree" in support.reason
    check_tree_support(model)
    samples = group_samples()
    planner = StepPlanner(
        samples,
        num_processes=1,
        steps=1,
        token_budget=400,
        samples_per_row=0,
        scorers=[],
        metrics=defaultdict(list),
        share_prefixes=support.shares_prefixes,
    )
    ((row,),) = planner
    assert row.num_tokens == sum(len(one["input_ids"]) for one in samples)

    ids = [one["input_ids"] for one in samples]
    chains, shared = (unpack_sequences(pack_sequences(ids, share))[0] for share in (False, True))
    with torch.no_grad():
        model(**chains)
        with pytest.raises(ValueError, match="share_prefixes must be False for this model's rows"):
            model(**shared)
    support.uninstall()
    with torch.no_grad():
        model(**shared)
