"""One optimizer step that loses samples in every way, laid out by hand, and the same step packed without them."""

import numpy as np

from support.samples import group, sample
from treepack import ScoringCollator
from treepack.scoring.rows import ScoredRow

NAN = float("nan")

# Rewards of each group's samples. Sample 3 is unscorable, group 1 has no spread, sample 8 is cut off, group 4 has no
# spread either.
REWARDS = ((1.0, 0.0, 0.25, NAN), (0.5, 0.5, 0.5), (3.0, 5.0, 9.0), (1.0, 0.0), (2.0, 2.0, 2.0))
CUT_OFF = 8
REMOVED = {3, 4, 5, 6, 8, 12, 13, 14}

# The uids on each of two ranks of each micro-batch. Rank 1 of the second is emptied, and so is the last micro-batch: 3
# of 4 are left, a factor that is exact in the float32 of `global_n_tokens`, as 5 of 8 is where a rank has all rows.
_PLACES = (
    ((0, 1, 3), (4, 7, 8)),
    ((2,), (5, 6)),
    ((9,), (10, 11)),
    ((12, 13), (14,)),
)


def samples_of_the_step(vocabulary):
    """Samples of different lengths, in order of uid."""
    samples = []
    for group_id, rewards in enumerate(REWARDS):
        lengths = [9 + (5 * group_id + 3 * i) % 7 for i in range(len(rewards))]
        samples += group(group_id, lengths, first_uid=len(samples), prompt=5)
    rewards = [reward for of_group in REWARDS for reward in of_group]
    return [
        {**s, "input_ids": s["input_ids"] % vocabulary, "rewards": {"reward": r}, "truncated": s["uid"] == CUT_OFF}
        for s, r in zip(samples, rewards, strict=True)
    ]


def _places(ranks):
    assert ranks in (1, 2)
    return _PLACES if ranks == 2 else [[row] for micro_batch in _PLACES for row in micro_batch]


def collated(vocabulary, ranks=2):
    """The micro-batches with every sample in."""
    samples = samples_of_the_step(vocabulary)
    return [_collate([[samples[uid] for uid in row] for row in micro_batch]) for micro_batch in _places(ranks)]


def dropped_before_packing(vocabulary, scores, ranks=2):
    """The micro-batches as a trainer packs them that never saw the removed samples, the others in their places.

    A row that lost all forwards a token that trains nothing; a micro-batch that lost all is not there.
    """
    samples = samples_of_the_step(vocabulary)
    advantage = dict(zip(scores.uids.tolist(), scores.advantages, strict=True))
    kept = [[[uid for uid in row if uid not in REMOVED] for row in micro_batch] for micro_batch in _places(ranks)]
    return [
        _collate([[_planned(samples[uid], advantage[uid]) for uid in row] or [_planned(_UNTRAINED)] for row in rows])
        for rows in kept
        if any(rows)
    ]


_UNTRAINED = sample(0, 0, 1, np.array([1]))


def _planned(sample, advantage=0.0):
    """The sample as TRL has it: with its advantage and without what is scored."""
    return {key: value for key, value in sample.items() if key != "uid"} | {"advantage": advantage}


def _collate(samples_of_rows):
    rows = []
    for of_row in samples_of_rows:
        row = ScoredRow()
        row.reward_names = ("reward",)
        for s in of_row:
            row.add(s)
        rows.append(row)
    return ScoringCollator(0, len(rows))([rows])
