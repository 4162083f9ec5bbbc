"""LogProbScorer: one packed forward gives the log-probabilities of each completion alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from support.models import sample_sequences, tiny_model
from support.samples import sample
from support.scorers import score_group
from treepack import LogProbScorer, register_attention
from treepack.scoring import log_prob_scorer
from treepack.scoring.log_probs import token_log_probs


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_attention()


def packed_model(name="qwen3", **overrides):
    return tiny_model(name, attn_implementation="treepack", **overrides)


def samples_of(sequences, masks=None, **more):
    made = [sample(i, 0, len(sequences), ids, rewards={}, finished=True, **more) for i, ids in enumerate(sequences)]
    for one, mask in zip(made, masks or []):
        one["completion_mask"] = np.asarray(mask)
    return made


def alone(model, samples):
    """(summed log-probability, number of tokens) of each completion, a forward a sample."""
    out = []
    for one in samples:
        ids = torch.as_tensor(one["input_ids"])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), dim=-1)
        scored = [t for t in range(1, len(ids)) if one["completion_mask"][t]]
        out.append((sum(log_probs[t - 1, ids[t]].item() for t in scored), len(scored)))
    return np.array(out).T


@pytest.mark.parametrize("token_budget", [400, 30, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_equals_scoring_alone(name, reduction, token_budget):
    """Masks that alternate, shared prefixes, duplicates, strict prefixes; in one chunk, several, one a sequence."""
    sequences = sample_sequences()
    masks = [np.arange(len(ids)) % 7 >= 3 for ids in sequences]
    masks[0][0] = True  # nothing predicts a first token
    samples = samples_of(sequences, masks)
    scorer = LogProbScorer(packed_model(name), token_budget=token_budget, reduction=reduction)
    total, count = alone(tiny_model(name, attn_implementation="sdpa"), samples)
    rewards, _ = score_group(scorer, samples)
    np.testing.assert_allclose(rewards, total / count if reduction == "mean" else total, rtol=2e-5)
    assert np.ptp(rewards) > 0.1


def test_without_sharing():
    samples = samples_of(sample_sequences(), prompt=9)
    model = packed_model()
    shared, _ = score_group(LogProbScorer(model, token_budget=400), samples)
    chains, _ = score_group(LogProbScorer(model, token_budget=400, share_prefixes=False), samples)
    np.testing.assert_allclose(shared, chains, rtol=1e-5)


def test_each_packed_token_is_scored_once(monkeypatch):
    counts = []

    def counted(hidden, head_weight, token_index, targets):
        counts.append(len(targets))
        return token_log_probs(hidden, head_weight, token_index, targets)

    monkeypatch.setattr(log_prob_scorer, "token_log_probs", counted)
    ids = np.arange(5, 25)
    score_group(LogProbScorer(packed_model(), token_budget=400), samples_of([ids, ids, ids[:11]], prompt=4), ranks=1)
    assert counts == [16]


def test_a_sample_without_a_completion_is_not_applicable():
    samples = samples_of([[5, 6, 7, 8], [9, 6, 7], [9, 5, 5]], [[0, 0, 1, 1], [0, 0, 0], [1, 0, 0]])
    rewards, _ = score_group(LogProbScorer(packed_model(), token_budget=400, name="kl"), samples)
    assert np.isnan(rewards).tolist() == [False, True, True]
    assert rewards[0] < 0


@pytest.mark.parametrize("lengths", [[20, 20, 20], [20]])
def test_rows_line_up(lengths):
    """A row with two chunks beside one with a single chunk; a row with a sample beside one with a filler."""
    samples = samples_of([np.arange(i, i + length) for i, length in enumerate(lengths, 5)], prompt=2)
    scorer = LogProbScorer(packed_model(), token_budget=20)
    calls = []
    features = scorer.features
    scorer.features = lambda trainer, inputs: calls.append(1) or features(trainer, inputs)
    rewards, _ = score_group(scorer, samples, ranks=2)
    total, count = alone(tiny_model("qwen3", attn_implementation="sdpa"), samples)
    np.testing.assert_allclose(rewards, total / count, rtol=2e-5)
    assert len(calls) == (4 if len(lengths) == 3 else 2)


def test_log_probs_that_are_not_finite_are_refused():
    model = packed_model()
    scorer = LogProbScorer(model, token_budget=400, name="reference")
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    samples = samples_of([[5, 6, 7], [5, 77, 7]])
    with pytest.raises(ValueError, match="scorer 'reference': log-probabilities must be finite, got nan for sample 1"):
        score_group(scorer, samples)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gemma2", {"final_logit_softcapping": 20.0}),
        ("cohere2", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
    ],
)
def test_logits_that_are_more_than_a_product_are_refused(name, overrides):
    with pytest.raises(NotImplementedError, match=r"its logits are not its head's weight times"):
        LogProbScorer(packed_model(name, **overrides), token_budget=100)


@pytest.mark.parametrize(("name", "overrides"), [("gemma2", {"final_logit_softcapping": None}), ("cohere2", {})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_logits_are_accepted(name, overrides, dtype):
    LogProbScorer(packed_model(name, **overrides).to(dtype), token_budget=100)


def test_refusals():
    model = packed_model()
    with pytest.raises(ValueError, match=r"reduction must be one of \('mean', 'sum'\), got 'max'"):
        LogProbScorer(model, token_budget=10, reduction="max")
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        LogProbScorer(model, token_budget=0)
    with pytest.raises(ValueError, match="attn_implementation='treepack', got 'sdpa'"):
        LogProbScorer(tiny_model("qwen3", attn_implementation="sdpa"), token_budget=10)
    classifier = packed_model(auto_class=AutoModelForSequenceClassification, num_labels=1)
    with pytest.raises(ValueError, match=r"causal language model with a linear head, got Qwen3ForSequenceClass"):
        LogProbScorer(classifier, token_budget=10)
    with pytest.raises(NotImplementedError, match="rope"):
        LogProbScorer(
            packed_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
            token_budget=10,
        )
