"""What makes two rows part: a date, an id, the same text in other tokens, the same lines in another order, ...

Rows are compared by n-grams of GRAM tokens: where one recurs in the other row, so does the text around it.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.inspect_rows import common_prefix
from treepack.scoring.inspect_text import Decode

Ids = NDArray[np.integer[Any]]
Kind = Literal["date", "id", "part", "insertion", "reordered", "retokenised", "history", "text"]

TITLES: dict[Kind, str] = {
    "date": "a date or time",
    "id": "an id",
    "part": "a part that differs ahead of a common one",
    "insertion": "a part that some rows lack",
    "reordered": "the same parts in another order",
    "retokenised": "the same text in other tokens",
    "history": "a rewritten history",
    "text": "other text",
}

ADVICE: dict[Kind, str] = {
    "date": "move it behind what the rows share, round it, or freeze it for the step",
    "id": "move it behind what the rows share, or leave it out of the prompt",
    "part": "move it behind what the rows share",
    "insertion": "put it behind what the rows share, or into every row",
    "reordered": "put the parts (tools, documents, lines) into one order",
    "retokenised": "carry token ids along instead of text that is tokenised again",
    "history": "keep the sampled tokens in the history as they were, or start a new rollout there",
    "text": "expected where questions or users differ; else put it behind what the rows share",
}

GRAM = 8
SEARCHED = 512  # tokens in which two rows may find together again
SHORT = 48  # tokens around a value, such as a date
NAME = 12  # characters before a value that tell which one it is
CONTEXT = 24  # tokens shown on either side
LONG = 64  # tokens of a part that rows should have shared
REORDERED = 4  # tokens that must be the same ones in another order, where the rows meet again behind them
SAME_TEXT = 8  # characters that must go on alike behind tokens that differ

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?(?: ?[ap]\.?m\.?)?(?:z|[+-]\d{2}:?\d{2})?"
_DAY = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day,? ?"
_DATES = "|".join(
    (
        r"\d{4}[-/.]\d{1,2}(?:[-/.]\d{1,2})?",
        r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}",
        rf"\d{{1,2}}(?:st|nd|rd|th)?(?: of)? {_MONTH}(?:,? \d{{4}})?",
        rf"\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?",
    )
)
_DATE = re.compile(rf"(?:{_DAY})?(?:{_DATES})(?:[t ,]+(?:at )?{_TIME})?|{_DAY}|{_TIME}|\b1[5-9]\d{{8}}\b", re.I)
_WORD = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Example:
    """Two rows where they part, as text (token ids where there is no tokenizer).

    Attributes:
        before: what both hold before it.
        left, right: what each holds there.
        after: what both go on with; "" where they do not meet again soon.
    """

    before: str
    left: str
    right: str
    after: str


@dataclass(frozen=True)
class Cause:
    """What parts two rows.

    Attributes:
        kind: what it is.
        place: what tells it from other causes of its kind: the text or tokens beside it.
        example: the rows there.
    """

    kind: Kind
    place: str
    example: Example


class Parting:
    """Two rows that agree on `depth` tokens and then differ.

    Args:
        left, right: (n,) token ids of each, longer than `depth`.
        depth: where they part.
    """

    def __init__(self, left: Ids, right: Ids, depth: int) -> None:
        self.left, self.right, self.depth = left, right, depth

    @cached_property
    def _grams(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        return _hash_grams(self.left[self.depth :]), _hash_grams(self.right[self.depth :])

    @cached_property
    def repeated(self) -> NDArray[np.bool_]:
        """(n,) the tokens of the right row that lie in an n-gram which the left row has behind the parting too."""
        left, right = self._grams
        repeated = np.zeros(len(self.right), np.bool_)
        starts = np.flatnonzero(np.isin(right, left)) + self.depth
        repeated[(starts[:, None] + np.arange(GRAM)).ravel()] = True
        return repeated

    @cached_property
    def gaps(self) -> tuple[int, int] | None:
        """Tokens of each row up to where they next hold the same n-gram; None where that is not soon."""
        left, right = (grams[:SEARCHED] for grams in self._grams)
        common, at_left, at_right = np.intersect1d(left, right, return_indices=True)
        if not len(common):
            return None
        nearest = int((at_left + at_right).argmin())
        return int(at_left[nearest]), int(at_right[nearest])

    @cached_property
    def is_short(self) -> bool:
        """Whether the rows differ in a few tokens only."""
        return self.gaps is not None and max(self.gaps) <= SHORT

    def meets_for_long(self) -> bool:
        """Whether the rows then agree on much, or on most of what is repeated, at one stretch."""
        if self.gaps is None:
            return False
        left, right = (row[self.depth + gap :] for row, gap in zip((self.left, self.right), self.gaps))
        agreed = common_prefix(left, right)
        return agreed >= LONG or (agreed >= 2 * GRAM and 2 * agreed >= int(np.count_nonzero(self.repeated)))

    def is_reordered(self) -> bool:
        """Whether what each row holds here is found further on in the other."""
        left, right = self._grams
        if not (len(left) and len(right)):
            return False
        if (left[1:] == right[0]).any() and (right[1:] == left[0]).any():
            return True
        gap = self.gaps[0] if self.gaps is not None and self.gaps[0] == self.gaps[1] else 0
        here = slice(self.depth, self.depth + gap)
        return gap >= REORDERED and np.array_equal(np.sort(self.left[here]), np.sort(self.right[here]))

    def is_retokenised(self, decode: Decode) -> bool:
        """Whether the rows go on with the same text in other tokens."""
        start, here = max(self.depth - CONTEXT, 0), self.depth + 1
        stop = here + CONTEXT
        common = _agreed_chars(*(_text(decode, row[start:stop]) for row in (self.left, self.right)))
        differing = max(len(_text(decode, row[start:here])) for row in (self.left, self.right))
        return common - differing >= SAME_TEXT


def cause_of(parting: Parting, decode: Decode | None, *, history: bool) -> Cause:
    """What parts two rows.

    Args:
        parting: the rows.
        decode: the tokenizer, without which a date, an id and re-tokenised text are not told from other differences.
        history: whether one row holds as history what was sampled in the other, of the same rollout.
    """
    if decode is not None and parting.is_retokenised(decode):
        return Cause("retokenised", "", _example(parting, decode))
    if history:
        return Cause("history", "", _example(parting, decode))
    if decode is not None and parting.is_short:
        cause = _value(parting, decode)
        if cause is not None:
            return cause
    example = _example(parting, decode)
    if parting.is_reordered():
        return Cause("reordered", "", example)
    if parting.gaps is None or not parting.meets_for_long():
        return Cause("text", "", example)
    start = parting.depth + parting.gaps[0]
    following = parting.left[start : start + GRAM].tobytes().hex()
    return Cause("insertion" if 0 in parting.gaps else "part", following, example)


def _value(parting: Parting, decode: Decode) -> Cause | None:
    """A date or an id that differs, whole, though its first characters may agree."""
    start = max(parting.depth - CONTEXT, 0)
    assert parting.gaps is not None
    left_gap, right_gap = parting.gaps
    left = _text(decode, parting.left[start : parting.depth + left_gap + GRAM])
    right = _text(decode, parting.right[start : parting.depth + right_gap + GRAM])
    differs = _agreed_chars(left, right)
    for kind, pattern in _VALUES:
        found, other = _match_at(pattern, left, differs), _match_at(pattern, right, differs)
        if found is None or other is None or found[0] == other[0]:
            continue
        if kind == "id" and not all(len(match[0]) > 3 and re.search(r"\d", match[0]) for match in (found, other)):
            continue
        before = left[: found.start()]
        place = re.sub(r"\d", "0", before[-NAME:])  # other values may stand before it
        return Cause(kind, place, Example(before, found[0], other[0], left[found.end() :]))
    return None


_VALUES: tuple[tuple[Kind, re.Pattern[str]], ...] = (("date", _DATE), ("id", _WORD))


def _match_at(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The match that holds or touches a character."""
    return next((match for match in pattern.finditer(text) if match.start() <= at <= match.end()), None)


def _example(parting: Parting, decode: Decode | None) -> Example:
    depth, gaps = parting.depth, parting.gaps
    shown = gaps if gaps is not None and max(gaps) <= SHORT else (CONTEXT, CONTEXT)
    left, right = (row[depth : depth + gap] for row, gap in zip((parting.left, parting.right), shown))
    after = parting.left[depth + shown[0] :][:CONTEXT] if shown == gaps else parting.left[:0]
    before = parting.left[max(depth - CONTEXT, 0) : depth]
    show = decode if decode is not None else _numbers
    return Example(show(before), show(left), show(right), show(after))


def _numbers(ids: Ids) -> str:
    return " ".join(map(str, ids.tolist()))


def _text(decode: Decode, ids: Ids) -> str:
    """The text of tokens, without the character that they cut."""
    return decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


def _agreed_chars(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def _hash_grams(ids: Ids) -> NDArray[np.uint64]:
    """(n - GRAM + 1,) a number for each n-gram; two n-grams share one about once in 2^64."""
    count = len(ids) - GRAM + 1
    hashes = np.zeros(max(count, 0), np.uint64)
    factor = np.uint64(0x9E3779B97F4A7C15)
    values = ids.astype(np.uint64) + np.uint64(1)
    for at in range(GRAM if count > 0 else 0):
        hashes = hashes * factor + values[at : at + count]
        hashes ^= hashes >> np.uint64(29)
    return hashes
