"""RewardModelScorer: one packed forward gives what scoring each sample alone gives."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

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


def scores_of(scorer, sequences, *, ranks=2, rollout_ids=None):
    samples = [
        sample(
            i, 0, len(sequences), ids.numpy(), rewards={}, rollout_id=None if rollout_ids is None else rollout_ids[i]
        )
        for i, ids in enumerate(sequences)
    ]
    shared = {"token_budget": 200, "scorers": [scorer], "metrics": defaultdict(list)}
    plan = StepPlanner(samples, num_processes=ranks, steps=1, samples_per_row=0, **shared)
    batches = [ScoringCollator(0, ranks, **shared)([rows]) for rows in plan]
    scores = score_step(LocalTrainer(scorer.model, [scorer]), batches)
    assert scores.names == (scorer.name,)
    return scores


def rewards_of(scorer, sequences, **options):
    return scores_of(scorer, sequences, **options).rewards[:, 0]


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


def word_tokenizer(words):
    """Ids by position in `words`; text is their words joined by blanks."""
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def letter_tokenizer(letters):
    """An id a letter, blanks left out."""
    made = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("token_budget", [100, 1])
def test_a_tokenizer_of_its_own(token_budget):
    """Re-tokenised text is scored at its own last token, found by its offset; its last token is the pad token here."""
    policy_words = ["ab", "cab", "dad", "bad", "a", "b"]
    letters = "xabcd"
    packed, alone = model_pair("qwen3", num_labels=1, pad_token_id=letters.index("d"))
    sequences = [torch.tensor(ids) for ids in ([0, 1, 2], [0, 1, 3], [0, 1], [4], [0, 1, 2, 5, 2])]
    scorer = RewardModelScorer(
        packed,
        token_budget=token_budget,
        tokenizer=letter_tokenizer(letters),
        policy_tokenizer=word_tokenizer(policy_words),
    )
    own = [[letters.index(letter) for i in ids.tolist() for letter in policy_words[i]] for ids in sequences]
    with torch.no_grad():
        hidden = [alone.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in own]
        expected = [alone.score(h).item() for h in hidden]
    np.testing.assert_allclose(rewards_of(scorer, sequences), expected, atol=2e-5)
    rewards_of(scorer, sequences[:1], ranks=3)  # two rows of fillers


def test_text_without_a_token():
    packed, _ = model_pair("qwen3", num_labels=1)
    scorer = RewardModelScorer(
        packed, token_budget=9, tokenizer=letter_tokenizer("xy"), policy_tokenizer=word_tokenizer(["x", "z"])
    )
    with pytest.raises(ValueError, match="must give a token for every sample, got none for 'z' of uid 1"):
        rewards_of(scorer, [torch.tensor([0]), torch.tensor([1])])


def test_tokens_that_the_model_does_not_know():
    packed, _ = model_pair("qwen3", num_labels=1, vocab_size=50)
    known = [torch.tensor([4, 49]), torch.tensor([4, 5])]
    assert np.isfinite(rewards_of(RewardModelScorer(packed, token_budget=9), known)).all()
    with pytest.raises(ValueError, match=r"'reward_model' must know .*\[0, 50\), got 50 in sample uid 1"):
        rewards_of(RewardModelScorer(packed, token_budget=9), [torch.tensor([4, 49]), torch.tensor([4, 50])])


@pytest.mark.parametrize("rows", ["last", "mean"])
def test_rollouts_of_several_rows(rows):
    packed, alone = model_pair("qwen3", num_labels=1)
    sequences = sample_sequences()[:5]
    rollout_ids = ["fork", "other", "fork", "third", "fork"]
    with torch.no_grad():
        each = np.array([alone(input_ids=ids[None]).logits[0, 0].item() for ids in sequences])
    forked = np.array([rollout_id == "fork" for rollout_id in rollout_ids])
    expected = each if rows == "last" else np.where(forked, each[forked].mean(), each)
    scorer = RewardModelScorer(packed, token_budget=100, rows=rows)
    scores = scores_of(scorer, sequences, rollout_ids=rollout_ids)
    np.testing.assert_allclose(scores.rewards[:, 0], expected, atol=2e-5)
    votes = expected[[1, 3, 4]]
    advantages = (expected - votes.mean()) / votes.std()
    np.testing.assert_allclose(scores.advantages, np.where(forked, advantages[4], advantages), atol=1e-4)


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
    with pytest.raises(ValueError, match=r"rows must be one of \('last', 'mean'\), got 'first'"):
        RewardModelScorer(packed, token_budget=100, label=0, rows="first")
    with pytest.raises(ValueError, match="tokenizer and policy_tokenizer must be given together, got one of them"):
        RewardModelScorer(packed, token_budget=100, label=0, tokenizer=word_tokenizer(["a"]))
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
