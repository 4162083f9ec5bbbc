"""What treepack relies on in TRL: each test names the place that a later TRL would have changed."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Trainer

from treepack.scoring.trl_hooks import ScoringGRPOTrainer
from treepack.scoring.trl_layout import AsyncGRPOTrainer, check_layout, trainer_module, worker_module

ROOT = Path(__file__).parents[2]


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_one_file_imports_trl():
    importing = set()
    for path in [*ROOT.glob("kernels/*.py"), *ROOT.glob("scoring/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "trl" for name in names):
                importing.add(path.name)
    assert importing == {"trl_layout.py"}


def test_a_missing_name_is_refused_by_name():
    with pytest.raises(
        ImportError, match=r"works with TRL 1\.16 .*got TRL .*, which lacks trl\.nothing\.Here, trl\.Not"
    ):
        check_layout({"trl.nothing": ("Here",), "trl": ("Not.there", "trainer")})


def test_a_trl_of_another_layout_is_refused_at_import(tmp_path):
    """TRL 1.18 moved the trainer out of `experimental`."""
    (tmp_path / "trl" / "trainer").mkdir(parents=True)
    (tmp_path / "trl-1.18.0.dist-info").mkdir()
    (tmp_path / "trl-1.18.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.18.0\n")
    for folder in ("trl", "trl/trainer"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "trl" / "trainer" / "async_grpo_trainer.py").write_text("class AsyncGRPOTrainer: ...\n")
    result = subprocess.run(
        [sys.executable, "-c", "import treepack.scoring.trl_layout"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: treepack.scoring.trl_hooks works with TRL 1.16 ")
    assert "got TRL 1.18.0, which lacks trl.experimental.async_grpo.async_grpo_config.AsyncGRPOConfig, " in last


def test_as_few_methods_as_possible_are_overridden():
    own = {name for name, value in vars(ScoringGRPOTrainer).items() if inspect.isfunction(value)}
    overridden = {name for name in own if hasattr(AsyncGRPOTrainer, name)}
    assert overridden == {
        "__init__",
        "get_train_dataloader",
        "get_batch_samples",
        "_inner_training_loop",
        "_log_step_metrics",
        "_save_checkpoint",
    }


def test_signatures_of_what_is_overridden():
    assert parameters(AsyncGRPOTrainer.get_train_dataloader) == ["self"]
    assert parameters(AsyncGRPOTrainer.get_batch_samples) == ["self", "epoch_iterator", "num_batches", "device"]
    assert parameters(AsyncGRPOTrainer._log_step_metrics) == ["self"]
    assert parameters(AsyncGRPOTrainer._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(AsyncGRPOTrainer._inner_training_loop) == ["self", "args", "kwargs"]
    assert parameters(AsyncGRPOTrainer.__init__)[1:5] == ["model", "reward_funcs", "args", "train_dataset"]
    assert {"callbacks", "rollout_worker", "weight_transfer", "environment_factory"} <= set(
        parameters(AsyncGRPOTrainer.__init__)
    )


def test_construction_looks_up_what_is_replaced_in_this_order():
    source = inspect.getsource(AsyncGRPOTrainer.__init__)
    anchors = [
        "register_tree_attention()",
        "create_model_from_path(",
        'getattr(text_config, "layer_types", None)',
        '.endswith(".sinks") for name, _ in model.named_parameters()',
        "add_fused_lm_head(model",
        "super().__init__(",
        "get_peak_flops_per_device(self.accelerator",
        "self.rollout_worker = AsyncRolloutWorker(",
        "self.add_callback(_TrainBeginCallback(self))",
    ]
    places = [source.find(anchor) for anchor in anchors]
    assert -1 not in places, anchors[places.index(-1)]
    assert places == sorted(places)
    assert parameters(trainer_module.get_peak_flops_per_device) == ["accelerator", "dtype"]


def test_the_loop_calls_what_is_overridden():
    source = inspect.getsource(Trainer._run_epoch)
    assert "self.get_batch_samples(epoch_iterator, num_batches, self.args.device)" in source
    order = ["self.optimizer.step()", "on_optimizer_step(", "on_step_end(", "_maybe_log_save_evaluate("]
    assert [source.index(anchor) for anchor in order] == sorted(source.index(anchor) for anchor in order)
    assert 'kwargs.get("resume_from_checkpoint")' in inspect.getsource(AsyncGRPOTrainer._inner_training_loop)


def test_step_metrics_read_what_the_trainer_keeps():
    source = inspect.getsource(AsyncGRPOTrainer._log_step_metrics)
    assert "self._rollout_dataset.wait_s" in source
    assert "compute_flops_per_token(self.model.config.get_text_config(), int(mean_seq_len))" in source
    assert "len(self._trained_groups) - self._last_groups_trained" in source
    epochs = inspect.getsource(trainer_module._EpochStopCallback.on_step_end)
    assert "self._trainer._groups_before_resume + len(self._trainer._trained_groups)" in epochs


def test_the_loss_reads_the_collators_keys():
    source = inspect.getsource(AsyncGRPOTrainer.compute_loss)
    for key in ("attention_mask", "token_index", "shift_labels", "advantages", "segment_id", "global_n_tokens"):
        assert f'inputs["{key}"]' in source


def test_a_worker_is_started_after_the_weights_are_sent():
    source = inspect.getsource(trainer_module._TrainBeginCallback.on_train_begin)
    assert source.index("_sync_weight()") < source.index("rollout_worker.start()")
    assert worker_module.AsyncRolloutWorker is trainer_module.AsyncRolloutWorker
