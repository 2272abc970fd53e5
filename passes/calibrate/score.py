"""How far a plan moves the model's outputs on held-out inputs.

Logits are too large to keep: a teacher run leaves the negative log-likelihood of every next token
and whole distributions at sampled positions only. So perplexity is compared everywhere, and
KL and top-1 at the samples. Other outputs are kept and compared in full.

Every kind of document is scored for itself besides all together: a mean over kinds can keep a
limit that one of them misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.budget import AT_LEAST, METRICS, Budget
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest, OutputSpec
from subquad.runtime.metamorphic import length_axis, real_tokens, select
from subquad.runtime.metrics import Difference
from subquad.runtime.samples import Batch, Layout, is_causal_model

SAMPLED_POSITIONS = 384
"""Positions per batch at which whole distributions are compared."""

_GROUP = 128
"""Neighbouring positions of a row whose mean counts as one observation for a standard error: their
terms go together, and taken one by one they would claim to know the mean better than they do."""

ENOUGH = 8
"""Observations of a kind of document, at one length, for an error that can be relied on."""

_STUDENT = (1.84, 1.32, 1.20, 1.14, 1.11, 1.09)
"""By degrees of freedom from 1 on: how many standard errors of few observations leave as much
beside them as one of many, 16 % (Student's distribution at 84.13 %)."""
_SLICE_ELEMENTS = 1 << 22

Run = Callable[[Callable[[int, Mapping[str, NDArray[Any]]], None]], None]
"""Runs the model on all batches and calls back with number and outputs of each."""


@dataclass(frozen=True)
class Figures:
    """Distance from the exact model on some inputs; worst length.

    Attributes:
        metrics: as ``budget.METRICS``, for what this model has.
        errors: standard errors of ``kl``, ``ppl`` and ``recall``; 0 = not known.
    """

    metrics: Mapping[str, float | None]
    errors: Mapping[str, float]

    def shifted(self, errors: float) -> dict[str, float | None]:
        """``metrics``, those with a standard error made worse by so many of them."""
        return {
            name: value
            if value is None
            else value + (-errors if name in AT_LEAST else errors) * self.errors.get(name, 0.0)
            for name, value in self.metrics.items()
        }


@dataclass(frozen=True)
class Score(Figures):
    """Distance from the exact model; worst length.

    Attributes:
        metrics: as ``budget.METRICS``, for what this model has.
        errors: standard errors of ``kl``, ``ppl`` and ``recall``.
        damage: what the search minimises: mean KL, or the squared relative error of the outputs
            where there are no logits.
        custom: score of the user's metric; higher is better.
        groups: the figures of every kind of document, if there are several.
        share: of the inputs that were run; below 1 if the run was stopped.
        terms: the damage of single positions, whose mean is the damage of their length, to compare
            two runs in pairs; not kept on disk.
    """

    damage: float
    custom: float | None = None
    groups: Mapping[str, Figures] = field(default_factory=dict)
    share: float = 1.0
    terms: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "metrics": dict(self.metrics),
            "errors": dict(self.errors),
            "damage": self.damage,
            "custom": self.custom,
            "groups": {
                name: {"metrics": dict(figures.metrics), "errors": dict(figures.errors)}
                for name, figures in self.groups.items()
            },
            "share": self.share,
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Score:
        return Score(
            raw["metrics"],
            raw["errors"],
            raw["damage"],
            raw["custom"],
            {name: Figures(**figures) for name, figures in raw["groups"].items()},
            raw["share"],
        )


@dataclass
class _Sums:
    """Of the inputs of one length and kind; ``kl`` of single positions, the rest in groups."""

    kl: list[float] = field(default_factory=list)
    kl_groups: list[float] = field(default_factory=list)
    kl_weights: list[int] = field(default_factory=list)
    same: int = 0
    sampled: int = 0
    rises: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    outputs: dict[str, Difference] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)

    def plus(self, other: _Sums) -> _Sums:
        """Of the inputs of both."""
        outputs = dict(self.outputs)
        for name, difference in other.outputs.items():
            outputs[name] = outputs[name].plus(difference) if name in outputs else difference
        return _Sums(
            self.kl + other.kl,
            self.kl_groups + other.kl_groups,
            self.kl_weights + other.kl_weights,
            self.same + other.same,
            self.sampled + other.sampled,
            self.rises + other.rises,
            self.weights + other.weights,
            outputs,
            self.squares + other.squares,
        )


class _Enough(Exception):
    """The rest of the run would not change the answer."""


class Scorer:
    """Compares runs on fixed batches with one exact run."""

    def __init__(self, manifest: Manifest, batches: Sequence[Batch]) -> None:
        self._manifest = manifest
        self._batches = batches
        self._layout = Layout.of(manifest)
        self._causal = is_causal_model(manifest)
        self._teacher: dict[tuple[int, str], Any] = {}

    @property
    def has_logits(self) -> bool:
        return any(spec.is_logits for spec in self._manifest.outputs)

    @property
    def is_taught(self) -> bool:
        return bool(self._teacher)

    def check(self, budget: Budget) -> None:
        """Refuse limits on what this model does not have.

        Raises:
            UsageError: names the limit and what to use instead.
        """
        for name in budget.limits:
            if name in ("kl", "top1", "ppl") and not self.has_logits:
                raise UsageError(f"Budget {name}: the model has no logits; use cosine or rel.")
            if name == "ppl" and not self._causal:
                raise UsageError("Budget ppl: the model is no causal language model; use kl.")

    def notes(self, budget: Budget) -> tuple[str, ...]:
        """Where ``kl`` and ``ppl`` have too few observations to know their error well."""
        if not {"kl", "ppl"} & set(budget.limits):
            return ()
        by_token = any(
            set(spec.shape) & set(self._layout.lengths)
            for spec in self._manifest.outputs
            if spec.is_logits
        )
        counts: dict[tuple[int, str], int] = {}
        for batch in self._batches:
            mask = next(iter(real_tokens(self._layout, batch.feeds).values()))
            of_rows = -(-mask.sum(axis=1) // _GROUP) if by_token else np.ones(len(mask))
            place = (batch.length, batch.group)
            counts[place] = counts.get(place, 0) + int(of_rows.sum())
        return tuple(
            f"held out of {group or 'the data'} at length {length} are {count} groups of {_GROUP} "
            f"tokens or rows, {ENOUGH} make a standard error: give more --heldout-tokens"
            for (length, group), count in counts.items()
            if count < ENOUGH
        )

    def teach(self, run: Run) -> None:
        """Take in the exact outputs."""
        self._teacher.clear()

        def take(number: int, outputs: Mapping[str, NDArray[Any]]) -> None:
            for spec in self._manifest.outputs:
                vectors, labels, _ = self._vectors(spec, self._batches[number], outputs[spec.name])
                if spec.is_logits:
                    at = _sampled(len(vectors))
                    nll = _nll(vectors, labels)
                    self._teacher[number, spec.name] = (at, _log_softmax(vectors[at]), nll)
                else:
                    self._teacher[number, spec.name] = vectors

        run(take)

    def exact(self) -> Score:
        """Of the exact model itself."""
        names = {"rel": 0.0, "cosine": 1.0}
        if self.has_logits:
            names |= {"kl": 0.0, "top1": 1.0}
        if self.has_logits and self._causal:
            names |= {"ppl": 0.0}
        # Recall is asked for on other inputs than these.
        measured = [name for name in METRICS if name != "recall"]
        return Score({name: names.get(name) for name in measured}, {}, 0.0)

    def score(self, run: Run, enough: Callable[[Score], bool] | None = None) -> Score:
        """Compare one run.

        Args:
            run: the run.
            enough: whether the score of the batches so far decides; the run is then left.
        """
        sums: dict[tuple[int, str], _Sums] = {}
        seen: list[int] = []

        def take(number: int, outputs: Mapping[str, NDArray[Any]]) -> None:
            batch = self._batches[number]
            self._add(sums.setdefault((batch.length, batch.group), _Sums()), number, outputs)
            seen.append(batch.rows)
            if enough is not None and len(seen) < len(self._batches) and enough(result()):
                raise _Enough

        def result() -> Score:
            total = sum(batch.rows for batch in self._batches)
            return _score(sums, sum(seen) / total if total else 1.0)

        with suppress(_Enough):
            run(take)
        return result()

    def _add(self, sums: _Sums, number: int, outputs: Mapping[str, NDArray[Any]]) -> None:
        for spec in self._manifest.outputs:
            vectors, labels, groups = self._vectors(spec, self._batches[number], outputs[spec.name])
            known = self._teacher[number, spec.name]
            difference = sums.outputs.setdefault(spec.name, Difference())
            if not spec.is_logits:
                difference.add(known, vectors)
                square = np.square(np.subtract(vectors, known, dtype=np.float64)).sum(axis=1)
                sums.squares += [float(x) for x in square]
                continue
            at, log_p, nll = known
            log_q = _log_softmax(vectors[at])
            self._add_kl(sums, log_p, log_q, groups[at])
            if self._causal:
                rise, follows = _nll(vectors, labels) - nll, labels >= 0
                means, counts = _group_means(rise[follows], groups[follows])
                sums.rises += means
                sums.weights += counts
            # Distributions, not logits: a shift of all logits is no difference.
            difference.add(log_p, log_q)

    def _add_kl(
        self,
        sums: _Sums,
        log_p: NDArray[np.float32],
        log_q: NDArray[np.float32],
        groups: NDArray[np.int64],
    ) -> None:
        with np.errstate(invalid="ignore"):
            terms = np.exp(log_p) * (log_p - log_q)
        kl = np.maximum(np.where(np.isneginf(log_p), 0.0, terms).sum(axis=1, dtype=np.float64), 0)
        sums.kl += [float(x) for x in kl]
        sums.same += int((log_p.argmax(axis=1) == log_q.argmax(axis=1)).sum())
        sums.sampled += len(log_p)
        means, counts = _group_means(kl, groups)
        sums.kl_groups += means
        sums.kl_weights += counts

    def _vectors(
        self, spec: OutputSpec, batch: Batch, values: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
        """Real tokens as ``[tokens, size]``, the token that follows each, or -1, and its group.

        Where there are no tokens, rows, each a group of its own.
        """
        real = real_tokens(self._layout, batch.feeds)
        found = length_axis(spec.shape, values, real)
        if found is None:
            vectors = values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(-1, 1)
            count = len(vectors)
            return vectors, np.full(count, -1, np.int64), np.arange(count, dtype=np.int64)
        axis, mask = found
        vectors = select(values, axis, mask)
        labels = np.full(mask.shape, -1, np.int64)
        if axis == 1 and self._causal:
            for item in self._manifest.inputs:
                ids = batch.feeds[item.name]
                if item.role == "token_ids" and ids.shape == mask.shape:
                    labels[:, :-1] = np.where(mask[:, 1:], ids[:, 1:], -1)
                    break
        # Groups begin anew with each row, at its first real token.
        place = np.cumsum(mask, axis=1) - 1
        groups = np.arange(len(mask))[:, None] * mask.shape[1] + place // _GROUP
        return vectors, np.asarray(labels[mask]), np.asarray(groups[mask], np.int64)


def _group_means(
    values: NDArray[np.float64], groups: NDArray[np.int64]
) -> tuple[list[float], list[int]]:
    """Mean and size of each group; ``groups`` rise."""
    if not len(values):
        return [], []
    starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    counts = np.diff(starts, append=len(values))
    means = np.add.reduceat(values, starts) / counts
    return [float(x) for x in means], [int(n) for n in counts]


def _score(sums: Mapping[tuple[int, str], _Sums], share: float) -> Score:
    """All kinds together, and each of several for itself; ``sums`` by length and kind."""
    by_length: dict[int, _Sums] = {}
    by_group: dict[str, list[_Sums]] = {}
    for (length, group), part in sums.items():
        by_length[length] = by_length.get(length, _Sums()).plus(part)
        by_group.setdefault(group, []).append(part)
    whole = list(by_length.values())
    figures = _figures(whole)
    damages = [_damage(part) for part in whole]
    several = len(by_group) > 1
    return Score(
        figures.metrics,
        figures.errors,
        damage=max((x if math.isfinite(x) else math.inf for x in damages), default=0.0),
        groups={name: _figures(parts) for name, parts in by_group.items()} if several else {},
        share=share,
        terms=np.concatenate([_terms(part) for part in whole]) if whole else None,
    )


def _figures(parts: Sequence[_Sums]) -> Figures:
    """Worst of ``parts``, one for each length."""
    worst: dict[str, list[float]] = {name: [] for name in ("rel", "cosine", "kl", "top1", "ppl")}
    errors: dict[str, list[tuple[float, float]]] = {"kl": [], "ppl": []}
    for part in parts:
        outputs = [item for item in part.outputs.values() if item.vectors]
        if outputs:
            worst["rel"].append(max(item.relative_l2 for item in outputs))
            worst["cosine"].append(min(item.cosine for item in outputs))
        if part.sampled:
            kl = float(np.mean(part.kl))
            worst["kl"].append(kl)
            errors["kl"].append((kl, _standard_error(part.kl_groups, part.kl_weights)))
            worst["top1"].append(part.same / part.sampled)
        if part.rises:
            mean = float(np.average(part.rises, weights=part.weights))
            rise = _exp(mean) - 1.0
            worst["ppl"].append(rise)
            deviation = _standard_error(part.rises, part.weights)
            errors["ppl"].append((rise, _exp(mean) * deviation))
    pick = {"cosine": min, "top1": min}
    return Figures(
        {name: pick.get(name, max)(values) if values else None for name, values in worst.items()},
        {name: max(values)[1] for name, values in errors.items() if values},
    )


def _damage(part: _Sums) -> float:
    if part.sampled:
        return float(np.mean(part.kl))
    outputs = [item for item in part.outputs.values() if item.vectors]
    return max((item.relative_l2 for item in outputs), default=0.0) ** 2


def _terms(part: _Sums) -> NDArray[np.float64]:
    if part.sampled:
        return np.array(part.kl)
    total = sum(item.squared_reference for item in part.outputs.values())
    return np.array(part.squares) * (len(part.squares) / max(total, 1e-300))


def _standard_error(values: Sequence[float], weights: Sequence[int]) -> float:
    """Of the weighted mean, wider where it is itself known from few values only.

    0 for a single value, of which nothing is known.
    """
    freedom = len(values) - 1
    if freedom < 1:
        return 0.0
    array, weight = np.asarray(values), np.asarray(weights, np.float64)
    mean = np.average(array, weights=weight)
    variance = float(np.average(np.square(array - mean), weights=weight))
    widen = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.0
    return widen * math.sqrt(variance / freedom)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _sampled(count: int) -> NDArray[np.int64]:
    size = min(count, SAMPLED_POSITIONS)
    return np.unique(np.linspace(0, count - 1, size).round().astype(np.int64))


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def _nll(logits: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """``[tokens]``; 0 where there is no label. float32 exponentials, sums of 1e-6 accuracy."""
    result = np.zeros(len(logits))
    step = max(1, _SLICE_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        part, label = logits[start : start + step], labels[start : start + step]
        top = part.max(axis=1, keepdims=True)
        total = np.log(np.exp(part - top).sum(axis=1, dtype=np.float64)) + top[:, 0]
        chosen = part[np.arange(len(part)), np.maximum(label, 0)]
        result[start : start + step] = np.where(label >= 0, total - chosen, 0.0)
    return result
