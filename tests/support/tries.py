"""Samples whose sequences share, nest, repeat and end in every awkward way, as TRL's rows read them."""

import numpy as np
from hypothesis import strategies as st


def make_sample(ids, mask=None, *, group_id=0, advantage=0.5, metrics=None, **more):
    """A sample of tokens `ids`; everything is trained unless a mask is given."""
    ids = np.asarray(ids, dtype=np.int64)
    mask = np.ones(len(ids), dtype=np.int64) if mask is None else np.asarray(mask, dtype=np.int64)
    return {
        "input_ids": ids,
        "completion_mask": mask,
        "old_log_probs": np.linspace(-2, -1, len(ids), dtype=np.float32),
        "advantage": advantage,
        "group_id": group_id,
        "metrics": {} if metrics is None else metrics,
        **more,
    }


@st.composite
def masks(draw, length):
    """None, all, alternating, one run, or anything; position 0 may be trained."""
    kind = draw(st.sampled_from(["none", "all", "alternating", "run", "any"]))
    if kind == "any":
        return draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    if kind == "alternating":
        phase = draw(st.integers(0, 1))
        return [(p + phase) % 2 for p in range(length)]
    if kind == "run":
        start = draw(st.integers(0, length - 1))
        stop = draw(st.integers(start, length))
        return [int(start <= p < stop) for p in range(length)]
    return [int(kind == "all")] * length


@st.composite
def tries(draw, min_samples=1, max_samples=10, max_length=9):
    """Samples over two or three tokens, many of them a copy, a strict prefix, an extension or a fork of an earlier one.

    Now and then every token is repeated, so that runs of trained tokens are long.
    """
    alphabet = st.integers(0, draw(st.integers(1, 2)))
    repeats = draw(st.sampled_from([1, 1, 40]))
    sequences, samples = [], []
    for _ in range(draw(st.integers(min_samples, max_samples))):
        fresh = draw(st.lists(alphabet, min_size=1, max_size=max_length))
        if sequences and draw(st.booleans()):
            earlier = draw(st.sampled_from(sequences))
            kept = earlier[: draw(st.integers(1, len(earlier)))]
            fresh = kept + (fresh if draw(st.booleans()) else [])
        sequences.append(fresh)
        mask = np.repeat(draw(masks(len(fresh))), repeats)
        group_id, advantage = draw(st.integers(0, 2)), draw(st.floats(-2, 2))
        metrics = draw(st.dictionaries(st.sampled_from(["reward", "length"]), st.floats(-1, 1), max_size=2))
        samples.append(
            make_sample(np.repeat(fresh, repeats), mask, group_id=group_id, advantage=advantage, metrics=metrics)
        )
    return samples
