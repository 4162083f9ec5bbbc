"""Rollouts written as text, in the tokens of a small tokenizer made for them."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.rollout_files import Row
from treepack.scoring.rollouts import Rollouts

PIECES = re.compile(r" ?[A-Za-z]+|\d|\s|[^\w\s]|_")
WORDS = ("check", "refuse", "verify", "cancel", "book", "change", "confirm", "note")
POLICY = " ".join(
    f"Rule {i}: the agent must {WORDS[i * 3 % 8]} the {WORDS[i * 5 % 7]} {i * 37 % 91} first." for i in range(40)
)


class TextTokenizer:
    """Words with the space before them, digits and signs; a new piece gets the next id."""

    def __init__(self) -> None:
        self.pieces: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return self.ids(PIECES.findall(text))

    def ids(self, pieces: Sequence[str]) -> list[int]:
        return [self.pieces.setdefault(piece, len(self.pieces)) for piece in pieces]

    def decode(self, ids: NDArray[Any]) -> str:
        names = list(self.pieces)
        return "".join(names[token] for token in ids.tolist())

    def save(self, path: Path) -> Path:
        """As a tokenizer.json."""
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(models.WordLevel(self.pieces, unk_token=next(iter(self.pieces))))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(path))
        return path


def prompt_rows(
    tokenizer: TextTokenizer, prompt: Callable[[int, int], str], *, groups: int = 5, rows: int = 4
) -> list[Row]:
    """`prompt(group, row)`, then the group's question, then a sampled answer of each row's own."""
    made = []
    for group in range(groups):
        for row in range(rows):
            asked = tokenizer.encode(f"{prompt(group, row)}\nquestion {'abcdefghij'[group] * 5}\n")
            answer = tokenizer.encode(f"answer {'klmnopqrst'[group] * 3} {'uvwxyzklmn'[row] * 4} it is")
            made.append(text_row(asked, answer, group_id=group, rollout_id=group * rows + row))
    return made


def text_row(prompt: list[int], answer: list[int], *, group_id: int, rollout_id: int) -> Row:
    """A row of a rollout file whose answer was sampled."""
    return {
        "input_ids": prompt + answer,
        "completion_mask": [0] * len(prompt) + [1] * len(answer),
        "group_id": group_id,
        "rollout_id": rollout_id,
    }


def rollouts_of(rows: Sequence[Row]) -> Rollouts:
    """The rows as if read from a file."""
    return Rollouts(
        input_ids=np.concatenate([np.array(row["input_ids"]) for row in rows]),
        offsets=np.cumsum([0, *(len(row["input_ids"]) for row in rows)]),
        completion_mask=np.concatenate([np.array(row["completion_mask"], np.uint8) for row in rows]),
        uid=np.arange(len(rows)),
        group_id=np.array([row["group_id"] for row in rows]),
        rollout_id=np.array([row["rollout_id"] for row in rows]),
        rewards={},
        old_log_probs=None,
        finished=np.ones(len(rows), np.bool_),
    )
