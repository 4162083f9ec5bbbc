"""RewardModelScorer: one packed forward gives what scoring each sample alone gives."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from support.models import sample_sequences, tiny_model
from support.samples import sample
from treepack import RewardModelScorer, ScoringCollator, StepPlanner, register_attention, score_step
from treepack.scoring.trainer import LocalTrainer


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_attention()


def model_pair(name, **overrides):
    """The same random model, packed and alone."""
    make = {"auto_class": AutoModelForSequenceClassification, **overrides}
    return tiny_model(name, attn_implementation="treepack", **make), tiny_model(
        name, attn_implementation="sdpa", **make
    )


def rewards_of(scorer, sequences, ranks=2):
    samples = [
        {**sample(i, 0, len(sequences), ids.numpy()), "rewards": {}, "finished": True}
        for i, ids in enumerate(sequences)
    ]
    shared = {"token_budget": 200, "scorers": [scorer], "metrics": defaultdict(list)}
    plan = StepPlanner(samples, num_processes=ranks, steps=1, samples_per_row=0, **shared)
    batches = [ScoringCollator(0, ranks, **shared)([rows]) for rows in plan]
    scores = score_step(LocalTrainer(scorer.model, [scorer]), batches)
    assert scores.names == (scorer.name,)
    return scores.rewards[:, 0]


@pytest.mark.parametrize("token_budget", [1000, 30, 1])
@pytest.mark.parametrize(("name", "labels", "label"), [("qwen3", 1, None), ("llama", 3, 2), ("mistral", 1, None)])
def test_equals_scoring_alone(name, labels, label, token_budget):
    packed, alone = model_pair(name, num_labels=labels)
    sequences = sample_sequences()
    scorer = RewardModelScorer(packed, token_budget=token_budget, label=label, name="quality")
    with torch.no_grad():
        expected = [alone(input_ids=ids[None]).logits[0, label or 0].item() for ids in sequences]
    np.testing.assert_allclose(rewards_of(scorer, sequences), expected, atol=2e-5)
    assert np.ptp(expected) > 0.1


def test_pad_token_inside_a_sequence_is_a_token_like_any_other():
    # case 43 (transformers#35352): pad == eos makes the model's own pooling stop at a turn boundary
    packed, alone = model_pair("qwen3", num_labels=1, pad_token_id=7)
    sequences = [torch.tensor([5, 9, 7, 11, 12]), torch.tensor([5, 9, 7, 11, 7]), torch.tensor([7, 7, 7])]
    with torch.no_grad():
        hidden = [alone.base_model(input_ids=ids[None]).last_hidden_state[0, -1] for ids in sequences]
        expected = [alone.score(h).item() for h in hidden]
    got = rewards_of(RewardModelScorer(packed, token_budget=100), sequences)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_one_token_and_identical_sequences():
    packed, alone = model_pair("qwen3", num_labels=1)
    sequences = [torch.tensor([4]), torch.tensor([4, 5]), torch.tensor([4]), torch.tensor([4, 5, 6])]
    with torch.no_grad():
        expected = [alone(input_ids=ids[None]).logits[0, 0].item() for ids in sequences]
    got = rewards_of(RewardModelScorer(packed, token_budget=100), sequences)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert got[0] == got[2]


def test_without_sharing():
    packed, _ = model_pair("qwen3", num_labels=1)
    sequences = sample_sequences()
    shared = rewards_of(RewardModelScorer(packed, token_budget=500), sequences)
    chains = rewards_of(RewardModelScorer(packed, token_budget=500, share_prefixes=False), sequences)
    np.testing.assert_allclose(shared, chains, atol=2e-5)


def test_refusals():
    packed, _ = model_pair("qwen3", num_labels=2)
    with pytest.raises(ValueError, match="label must say which of the model's 2 outputs is the reward"):
        RewardModelScorer(packed, token_budget=100)
    with pytest.raises(ValueError, match=r"label must be in \[0, 2\), got 2"):
        RewardModelScorer(packed, token_budget=100, label=2)
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        RewardModelScorer(packed, token_budget=0, label=0)
    causal = tiny_model("qwen3", auto_class=AutoModelForCausalLM)
    with pytest.raises(ValueError, match="with a `score` head, got Qwen3ForCausalLM"):
        RewardModelScorer(causal, token_budget=100)
    plain = tiny_model("qwen3", auto_class=AutoModelForSequenceClassification, num_labels=1)
    with pytest.raises(ValueError, match="model must be loaded with attn_implementation='treepack', got 'eager'"):
        RewardModelScorer(plain, token_budget=100)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic, _ = model_pair("llama", num_labels=1, rope_parameters=rope)
    with pytest.raises(NotImplementedError, match="dynamic"):
        RewardModelScorer(dynamic, token_budget=100)
