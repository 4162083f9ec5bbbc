"""Rollouts drawn from a seed: chat groups, agentic conversations with forks, one long row. And the real traces."""

from pathlib import Path
from typing import Any

import numpy as np

from support.traces import load_trace

VOCABULARY = 151_000
Sample = dict[str, Any]
Samples = list[Sample]


def _sample(
    rng: np.random.Generator, ids: np.ndarray, mask: np.ndarray, group: int, advantage: float
) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "completion_mask": mask,
        "old_log_probs": np.where(mask == 1, -rng.exponential(0.5, len(ids)), 0.0).astype(np.float32),
        "advantage": advantage,
        "group_id": group,
        "metrics": {"reward": advantage},
    }


def chat(groups: int, rollouts: int, prompt: int, completion: int, *, sigma: float) -> Samples:
    """Groups of completions with log-normal lengths over one prompt; they agree on a few first tokens."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, 64)
    samples = []
    for group in range(groups):
        length = max(72, int(prompt * rng.uniform(0.7, 1.3)))
        head = np.concatenate([system, rng.integers(0, VOCABULARY, length - 64)])
        common = rng.integers(0, VOCABULARY, 64)
        for _ in range(rollouts):
            n = int(np.clip(rng.lognormal(np.log(completion) - sigma**2 / 2, sigma), 16, 8 * completion))
            tail = rng.integers(0, VOCABULARY, n)
            agreed = min(n, 64, int(rng.geometric(0.3)) - 1)
            tail[:agreed] = common[:agreed]
            mask = np.repeat([0, 1], [length, n])
            samples.append(_sample(rng, np.concatenate([head, tail]), mask, group, rng.normal()))
    return samples


def agentic(groups: int, rollouts: int, forks: int, length: int) -> Samples:
    """Conversations of ~400 trained and ~300 tool tokens a turn; each row forks off the last at 50 to 95 % of it."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, length // 16)
    samples = []
    for group in range(groups):
        prompt = np.concatenate([system, rng.integers(0, VOCABULARY, length // 16)])
        for _ in range(rollouts):
            advantage, ids = rng.normal(), prompt
            for fork in range(forks):
                n = int(length * rng.uniform(0.7, 1.0))
                start = len(prompt) if fork == 0 else int(min(len(ids), n - 200) * rng.uniform(0.5, 0.95))
                ids = np.concatenate([ids[:start], rng.integers(0, VOCABULARY, n - start)])
                mask, turn = np.zeros(n, dtype=np.int64), start
                while turn < n:
                    stop = turn + int(rng.integers(200, 600))
                    mask[turn:stop] = 1
                    turn = stop + int(rng.integers(100, 500))
                samples.append(_sample(rng, ids, mask, group, advantage))
    return samples


def one_row(tokens: int) -> Samples:
    rng = np.random.default_rng(0)
    mask = np.repeat([0, 1], [tokens // 64, tokens - tokens // 64])
    return [_sample(rng, rng.integers(0, VOCABULARY, tokens), mask, 0, 1.0)]


def trace(path: Path, groups: int) -> Samples:
    return [sample for group in load_trace(path, groups) for sample in group]
