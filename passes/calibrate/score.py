"""How far a plan moves the model's outputs on held-out inputs.

Logits are too large to keep: a teacher run leaves the negative log-likelihood of every next token
and whole distributions at sampled positions only. So perplexity is compared everywhere, and
KL and top-1 at the samples. Other outputs are kept and compared in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.budget import METRICS, Budget
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest, OutputSpec
from subquad.runtime.metamorphic import length_axis, real_tokens, select
from subquad.runtime.metrics import Difference
from subquad.runtime.samples import Batch, Layout, is_causal_model

SAMPLED_POSITIONS = 384
"""Positions per batch at which whole distributions are compared."""

_GROUP = 128
"""Neighbouring positions whose mean counts as one observation for a standard error."""
_SLICE_ELEMENTS = 1 << 22

Run = Callable[[Callable[[int, Mapping[str, NDArray[Any]]], None]], None]
"""Runs the model on all batches and calls back with number and outputs of each."""


@dataclass(frozen=True)
class Score:
    """Distance from the exact model; worst length.

    Attributes:
        metrics: as ``budget.METRICS``, for what this model has.
        errors: standard errors of ``kl`` and ``ppl``.
        damage: what the search minimises: mean KL, or the squared relative error of the outputs
            where there are no logits.
        custom: score of the user's metric; higher is better.
        terms: the damage of single positions, whose mean is the damage of their length, to compare
            two runs in pairs; not kept on disk.
    """

    metrics: Mapping[str, float | None]
    errors: Mapping[str, float]
    damage: float
    custom: float | None = None
    terms: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "metrics": dict(self.metrics),
            "errors": dict(self.errors),
            "damage": self.damage,
            "custom": self.custom,
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Score:
        return Score(raw["metrics"], raw["errors"], raw["damage"], raw["custom"])


@dataclass
class _Group:
    """Sums for one length."""

    kl: list[float] = field(default_factory=list)
    same: int = 0
    sampled: int = 0
    rises: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    outputs: dict[str, Difference] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)


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

    def teach(self, run: Run) -> None:
        """Take in the exact outputs."""
        self._teacher.clear()

        def take(number: int, outputs: Mapping[str, NDArray[Any]]) -> None:
            for spec in self._manifest.outputs:
                vectors, labels = self._vectors(spec, self._batches[number], outputs[spec.name])
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
        return Score({name: names.get(name) for name in METRICS}, {}, 0.0)

    def score(self, run: Run) -> Score:
        """Compare one run."""
        groups: dict[int, _Group] = {}

        def take(number: int, outputs: Mapping[str, NDArray[Any]]) -> None:
            batch = self._batches[number]
            group = groups.setdefault(batch.length, _Group())
            for spec in self._manifest.outputs:
                vectors, labels = self._vectors(spec, batch, outputs[spec.name])
                known = self._teacher[number, spec.name]
                difference = group.outputs.setdefault(spec.name, Difference())
                if not spec.is_logits:
                    difference.add(known, vectors)
                    square = np.square(np.subtract(vectors, known, dtype=np.float64)).sum(axis=1)
                    group.squares += [float(x) for x in square]
                    continue
                at, log_p, nll = known
                self._add_logits(group, at, log_p, nll, vectors, labels)
                # Distributions, not logits: a shift of all logits is no difference.
                difference.add(log_p, _log_softmax(vectors[at]))

        run(take)
        return _summary(list(groups.values()))

    def _add_logits(
        self,
        group: _Group,
        at: NDArray[np.int64],
        log_p: NDArray[np.float32],
        nll: NDArray[np.float64],
        vectors: NDArray[np.float32],
        labels: NDArray[np.int64],
    ) -> None:
        log_q = _log_softmax(vectors[at])
        with np.errstate(invalid="ignore"):
            terms = np.exp(log_p) * (log_p - log_q)
        kl = np.maximum(np.where(np.isneginf(log_p), 0.0, terms).sum(axis=1, dtype=np.float64), 0)
        group.kl += [float(x) for x in kl]
        group.same += int((log_p.argmax(axis=1) == log_q.argmax(axis=1)).sum())
        group.sampled += len(at)
        if self._causal and (labels >= 0).any():
            rise = (_nll(vectors, labels) - nll)[labels >= 0]
            for start in range(0, len(rise), _GROUP):
                part = rise[start : start + _GROUP]
                group.rises.append(float(part.mean()))
                group.weights.append(len(part))

    def _vectors(
        self, spec: OutputSpec, batch: Batch, values: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Real tokens as ``[tokens, size]``, and the token that follows each, or -1."""
        real = real_tokens(self._layout, batch.feeds)
        found = length_axis(spec.shape, values, real)
        if found is None:
            vectors = values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(-1, 1)
            return vectors, np.full(len(vectors), -1, np.int64)
        axis, mask = found
        vectors = select(values, axis, mask)
        labels = np.full(mask.shape, -1, np.int64)
        if axis == 1 and self._causal:
            for item in self._manifest.inputs:
                ids = batch.feeds[item.name]
                if item.role == "token_ids" and ids.shape == mask.shape:
                    labels[:, :-1] = np.where(mask[:, 1:], ids[:, 1:], -1)
                    break
        return vectors, np.asarray(labels[mask])


def _summary(groups: Sequence[_Group]) -> Score:
    worst: dict[str, list[float]] = {name: [] for name in ("rel", "cosine", "kl", "top1", "ppl")}
    errors: dict[str, list[tuple[float, float]]] = {"kl": [], "ppl": []}
    damages = []
    for group in groups:
        outputs = [item for item in group.outputs.values() if item.vectors]
        if outputs:
            worst["rel"].append(max(item.relative_l2 for item in outputs))
            worst["cosine"].append(min(item.cosine for item in outputs))
        damage = max((item.relative_l2 for item in outputs), default=0.0) ** 2
        if group.sampled:
            damage = float(np.mean(group.kl))
            worst["kl"].append(damage)
            errors["kl"].append((damage, _standard_error(group.kl, [1] * len(group.kl))))
            worst["top1"].append(group.same / group.sampled)
        if group.rises:
            mean = float(np.average(group.rises, weights=group.weights))
            rise = _exp(mean) - 1.0
            worst["ppl"].append(rise)
            deviation = _standard_error(group.rises, group.weights)
            errors["ppl"].append((rise, _exp(mean) * deviation))
        damages.append(damage if math.isfinite(damage) else math.inf)
    pick = {"cosine": min, "top1": min}
    return Score(
        metrics={
            name: pick.get(name, max)(values) if values else None for name, values in worst.items()
        },
        errors={name: max(values)[1] for name, values in errors.items() if values},
        damage=max(damages, default=0.0),
        terms=np.concatenate([_terms(group) for group in groups]) if groups else None,
    )


def _terms(group: _Group) -> NDArray[np.float64]:
    if group.sampled:
        return np.array(group.kl)
    total = sum(item.squared_reference for item in group.outputs.values())
    return np.array(group.squares) * (len(group.squares) / max(total, 1e-300))


def _standard_error(values: Sequence[float], weights: Sequence[int]) -> float:
    """Of the weighted mean; 0 for a single value, of which nothing is known."""
    if len(values) < 2:
        return 0.0
    array, weight = np.asarray(values), np.asarray(weights, np.float64)
    mean = np.average(array, weights=weight)
    variance = float(np.average(np.square(array - mean), weights=weight))
    return math.sqrt(variance / (len(array) - 1))


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
