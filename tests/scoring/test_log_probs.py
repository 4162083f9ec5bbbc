"""token_log_probs against the plain formula: values, gradients, precision, memory, refusals."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treepack import token_log_probs
from treepack.scoring import log_probs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def inputs(num_tokens=40, hidden_size=12, vocab=50, count=70, *, dtype=torch.float64, device="cpu", scale=1.0):
    """Indices repeat and are out of order; the first and the last token of the vocabulary are among the targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64)
    index = torch.randint(num_tokens, (count,), generator=generator)
    targets = torch.randint(vocab, (count,), generator=generator)
    if count > 1:
        targets[0], targets[-1] = 0, vocab - 1
    hidden, head = (tensor.to(device, dtype).requires_grad_() for tensor in (hidden, head))
    return hidden, head, index.to(device), targets.to(device)


def plain(hidden, head, index, targets, temperature=1.0):
    logits = hidden[index] @ head.T / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks that divide neither the tokens nor the vocabulary."""
    monkeypatch.setattr(log_probs, "BLOCK_P", 16)
    monkeypatch.setattr(log_probs, "BLOCK_V", 7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_chunks")
def test_values_and_gradients_equal_the_plain_formula(dtype, temperature, device):
    hidden, head, index, targets = inputs(dtype=dtype, device=device)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    expected = plain(*exact, index, targets, temperature)
    found = token_log_probs(hidden, head, index, targets, temperature)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Low-precision inputs lose nothing in the forward: products are accumulated and kept in float32.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, len(index), device=device, dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights.to(found.dtype)).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    for tensor, reference in zip((hidden, head), exact):
        assert tensor.grad.dtype == dtype
        torch.testing.assert_close(
            tensor.grad.double(), reference.grad, rtol=tolerance, atol=tolerance * float(reference.grad.abs().max())
        )


@pytest.mark.usefixtures("small_chunks")
def test_gradcheck():
    hidden, head, index, targets = inputs(num_tokens=5, hidden_size=3, vocab=16, count=20)
    assert torch.autograd.gradcheck(
        lambda h, w: token_log_probs(h, w, index, targets, 0.8), (hidden, head), check_undefined_grad=False
    )


@pytest.mark.parametrize("only", [0, 1])
def test_a_frozen_side_gets_no_gradient(only):
    pair = list(inputs()[:2])
    pair[1 - only] = pair[1 - only].detach()
    token_log_probs(*pair, *inputs()[2:]).sum().backward()
    expected = [tensor.detach().requires_grad_(i == only) for i, tensor in enumerate(pair)]
    plain(*expected, *inputs()[2:]).sum().backward()
    assert pair[1 - only].grad is None
    torch.testing.assert_close(pair[only].grad, expected[only].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_lower_the_precision(dtype):
    hidden, head, index, targets = inputs(dtype=dtype)
    expected = token_log_probs(hidden, head, index, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(token_log_probs(hidden, head, index, targets), expected)


@pytest.mark.usefixtures("small_chunks")
def test_large_logits_neither_overflow_nor_lose_the_rest():
    hidden, head, index, targets = inputs(dtype=torch.float32, scale=300.0)
    found = token_log_probs(hidden, head, index, targets)
    expected = plain(hidden.double(), head.double(), index, targets)
    assert expected.min() < -1000
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small_chunks")
def test_repeats_bit_for_bit(device):
    runs = []
    for _ in range(3):
        hidden, head, index, targets = inputs(num_tokens=3, count=500, dtype=torch.float32, device=device)
        found = token_log_probs(hidden, head, index, targets)
        found.square().sum().backward()
        runs.append((found, hidden.grad, head.grad))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, views of existing ones aside."""

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, leaf.numel())
        return out


def test_memory_is_that_of_one_chunk(monkeypatch):
    monkeypatch.setattr(log_probs, "BLOCK_P", 128)
    monkeypatch.setattr(log_probs, "BLOCK_V", 1024)
    hidden, head, index, targets = inputs(num_tokens=600, hidden_size=4, vocab=6000, count=600, dtype=torch.float32)
    with LargestTensor([hidden, head]) as chunked:
        token_log_probs(hidden, head, index, targets).sum().backward()
    with LargestTensor([hidden, head]) as all_at_once:
        plain(hidden, head, index, targets)
    assert chunked.numel == 128 * 1024
    assert all_at_once.numel == 600 * 6000


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_nothing_to_score(index_dtype):
    hidden, head, _, _ = inputs()
    none = torch.empty(0, dtype=index_dtype)
    found = token_log_probs(hidden, head, none, none)
    assert found.shape == (0,)
    found.sum().backward()
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_strided_inputs():
    hidden, head, index, targets = (tensor.detach() for tensor in inputs())
    wide = torch.stack([hidden, -hidden], dim=1)[:, 0]
    assert not wide.is_contiguous()
    torch.testing.assert_close(
        token_log_probs(wide, head.T.contiguous().T, index.repeat_interleave(2)[::2], targets.int()),
        plain(hidden, head, index, targets),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.ones(3, 2, dtype=torch.int64)}, TypeError, "hidden must be float64, .* got torch.int64"),
        ({"hidden": torch.ones(3, 2, dtype=torch.float32)}, TypeError, "head_weight must be of hidden's dtype"),
        ({"hidden": torch.ones(1, 3, 2, dtype=torch.float64)}, ValueError, r"hidden must be \(N, H\), got .*1, 3, 2"),
        ({"head_weight": torch.ones(5, 3, dtype=torch.float64)}, ValueError, r"head_weight must be \(V, 2\)"),
        ({"token_index": torch.tensor([0, 3])}, ValueError, r"token_index must lie in \[0, 3\), got 3"),
        ({"token_index": torch.tensor([0.0, 1.0])}, TypeError, "token_index must be int32 or int64"),
        ({"targets": torch.tensor([-100, 1])}, ValueError, r"targets must lie in \[0, 5\), got -100"),
        ({"targets": torch.tensor([[0, 1]])}, ValueError, r"targets must be \(P,\)"),
        ({"targets": torch.tensor([0])}, ValueError, "targets must have token_index's shape"),
        ({"targets": torch.empty(2, dtype=torch.int64, device="meta")}, ValueError, "targets must be on hidden's"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be positive, got nan"),
    ],
)
def test_refusals(change, error, message):
    good = {
        "hidden": torch.ones(3, 2, dtype=torch.float64),
        "head_weight": torch.ones(5, 2, dtype=torch.float64),
        "token_index": torch.tensor([0, 2]),
        "targets": torch.tensor([4, 1]),
    }
    token_log_probs(**good)
    with pytest.raises(error, match=message):
        token_log_probs(**{**good, **change})
