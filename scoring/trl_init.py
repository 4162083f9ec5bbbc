"""What treepack changes about the construction of TRL's trainer, and only while it lasts.

`AsyncGRPOTrainer.__init__` looks all of this up in its module when it runs, so that is where it is replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from torch import nn

from treepack.kernels.hybrid import prepare_model
from treepack.kernels.tree_support import check_tree_support
from treepack.scoring.trl_layout import trainer_module


@contextmanager
def adapted_construction(*, register: Callable[[], None], make_worker: Callable[..., Any]) -> Iterator[None]:
    """Let TRL's `__init__` build a trainer around tree attention, on any device.

    While the context lasts
      - `register` runs in place of TRL's `register_tree_attention`;
      - the device's peak FLOPs are asked for on a GPU alone (TRL's probe fails on any other device);
      - `make_worker` makes the rollout worker, where TRL is given none, and is told the policy's `vocab_size` too;
      - the policy is prepared (`prepare_model`) and checked (`check_tree_support`) as soon as it is loaded. What that
        lets through and TRL refuses (attention sinks, other layers than attention) is hidden from TRL's own check.

    Everything is as before when the context is left, by an error too.

    Raises:
        NotImplementedError: inside, from `prepare_model` or `check_tree_support`.
    """
    probe, load = trainer_module.get_peak_flops_per_device, trainer_module.create_model_from_path
    add_head = trainer_module.add_fused_lm_head

    def probe_on_a_gpu(accelerator: Any, dtype: str) -> float | None:
        peak: float | None = probe(accelerator, dtype) if accelerator.device.type == "cuda" else None
        return peak

    loaded: list[Any] = []
    with ExitStack() as until_left:

        def load_checked(*args: Any, **kwargs: Any) -> nn.Module:
            model: nn.Module = load(*args, **kwargs)
            if find_spec("tree_recurrence") is not None:  # without the extra `hybrid` recurrent models are refused
                prepare_model(model)
            check_tree_support(model)
            loaded.append(model)
            hidden.enter_context(_hidden_from_trl(model))
            return model

        def make_worker_of_policy(**loop_kwargs: Any) -> Any:
            return make_worker(vocab_size=loaded[-1].config.get_text_config().vocab_size, **loop_kwargs)

        def add_head_to_whole(*args: Any, **kwargs: Any) -> None:
            hidden.close()  # TRL has looked
            add_head(*args, **kwargs)

        for name, value in (
            ("register_tree_attention", register),
            ("get_peak_flops_per_device", probe_on_a_gpu),
            ("create_model_from_path", load_checked),
            ("add_fused_lm_head", add_head_to_whole),
            ("AsyncRolloutWorker", make_worker_of_policy),
        ):
            until_left.enter_context(_replaced(trainer_module, name, value))
        hidden = until_left.enter_context(ExitStack())
        yield


@contextmanager
def uncountable_flops_are_nan() -> Iterator[None]:
    """Let TRL's step metrics go on without MFU where its FLOPs count does not know the architecture.

    It reads a configuration's `moe_intermediate_size` and the like, which gpt-oss, Mixtral and others have under other
    names or not at all, also where the result is not used.
    """
    count = trainer_module.compute_flops_per_token

    def count_or_nan(config: Any, seq_len: int) -> float:
        try:
            flops: float = count(config, seq_len)
        except AttributeError:
            return float("nan")
        return flops

    with _replaced(trainer_module, "compute_flops_per_token", count_or_nan):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _hidden_from_trl(model: Any) -> Iterator[None]:
    """Hide layer types and sinks: TRL's kernel and packing cannot do with what treepack's can."""
    config = model.config.get_text_config()
    all_parameters = model.named_parameters

    def without_sinks(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in all_parameters(*args, **kwargs) if not name.endswith(".sinks"))

    kind: Any = type(config)

    def without_layer_types(self: Any, name: str) -> Any:
        return None if name == "layer_types" else kind.__getattribute__(self, name)

    # Some configurations derive their layer types, or map the name to another: a class of its own hides them all.
    with _replaced(config, "__class__", type(kind.__name__, (kind,), {"__getattribute__": without_layer_types})):
        model.named_parameters = without_sinks
        try:
            yield
        finally:
            del model.named_parameters
