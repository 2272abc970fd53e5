"""What perplexity does not show: whether a model still finds what is far away, and says the same.

Both probes compare two models of one signature, the exact one first.

* Recall: facts are hidden in a text and asked for at its end (``recall_rows.py``). The score is the
  share of the answers' tokens that are the most likely next ones. Where the exact model itself does
  not know, nothing can be said, and the point does not count.
* Greedy: the exact model continues a prompt; the other one is asked for each next token of the same
  text. Up to the first token it would choose otherwise, both generate the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.errors import Rejection
from subquad.runtime.manifest import InputSpec, Manifest
from subquad.runtime.recall_rows import KINDS, RecallRow, can_spell, recall_row
from subquad.runtime.samples import is_causal_model, other_ids
from subquad.runtime.text import TOKENIZER_NAME, Tokenizer

Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]

LEAST_RECALL = 0.3
"""Accuracy of the exact model below which a point says nothing: a digit is guessed at 0.1."""


@dataclass(frozen=True)
class RecallPoint:
    """Answers of one kind over about one distance, in all rows.

    Attributes:
        kind: see ``recall_rows.py``.
        length: of the rows.
        distance: mean of the tokens between statement and answer.
        tokens: of the answers.
        exact, model: share of them that the exact model and the other find most likely.
        exact_probability, model_probability: mean that they give them.
    """

    kind: str
    length: int
    distance: int
    tokens: int
    exact: float
    model: float
    exact_probability: float
    model_probability: float

    @property
    def counts(self) -> bool:
        """Whether the exact model knows enough for a comparison."""
        return self.exact >= LEAST_RECALL

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "counts": self.counts}


@dataclass(frozen=True)
class GreedyResult:
    """How far the same words are chosen.

    Attributes:
        prompt, tokens: lengths.
        agreement: share of the tokens that the model would choose too.
        first_divergence: the first, counted from 0, that it would not; ``None``: all agree.
    """

    prompt: int
    tokens: int
    agreement: float
    first_divergence: int | None


def probe_reason(manifest: Manifest) -> Rejection | None:
    """Why these probes do not apply; ``None``: they do."""
    if not is_causal_model(manifest) or not any(spec.is_logits for spec in manifest.outputs):
        return Rejection("not a causal language model: nothing predicts a next token")
    if any(spec.role == "values" for spec in manifest.inputs):
        return Rejection("the model takes inputs other than tokens")
    return None


def recall(
    manifest: Manifest,
    exact: Run,
    model: Run,
    texts: Sequence[NDArray[Any]],
    tokenizer: Tokenizer | None = None,
    *,
    beyond: int = 0,
    seed: int = 0,
) -> tuple[RecallPoint, ...]:
    """Ask both models for facts that are hidden in ``texts``.

    Args:
        manifest: of both.
        exact, model: the exact model, and the other.
        texts: rows of token ids to hide facts in; one too short for any is left out.
        tokenizer: spells facts; ``None`` = passages of tokens only.
        beyond: as ``recall_row``.
        seed: draws the facts.
    """
    seen: dict[tuple[int, str, int], list[tuple[int, NDArray[np.float64]]]] = {}
    for number, text in enumerate(texts):
        rng = np.random.default_rng([seed, 7, len(text), number])
        row = recall_row(np.asarray(text, np.int64), rng, tokenizer, beyond=beyond)
        if row is None:
            continue
        exact_answers, model_answers = (
            answers(manifest, run, row, text.dtype) for run in (exact, model)
        )
        for asked, *of_both in zip(row.asked, exact_answers, model_answers, strict=True):
            place = (len(text), asked.kind, asked.place)
            seen.setdefault(place, []).append((asked.distance, np.stack(of_both)))
    order = sorted(seen, key=lambda place: (place[0], KINDS.index(place[1]), place[2]))
    return tuple(_point(*place[:2], seen[place]) for place in order)


def answers(
    manifest: Manifest, run: Run, row: RecallRow, dtype: np.dtype[Any]
) -> list[NDArray[np.float64]]:
    """What a model answers to each question of a row: see ``_answers``; ids are of ``dtype``."""
    first = min(asked.start for asked in row.asked)
    logits = _logits(manifest, run, row.ids[None].astype(dtype))
    found = _answers(logits[0, first - 1 : -1], row.ids[first:])
    return [found[:, asked.start - first : asked.stop - first] for asked in row.asked]


def _answers(logits: NDArray[Any], wanted: NDArray[np.int64]) -> NDArray[np.float64]:
    """``[2, tokens]``: whether each token is the most likely one, and its probability."""
    values = np.asarray(logits, np.float32)
    top = values.max(axis=1)
    chosen = values[np.arange(len(values)), wanted]
    total = np.exp(values - top[:, None]).sum(axis=1, dtype=np.float64)
    return np.stack([values.argmax(axis=1) == wanted, np.exp(chosen - top) / total])


def _point(length: int, kind: str, seen: Sequence[tuple[int, NDArray[np.float64]]]) -> RecallPoint:
    both = np.concatenate([answers for _, answers in seen], axis=2).mean(axis=2)
    tokens = sum(answers.shape[2] for _, answers in seen)
    distance = round(np.mean([distance for distance, _ in seen]))
    (exact, exact_p), (model, model_p) = both.tolist()
    return RecallPoint(kind, length, int(distance), tokens, exact, model, exact_p, model_p)


def recall_kept(points: Iterable[RecallPoint]) -> float | None:
    """Recall of the model over that of the exact one, all points that count together.

    ``None`` where none does.
    """
    counted = [point for point in points if point.counts]
    if not counted:
        return None
    exact, model = (
        sum(share * point.tokens for share, point in zip(shares, counted, strict=True))
        for shares in ([p.exact for p in counted], [p.model for p in counted])
    )
    return model / exact


def recall_facts(points: Sequence[RecallPoint]) -> dict[str, Any]:
    """For the report: all points, what was kept, and of every kind."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(point.kind for point in points):
        mine = [point for point in points if point.kind == kind]
        counted = [point for point in mine if point.counts]
        kinds[kind] = {"kept": recall_kept(mine), "counted": len(counted), "points": len(mine)}
        if not counted:
            best = max(point.exact for point in mine)
            kinds[kind]["says_nothing"] = (
                f"the exact model itself finds at most {best:.0%} of the answers"
            )
    return {
        "recall": [point.to_json() for point in points],
        "recall_kept": recall_kept(points),
        "recall_kinds": kinds,
    }


def greedy(
    manifest: Manifest, exact: Run, model: Run, prompt: NDArray[Any], tokens: int
) -> GreedyResult:
    """Continue ``prompt``, ``[length]`` token ids, by ``tokens`` tokens."""
    ids = prompt[None]
    for _ in range(tokens):
        chosen = _logits(manifest, exact, ids)[:, -1].argmax(axis=-1)
        ids = np.concatenate([ids, chosen[:, None].astype(ids.dtype)], axis=1)
    wanted = ids[0, -tokens:]
    same = _logits(manifest, model, ids)[0, -tokens - 1 : -1].argmax(axis=-1) == wanted
    first = None if same.all() else int(np.argmin(same))
    return GreedyResult(len(prompt), tokens, float(same.mean()), first)


def token_ids(manifest: Manifest, feeds: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The tokens of a batch."""
    return feeds[_token_spec(manifest).name]


def spelling_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of an artifact, if it has one with which facts can be told apart.

    Raises:
        UsageError: the artifact has one, but the ``text`` extra is not installed.
    """
    if not (folder / TOKENIZER_NAME).is_file():
        return None
    tokenizer = Tokenizer.load(folder)
    return tokenizer if can_spell(tokenizer) else None


def _token_spec(manifest: Manifest) -> InputSpec:
    return next(spec for spec in manifest.inputs if spec.role == "token_ids")


def _logits(manifest: Manifest, run: Run, ids: NDArray[Any]) -> NDArray[Any]:
    name = next(spec.name for spec in manifest.outputs if spec.is_logits)
    return run(token_feeds(manifest, ids))[name]


def token_feeds(manifest: Manifest, ids: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Inputs for tokens ``[rows, length]`` without padding, and without what came before."""
    feeds: dict[str, NDArray[Any]] = {}
    for spec in manifest.inputs:
        if spec.role == "past":
            continue  # empty
        if spec.role == "token_ids":
            feeds[spec.name] = ids.astype(spec.dtype, copy=False)
        elif spec.role == "padding_mask":
            feeds[spec.name] = np.ones(ids.shape, spec.dtype)
        else:
            rng = np.random.default_rng(0)  # not drawn from
            feeds[spec.name] = other_ids(spec, ids.shape, None, rng, random=False)
    return feeds
