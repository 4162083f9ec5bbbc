"""A model on each sequence alone and on all of them packed, and how far apart the results may be."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

FORWARD_ABSOLUTE = 2e-5
GRADIENT_RELATIVE = 1e-4
# What a wrong mask changes at the very least; three orders above the bound it must exceed.
WRONG_MASK = 2e-2


@dataclass(frozen=True)
class Outputs:
    """Per sample: logits (L, V) and the hidden states of every layer (layers + 1, L, H)."""

    logits: list[Tensor]
    hidden: list[Tensor]

    def difference(self, other: "Outputs") -> float:
        mine, others = self.logits + self.hidden, other.logits + other.hidden
        return max((a - b).abs().max().item() for a, b in zip(mine, others))


def tree_kwargs(packed: dict[str, Tensor]) -> dict[str, Tensor | int]:
    """What TRL's compute_loss passes to the model besides tokens and positions, under TRL's names."""
    kwargs: dict[str, Tensor | int] = {
        name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    }
    kwargs["tree_max_seqlen_q"], kwargs["tree_max_seqlen_k"] = packed["tree_max_seqlens"].tolist()
    return kwargs


def run_separate(model: PreTrainedModel, sequences: list[Tensor]) -> Outputs:
    runs = [model(input_ids=ids[None], use_cache=False, output_hidden_states=True) for ids in sequences]
    return Outputs([run.logits[0] for run in runs], [torch.stack(run.hidden_states)[:, 0] for run in runs])


def run_packed(model: PreTrainedModel, packed: dict[str, Tensor], **kwargs: object) -> Outputs:
    arguments: dict[str, object] = {
        "input_ids": packed["input_ids"][None],
        "position_ids": packed["position_ids"][None],
        "use_cache": False,
        "output_hidden_states": True,
        **kwargs,
    }
    run = model(**arguments)
    paths = [packed["positions"][start:stop] for start, stop in zip(packed["offsets"][:-1], packed["offsets"][1:])]
    hidden = torch.stack(run.hidden_states)[:, 0]
    return Outputs([run.logits[0, path] for path in paths], [hidden[:, path] for path in paths])


def gradients(model: PreTrainedModel, outputs: Outputs) -> dict[str, Tensor]:
    """The gradients of one fixed linear function of all samples' logits."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(7)
    loss = sum((logits * torch.randn(logits.shape, generator=generator)).sum() for logits in outputs.logits)
    assert isinstance(loss, Tensor)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max().item()
        assert error <= GRADIENT_RELATIVE * gradient.abs().max().item(), name
