"""MetricsCallback: treepack's metrics in the log of any transformers `Trainer`."""

import math
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

from transformers import TrainerCallback

Value = float | tuple[float, float]


class LoggingTrainer(Protocol):
    """The part of a transformers `Trainer` that is used."""

    def log(self, logs: dict[str, float]) -> None:
        """See `transformers.Trainer.log`."""


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Logs a sink of metrics whenever the trainer logs, to whatever its `report_to` names.

    For trainers of your own: `ScoringGRPOTrainer` needs none, since TRL's `log` reads the same sink.

        metrics = defaultdict(list)  # given to StepPlanner and ScoringCollator
        trainer.add_callback(MetricsCallback(trainer, metrics))

    Add `StepScores.metrics` to the sink after each `score_step`: `metrics[name].append(value)`.

    Args:
        trainer: the trainer that logs.
        metrics: {name: values since the last line}; emptied with each line.
    """

    def __init__(self, trainer: LoggingTrainer, metrics: MutableMapping[str, list[Any]]) -> None:
        self._trainer = trainer
        self._metrics = metrics

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what came together, if the trainer is about to."""
        self._log_if_due(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The same, under `logging_strategy="epoch"`."""
        self._log_if_due(control)

    def _log_if_due(self, control: Any) -> None:
        if control.should_log and (line := reduced(self._metrics)):
            self._metrics.clear()
            self._trainer.log(line)


def reduced(metrics: MutableMapping[str, list[Any]]) -> dict[str, float]:
    """One number a name, by TRL's rules; names without any number are left out.

    (numerator, denominator) pairs are a rate: the sum over the sum. A name whose last part has the word "total" is
    summed, with "max" or "min" the extreme is taken, anything else is averaged, NaN left out.
    """
    line = {name: _reduced(name, values) for name, values in metrics.items()}
    return {name: value for name, value in line.items() if not math.isnan(value)}


def _reduced(name: str, values: Sequence[Value]) -> float:
    pairs = [value for value in values if isinstance(value, tuple)]
    if pairs:
        numerator, denominator = map(sum, zip(*pairs))
        return numerator / denominator if denominator else math.nan
    numbers = [value for value in values if not isinstance(value, tuple) and not math.isnan(value)]
    if not numbers:
        return math.nan
    words = name.split("/")[-1].split("_")
    if "total" in words:
        return sum(numbers)
    if "max" in words:
        return max(numbers)
    if "min" in words:
        return min(numbers)
    return sum(numbers) / len(numbers)
