"""MetricsCallback in a transformers Trainer that knows nothing of treepack, and TRL's way of reducing a window."""

import math
from collections import defaultdict

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from treepack.scoring.metrics_callback import MetricsCallback, reduced
from treepack.scoring.trl_layout import trainer_module

WINDOW = {
    "batch/packing_ratio": [(30, 10), (10, 10)],
    "batch/pad_frac": [(0, 0)],
    "batch/dropped_stale_total": [4.0, 2.0],
    "batch/row_tokens_max": [10.0, 30.0, 20.0],
    "clip_ratio/low_min": [0.5, 0.25],
    "reward": [1.0, math.nan, 2.0],
    "ebft/alignment": [math.nan],
}


def test_a_window_is_reduced_as_trl_does():
    line = reduced(WINDOW)
    assert line == {
        "batch/packing_ratio": 2.0,
        "batch/dropped_stale_total": 6.0,
        "batch/row_tokens_max": 30.0,
        "clip_ratio/low_min": 0.25,
        "reward": 1.5,
    }
    for name, value in line.items():
        values = [value for value in WINDOW[name] if isinstance(value, tuple) or not math.isnan(value)]
        assert value == pytest.approx(trainer_module._reduce_metric(name, values))


class Square(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"loss": (self.weight * x).square().mean()}


class Integration(TrainerCallback):
    """What `report_to` adds: it is there before any callback of the user's."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


@pytest.mark.parametrize(
    ("logging", "steps"),
    [({"logging_steps": 2}, [2, 4]), ({"logging_strategy": "epoch", "per_device_train_batch_size": 32}, [2, 4])],
)
def test_every_integration_gets_each_window_once(tmp_path, logging, steps):
    AcceleratorState._reset_state(True)
    metrics, integration = defaultdict(list), Integration()

    class Training(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            metrics["batch/packing_ratio"].append((3.0, 1.0))
            metrics["batch/dropped_stale_total"].append(1.0)
            return model(**inputs)["loss"]

    trainer = Training(
        Square(),
        TrainingArguments(str(tmp_path), max_steps=4, report_to="none", use_cpu=True, disable_tqdm=True, **logging),
        train_dataset=Dataset.from_dict({"x": [[1.0]] * 64}),
        callbacks=[integration],
    )
    trainer.add_callback(MetricsCallback(trainer, metrics))
    trainer.train()
    lines = [line for line in integration.lines if "batch/packing_ratio" in line]
    assert [line["batch/packing_ratio"] for line in lines] == [3.0, 3.0]
    assert [line["batch/dropped_stale_total"] for line in lines] == [2.0, 2.0]
    assert [entry["step"] for entry in trainer.state.log_history if "batch/packing_ratio" in entry] == steps
