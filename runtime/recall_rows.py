"""Rows that ask for what stood far before: facts hidden in a text, and questions at its end.

Three kinds of facts, as in usual tests of long contexts:

* ``copy``: a passage of tokens in no order; the end shows its first tokens again (induction, Olsson
  et al., 2022, https://arxiv.org/abs/2209.11895). Needs no tokenizer.
* ``needle``: "The pass key of Paris is 48213." (https://arxiv.org/abs/2305.16300).
* ``pairs``: eight lines of keys and values of which one is asked for
  (https://arxiv.org/abs/2307.03172).

Answers are random, so nothing but the fact itself predicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.text import Tokenizer

KINDS = ("copy", "needle", "pairs")

PASSAGE, CUE = 24, 8
"""Tokens of a passage that returns, and how many of them only serve to find it."""

DISTANCES = 6
"""At most so many facts of every kind in one row, as far as they fit."""

_PAIRS = 8
_DIGITS = 5
_PLACES = tuple(
    "Paris London Rome Berlin Madrid Vienna Athens Dublin Oslo Lisbon Warsaw Prague Cairo Delhi "
    "Tokyo Lima Boston Dallas Denver Chicago".split()
)
_KEYS = tuple(
    "apple bread chair door engine flower garden hammer island jacket kitchen ladder mirror needle "
    "orange pencil queen river silver table umbrella village window yellow anchor basket candle "
    "desk eagle forest guitar honey iron jungle king lemon mountain night ocean paper rabbit "
    "school tiger tower uncle valley winter bridge copper dragon".split()
)

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Fact:
    """What is hidden, and what asks for it.

    Attributes:
        kind: one of ``KINDS``.
        statement: tokens that are put into the text.
        question: tokens at the end of the row, the last ``answer`` of which are to be predicted.
        answer: their number.
    """

    kind: str
    statement: Ids
    question: Ids
    answer: int


@dataclass(frozen=True)
class Asked:
    """Tokens of a row that a fact should predict.

    Attributes:
        kind: of the fact.
        place: of its statement among those of its kind, 0 = the first.
        start, stop: of the tokens.
        distance: tokens between the answer in the statement and the one asked for.
    """

    kind: str
    place: int
    start: int
    stop: int
    distance: int


@dataclass(frozen=True)
class RecallRow:
    """``ids``, ``[length]``, and what is asked in it."""

    ids: Ids
    asked: tuple[Asked, ...]


def recall_row(
    text: Ids, rng: np.random.Generator, tokenizer: Tokenizer | None, *, beyond: int = 0
) -> RecallRow | None:
    """Hide facts in ``text``, ``[length]``, at even distances; ``None``: no room for one.

    Args:
        text: natural text where there is one.
        rng: draws facts and the order of questions.
        tokenizer: spells facts; ``None`` = ``copy`` only.
        beyond: tokens of a window: where there is room, no fact lies within it of the questions.
    """
    for count in range(DISTANCES, 0, -1):
        groups = [_facts(text, rng, tokenizer, place) for place in range(count)]
        facts = [fact for group in groups for fact in group]
        asked_for = sum(len(fact.question) for fact in facts)
        room = len(text) - asked_for
        stated = sum(len(fact.statement) for fact in facts)
        if stated <= room:
            return _arranged(text, groups, rng, max(stated, room - beyond))
    return None


def _arranged(
    text: Ids, groups: Sequence[Sequence[Fact]], rng: np.random.Generator, room: int
) -> RecallRow:
    """Groups of statements spread over the first ``room`` tokens, questions at the end."""
    ids = text.copy()
    stated: list[tuple[int, int, Fact]] = []
    sizes = [sum(len(fact.statement) for fact in group) for group in groups]
    gap = (room - sum(sizes)) / max(1, len(groups) - 1)
    before = 0
    for place, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        start = round(before + place * gap)
        before += size
        for fact in group:
            ids[start : start + len(fact.statement)] = fact.statement
            start += len(fact.statement)
            stated.append((place, start, fact))
    asked = []
    end = len(ids) - sum(len(fact.question) for _, _, fact in stated)
    for index in rng.permutation(len(stated)):
        place, stop, fact = stated[index]
        ids[end : end + len(fact.question)] = fact.question
        end += len(fact.question)
        asked.append(Asked(fact.kind, place, end - fact.answer, end, end - stop))
    return RecallRow(ids, tuple(asked))


def _facts(
    text: Ids, rng: np.random.Generator, tokenizer: Tokenizer | None, place: int
) -> list[Fact]:
    """One of each kind for ``place``; names do not repeat in a row."""
    facts = [_passage(text, rng)]
    if tokenizer is not None:
        numbers = ["".join(map(str, rng.integers(0, 10, _DIGITS))) for _ in range(1 + _PAIRS)]
        facts.append(_needle(tokenizer, _PLACES[place], numbers.pop()))
        share = len(_KEYS) // DISTANCES
        keys = list(_KEYS[place * share : place * share + _PAIRS])
        facts.append(_pairs(tokenizer, keys, numbers, int(rng.integers(_PAIRS))))
    return facts


def _passage(text: Ids, rng: np.random.Generator) -> Fact:
    """Tokens of the text itself, each once where it has enough."""
    known = np.unique(text)
    passage = rng.choice(known, PASSAGE, replace=len(known) < PASSAGE)
    return Fact("copy", passage, passage, PASSAGE - CUE)


def _needle(tokenizer: Tokenizer, name: str, number: str) -> Fact:
    lead = f"\n\nThe pass key of {name} is "
    statement = tokenizer.spell(f"{lead}{number}. Remember it.\n\n")
    return _asked("needle", tokenizer, lead, number, statement)


def _pairs(tokenizer: Tokenizer, keys: Sequence[str], numbers: Sequence[str], chosen: int) -> Fact:
    lines = [f"{key} = {number}" for key, number in zip(keys, numbers, strict=True)]
    statement = tokenizer.spell("\n\n" + "\n".join(lines) + "\n\n")
    return _asked("pairs", tokenizer, f"\n\n{keys[chosen]} = ", numbers[chosen], statement)


def _asked(
    kind: str, tokenizer: Tokenizer, lead: str, number: str, statement: Sequence[int]
) -> Fact:
    """The answer begins with the first token that another number would not have."""
    other = "".join(str((int(digit) + 1) % 10) for digit in number)
    question, different = tokenizer.spell(lead + number), tokenizer.spell(lead + other)
    pairs = zip(question, different, strict=False)
    same = next(place for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return Fact(
        kind,
        np.array(statement, np.int64),
        np.array(question, np.int64),
        len(question) - same,
    )


def can_spell(tokenizer: Tokenizer) -> bool:
    """Whether numbers have tokens of their own, so that an answer can be told from another."""
    spelled = {tuple(tokenizer.spell(f" {digit * _DIGITS}")) for digit in "0123456789"}
    names = {tuple(tokenizer.spell(f" {name}")) for name in (*_PLACES, *_KEYS)}
    return len(spelled) == 10 and len(names) == len(_PLACES) + len(_KEYS)
