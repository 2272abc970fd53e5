"""What perplexity does not show: whether a model still copies from far away, and says the same.

Both probes need no tokenizer. They compare two models of one signature, the exact one first.

* Recall: a row of random tokens in which a passage returns at the end. A model that finds the first
  occurrence predicts the rest of the second (induction, Olsson et al., 2022,
  https://arxiv.org/abs/2209.11895); one that cannot look back so far is at chance.
* Greedy: the exact model continues a prompt; the other one is asked for each next token of the same
  text. Up to the first token it would choose otherwise, both generate the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.errors import Rejection
from subquad.runtime.manifest import InputSpec, Manifest
from subquad.runtime.samples import is_causal_model, other_ids, random_ids

Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]

PASSAGE, CUE = 24, 8
"""Tokens of the passage that returns, and how many of them only serve to find it."""

DEPTHS = (0.0, 0.5, 0.9)
"""Where the passage stands first, as a share of what lies before its second occurrence."""

LEAST_RECALL = 0.1
"""Mean recall below which a model cannot be said to copy: chance is not far."""


@dataclass(frozen=True)
class RecallPoint:
    """Share of the passage that is predicted.

    Attributes:
        length: of the row.
        distance: tokens between the two occurrences.
        exact, model: of the exact model and of the other.
    """

    length: int
    distance: int
    exact: float
    model: float


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
    lengths: Sequence[int],
    *,
    rows: int = 2,
    seed: int = 0,
) -> tuple[RecallPoint, ...]:
    """Copy passages over several distances; lengths too short for a passage are left out."""
    spec = _token_spec(manifest)
    points = []
    for length in lengths:
        span = length - 2 * PASSAGE
        if span < PASSAGE:
            continue
        for depth in DEPTHS:
            hits = np.zeros(2)
            start = round(depth * span)
            for row in range(rows):
                rng = np.random.default_rng([seed, length, start, row])
                ids = random_ids(spec, (1, length), rng)
                ids[0, -PASSAGE:] = ids[0, start : start + PASSAGE]
                wanted = ids[0, CUE - PASSAGE :]
                for number, run in enumerate((exact, model)):
                    logits = _logits(manifest, run, ids)[0, CUE - PASSAGE - 1 : -1]
                    hits[number] += float((logits.argmax(axis=-1) == wanted).mean()) / rows
            distance = length - PASSAGE - start
            points.append(RecallPoint(length, distance, float(hits[0]), float(hits[1])))
    return tuple(points)


def recall_kept(points: Sequence[RecallPoint]) -> float | None:
    """Recall of the model over that of the exact one, all points together.

    ``None`` where the exact model itself does not copy.
    """
    exact = sum(point.exact for point in points)
    if exact < LEAST_RECALL * len(points) or not points:
        return None
    return sum(point.model for point in points) / exact


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


def _token_spec(manifest: Manifest) -> InputSpec:
    return next(spec for spec in manifest.inputs if spec.role == "token_ids")


def _logits(manifest: Manifest, run: Run, ids: NDArray[Any]) -> NDArray[Any]:
    feeds: dict[str, NDArray[Any]] = {}
    for spec in manifest.inputs:
        if spec.role == "past":
            continue  # empty
        if spec.role == "token_ids":
            feeds[spec.name] = ids
        elif spec.role == "padding_mask":
            feeds[spec.name] = np.ones(ids.shape, spec.dtype)
        else:
            rng = np.random.default_rng(0)  # not drawn from
            feeds[spec.name] = other_ids(spec, ids.shape, None, rng, random=False)
    name = next(spec.name for spec in manifest.outputs if spec.is_logits)
    return run(feeds)[name]
