"""Sample dicts as the planner takes them, made by hand or by Hypothesis."""

from itertools import count

import numpy as np
from hypothesis import strategies as st


def sample(uid, group_id, group_size, ids, *, prompt=1, rollout_id=None, rewards=None, **more):
    """A sample of tokens `ids` whose first `prompt` are not trained."""
    ids = np.asarray(ids, dtype=np.int64)
    mask = np.ones(len(ids), dtype=np.int64)
    mask[:prompt] = 0
    return {
        "uid": uid,
        "group_id": group_id,
        "rollout_id": uid if rollout_id is None else rollout_id,
        "group_size": group_size,
        "input_ids": ids,
        "completion_mask": mask,
        "old_log_probs": np.where(mask == 1, -0.5, 0.0).astype(np.float32),
        "advantage": float("nan"),
        "rewards": {"reward": float(uid % 3)} if rewards is None else rewards,
        "metrics": {},
        **more,
    }


def group(group_id, lengths, *, first_uid=0, prompt=3, seed=0, **more):
    """One group of samples that share a prompt and nothing after it; `lengths` include the prompt."""
    rng = np.random.default_rng(seed + 1000 * group_id)
    head = rng.integers(0, 50, prompt)
    return [
        sample(
            first_uid + i,
            group_id,
            len(lengths),
            np.r_[head, rng.integers(50, 1000, n - prompt)],
            prompt=prompt,
            **more,
        )
        for i, n in enumerate(lengths)
    ]


def groups_of(sizes, *, length=8, prompt=3, **more):
    """Groups 0, 1, ... of the given sizes, as one list of samples with rising uids."""
    out = []
    for group_id, size in enumerate(sizes):
        out += group(group_id, [length] * size, first_uid=len(out), prompt=prompt, **more)
    return out


@st.composite
def sample_streams(draw, max_groups=6, max_rows=5, max_length=9):
    """Samples of whole groups in a run each, over a tiny alphabet so that they share, nest and repeat."""
    uid, out = count(), []
    for group_id in range(draw(st.integers(1, max_groups))):
        rows = draw(st.integers(1, max_rows))
        for _ in range(rows):
            ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=max_length))
            out.append(sample(next(uid), group_id, rows, ids, prompt=draw(st.integers(0, 2))))
    return out
