"""EBFTScorer against a plain implementation written from the formula, a forward a sequence."""

import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModel

from support.models import sample_sequences, tiny_model
from support.samples import sample
from support.scorers import score_group
from treepack import EBFTScorer, ScoredRow, register_attention

REFERENCE = [61, 62, 63, 64, 65]
DEPTH = 4  # the default fractions are then its layers 1, 2 and 3


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_attention()


def packed_model(name="qwen3", **overrides):
    depth = {"n_layer": DEPTH} if name == "gpt2" else {"num_hidden_layers": DEPTH}
    return tiny_model(name, attn_implementation="treepack", **{**depth, **overrides})


def group_samples(sequences=None, *, prompt=9, reference=REFERENCE, **more):
    """By default a prompt of 9 tokens, its samples, a duplicate and a strict prefix among them."""
    sequences = [ids.numpy() for ids in sample_sequences()[:5]] if sequences is None else sequences
    sequences = [*sequences, sequences[1].copy(), sequences[1][: prompt + 2]]
    keys = {} if reference is None else {"reference_ids": reference}
    size = len(sequences)
    return [
        sample(i, 0, size, ids, prompt=prompt, rewards={}, finished=True, **keys, **more)
        for i, ids in enumerate(sequences)
    ]


def features_alone(model, ids, mask, *, layers, pooling):
    """The features of one sequence, forwarded alone."""
    with torch.no_grad():
        states = model(input_ids=torch.as_tensor(ids)[None], output_hidden_states=True).hidden_states
    parts = []
    for layer in layers:
        hidden = states[layer][0].double()  # the output of `layer` layers; the embeddings are number 0
        n = len(ids)
        if pooling == "last_token":
            parts.append(hidden[-1])
        elif pooling == "mean":
            parts.append(hidden.mean(dim=0))
        elif pooling == "completion_mean":
            parts.append(hidden[torch.as_tensor(np.asarray(mask)) == 1].mean(dim=0))
        else:
            parts += [hidden[n // 4], hidden[n // 2], hidden[3 * n // 4]]
    return torch.cat(parts)


def plain_rewards(f, f_ref, *, a=1.0, b=1.0, whiten=False, normalize=True):
    n = len(f)
    if whiten:
        moment = sum(torch.outer(x, x) for x in f) / n
        values, vectors = torch.linalg.eigh(moment)
        root = torch.where(values > 1e-10 * values[-1], values.clamp(min=1e-300) ** -0.5, 0.0)
        whitening = vectors @ torch.diag(root) @ vectors.T
        f, f_ref = [whitening @ x for x in f], whitening @ f_ref
    if normalize:
        f, f_ref = [x / x.norm() for x in f], f_ref / f_ref.norm()
    rewards = []
    for j in range(n):
        others = sum(torch.dot(f[j], f[i]) for i in range(n) if i != j)
        rewards.append(2 * a * torch.dot(f[j], f_ref) - (2 * b / (n - 1) * others if n > 1 else 0.0))
    cfm = (sum(f) / n - f_ref).norm() ** 2
    return np.array([float(reward) for reward in rewards]), float(cfm)


@pytest.mark.parametrize("pooling", ["last_token", "mean", "completion_mean", "concat"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": False},
        {"whiten": True},
        {"whiten": True, "normalize": False},
        {"alignment_coef": 0.5, "diversity_coef": 2.0},
    ],
)
def test_equals_the_formula(pooling, options):
    samples = group_samples()
    scorer = EBFTScorer(packed_model(), token_budget=60, pooling=pooling, **options)
    alone = tiny_model("qwen3", attn_implementation="sdpa", num_hidden_layers=DEPTH)
    how = {"layers": [1, 2, 3], "pooling": pooling}
    f = [features_alone(alone, s["input_ids"], s["completion_mask"], **how) for s in samples]
    reference = np.r_[samples[0]["input_ids"][:9], REFERENCE]
    f_ref = features_alone(alone, reference, np.r_[np.zeros(9), np.ones(5)], **how)
    names = {"alignment_coef": "a", "diversity_coef": "b"}
    expected, cfm = plain_rewards(f, f_ref, **{names.get(key, key): value for key, value in options.items()})
    rewards, metrics = score_group(scorer, samples)
    tolerance = 1e-4 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(rewards, expected, atol=tolerance)
    assert np.ptp(rewards) > 100 * tolerance
    assert metrics["ebft/cfm_loss"] == pytest.approx(cfm, rel=1e-3)
    mean_reward = 2 * metrics["ebft/alignment"] * scorer.alignment_coef
    mean_reward -= 2 * metrics["ebft/diversity"] * scorer.diversity_coef
    assert rewards.mean() == pytest.approx(mean_reward)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("auto_class", [None, AutoModel])
def test_other_models_with_and_without_a_head(name, auto_class):
    make = {"auto_class": auto_class} if auto_class else {}
    if name == "gemma3_text":
        make["layer_types"] = ["sliding_attention", "full_attention"] * 2
    depth = {"n_layer": DEPTH} if name == "gpt2" else {"num_hidden_layers": DEPTH}
    alone = tiny_model(name, attn_implementation="sdpa", **{**depth, **make})
    samples = group_samples()
    f = [features_alone(alone, s["input_ids"], None, layers=[1, 2, 3], pooling="mean") for s in samples]
    reference = np.r_[samples[0]["input_ids"][:9], REFERENCE]
    f_ref = features_alone(alone, reference, None, layers=[1, 2, 3], pooling="mean")
    scorer = EBFTScorer(packed_model(name, **make), token_budget=400, pooling="mean")
    rewards, _ = score_group(scorer, samples)
    np.testing.assert_allclose(rewards, plain_rewards(f, f_ref)[0], atol=1e-4)


def test_pad_tokens_are_tokens_like_any_other():
    # case 43 (transformers#35352): the last token is found by its recorded offset, not by looking for padding
    sequences = [np.array([5, 9, 0, 11, 0]), np.array([5, 9, 0, 11, 12]), np.array([5, 9, 0, 0, 0])]
    samples = group_samples(sequences, prompt=2)
    alone = tiny_model("qwen3", attn_implementation="sdpa", num_hidden_layers=DEPTH)
    how = {"layers": [1, 2, 3], "pooling": "last_token"}
    f = [features_alone(alone, one["input_ids"], None, **how) for one in samples]
    f_ref = features_alone(alone, np.r_[[5, 9], REFERENCE], None, **how)
    rewards, _ = score_group(EBFTScorer(packed_model(), token_budget=400), samples)
    np.testing.assert_allclose(rewards, plain_rewards(f, f_ref)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("depth", "fractions", "expected"),
    [(4, (0.25, 0.5, 0.75), [0, 1, 2]), (3, (0.25, 0.5, 0.75), [0, 1]), (3, (1.0, 0.01), [0, 2]), (2, (0.99,), [0])],
)
def test_layers_by_fraction_of_the_depth(depth, fractions, expected):
    model = tiny_model("llama", attn_implementation="treepack", num_hidden_layers=depth)
    scorer = EBFTScorer(model, token_budget=10, layers=fractions)
    assert [list(model.model.layers).index(layer) for layer in scorer.layers] == expected


def test_the_reference_is_forwarded_once_a_group():
    samples = group_samples()
    scorer = EBFTScorer(packed_model(), token_budget=400)
    uids = []
    features = scorer.features

    def watched(trainer, inputs):
        found = features(trainer, inputs)
        uids.extend(found[0].tolist())
        return found

    scorer.features = watched
    score_group(scorer, samples)
    assert sorted(uids) == [-2, *range(len(samples))]
    assert not any(module._forward_hooks for module in scorer.model.modules())


def test_the_reference_follows_the_prompt():
    scorer = EBFTScorer(packed_model(), token_budget=400)
    samples = group_samples(prompt=3)
    samples[0]["completion_mask"][:] = 0  # a sample that trains nothing does not show where its prompt ends
    samples[1]["completion_mask"][5] = 0
    (extra,) = scorer.group_extras(samples)
    assert extra["input_ids"].tolist() == [*samples[1]["input_ids"][:3], *REFERENCE]
    assert extra["completion_mask"].tolist() == [0] * 3 + [1] * 5


@pytest.mark.parametrize("case", ["no reference", "no completion"])
def test_a_group_it_does_not_apply_to(case):
    samples = group_samples(reference=None if case == "no reference" else REFERENCE)
    if case == "no completion":
        for one in samples:
            one["completion_mask"][:] = 0
    scorer = EBFTScorer(packed_model(), token_budget=400)
    assert scorer.group_extras(samples) == []
    rewards, metrics = score_group(scorer, samples)
    assert np.isnan(rewards).all()
    assert not any(name.startswith("ebft/") for name in metrics)


@pytest.mark.parametrize("whiten", [False, True])
def test_a_sample_without_a_completion_counts_nowhere(whiten):
    samples = group_samples()
    scorer = EBFTScorer(packed_model(), token_budget=400, pooling="completion_mean", whiten=whiten)
    without = [{**one, "group_size": len(samples) - 1} for one in samples if one["uid"] != 2]
    expected, _ = score_group(scorer, without)
    samples[2]["completion_mask"][:] = 0
    rewards, _ = score_group(scorer, samples)
    assert np.isnan(rewards[2])
    np.testing.assert_allclose(np.delete(rewards, 2), expected, atol=1e-5)


def test_one_sample_has_no_diversity_term():
    ids = sample_sequences()[0].numpy()
    one = sample(0, 0, 1, ids, prompt=9, rewards={}, finished=True, reference_ids=ids[9:])
    rewards, metrics = score_group(EBFTScorer(packed_model(), token_budget=400), [one], ranks=1)
    np.testing.assert_allclose(rewards, [2.0], atol=1e-5)  # it equals the reference
    assert metrics["ebft/diversity"] == 0.0
    assert metrics["ebft/cfm_loss"] == pytest.approx(0.0, abs=1e-6)


def test_whitening_is_blind_to_the_scale_of_a_direction():
    generator = torch.Generator().manual_seed(0)
    f, f_ref = torch.randn(6, 4, generator=generator), torch.randn(1, 4, generator=generator)
    scorer = EBFTScorer(packed_model(), token_budget=10, whiten=True)
    stretch = torch.tensor([1.0, 50.0, 0.1, 3.0])
    np.testing.assert_allclose(
        scorer.group_rewards(f, f_ref)[0], scorer.group_rewards(f * stretch, f_ref * stretch)[0], atol=1e-4
    )


def test_hidden_states_are_let_go_of_while_the_forward_runs():
    scorer = EBFTScorer(packed_model(), token_budget=400)
    row = ScoredRow()
    for one in group_samples():
        row.add(one)
    (tensors,), _ = scorer.collate([row], 0)
    inputs = {key.removeprefix("c0_"): tensor for key, tensor in tensors.items()}
    outputs = []
    alive = []

    def watch(_module, _args, output):
        alive.append([number for number, seen in enumerate(outputs, 1) if seen() is not None])
        outputs.append(weakref.ref(output))

    for layer in scorer.model.model.layers:
        layer.register_forward_hook(watch)
    with torch.no_grad():
        _, features = scorer.features(None, inputs)
    assert features.shape == (7, 3 * 64)
    assert alive[-1] == [3], "of the layers before, only what the last one reads"


def test_features_that_are_not_finite_are_refused():
    model = packed_model()
    scorer = EBFTScorer(model, token_budget=400)
    with torch.no_grad():
        model.get_input_embeddings().weight[REFERENCE[0]] = torch.nan
    with pytest.raises(ValueError, match="scorer 'ebft': features must be finite"):
        score_group(scorer, group_samples())


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ([], ValueError, r"reference_ids must be a non-empty \(m,\), got shape \(0,\) in sample uid 0"),
        ([[1, 2]], ValueError, r"got shape \(1, 2\)"),
        ([0.5, 1.0], TypeError, "reference_ids must hold integers, got float64 in sample uid 0"),
    ],
)
def test_refused_references(reference, error, message):
    scorer = EBFTScorer(packed_model(), token_budget=400)
    with pytest.raises(error, match=message):
        scorer.group_extras(group_samples(reference=reference))
    samples = group_samples()
    samples[4]["reference_ids"] = [1, 2]
    with pytest.raises(
        ValueError, match="reference_ids must be the same in all samples of a group, got others in uid 4"
    ):
        scorer.group_extras(samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling must be one of .* got 'max'"),
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        ({"layers": ()}, r"layers must be fractions .* got \(\)"),
        ({"layers": (0.5, 8)}, r"layers must be fractions .* got \(0.5, 8\)"),
        ({"layers": (0,)}, "layers must be fractions"),
        ({"diversity_coef": float("inf")}, "diversity_coef must be finite, got inf"),
        ({"alignment_coef": float("nan")}, "alignment_coef must be finite, got nan"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        EBFTScorer(packed_model(), **{"token_budget": 10, **options})


def test_refused_model():
    with pytest.raises(ValueError, match="attn_implementation='treepack', got 'eager'"):
        EBFTScorer(tiny_model("llama"), token_budget=10)
