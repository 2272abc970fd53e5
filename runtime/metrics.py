"""How far two sets of values are apart, accumulated batch by batch in float64.

All work on ``[vectors, size]`` arrays, in slices: logits of a long sequence are large enough
that a float64 copy of them would decide the peak memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SLICE_ELEMENTS = 1 << 20


@dataclass
class Difference:
    """Sums over the vectors seen so far.

    Attributes:
        vectors: number of vectors compared.
        non_finite: elements that are NaN or infinite in the model only.
        reference_non_finite: elements that are NaN or infinite in the reference; not compared.
        squared_error, squared_reference: sums over all elements.
        max_abs: largest absolute difference.
        cosine_sum, cosine_min: over vectors; two zero vectors count as equal.
    """

    vectors: int = 0
    non_finite: int = 0
    reference_non_finite: int = 0
    squared_error: float = 0.0
    squared_reference: float = 0.0
    max_abs: float = 0.0
    cosine_sum: float = 0.0
    cosine_min: float = math.inf

    def add(self, reference: NDArray[Any], model: NDArray[Any]) -> None:
        """Take in more vectors; both arrays ``[vectors, size]``."""
        for r, m in _slices(reference, model):
            finite = np.isfinite(r)
            bad = finite & ~np.isfinite(m)
            self.non_finite += int(bad.sum())
            self.reference_non_finite += int((~finite).sum())
            usable = finite & ~bad
            r, m = np.where(usable, r, 0.0), np.where(usable, m, 0.0)
            error = m - r
            self.vectors += len(r)
            self.squared_error += float(np.square(error).sum())
            self.squared_reference += float(np.square(r).sum())
            self.max_abs = max(self.max_abs, float(np.abs(error).max(initial=0.0)))
            cosine = _cosine(r, m)
            self.cosine_sum += float(cosine.sum())
            self.cosine_min = min(self.cosine_min, float(cosine.min(initial=math.inf)))

    def plus(self, other: Difference) -> Difference:
        """Of the vectors of both."""
        return Difference(
            vectors=self.vectors + other.vectors,
            non_finite=self.non_finite + other.non_finite,
            reference_non_finite=self.reference_non_finite + other.reference_non_finite,
            squared_error=self.squared_error + other.squared_error,
            squared_reference=self.squared_reference + other.squared_reference,
            max_abs=max(self.max_abs, other.max_abs),
            cosine_sum=self.cosine_sum + other.cosine_sum,
            cosine_min=min(self.cosine_min, other.cosine_min),
        )

    @property
    def relative_l2(self) -> float:
        """``|model - reference| / |reference|``; infinite when the model is not finite."""
        if self.non_finite:
            return math.inf
        if self.squared_reference == 0.0:
            return 0.0 if self.squared_error == 0.0 else math.inf
        return math.sqrt(self.squared_error / self.squared_reference)

    @property
    def cosine(self) -> float:
        """Mean over vectors; NaN when the model is not finite."""
        if self.non_finite:
            return math.nan
        return self.cosine_sum / self.vectors if self.vectors else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            "relative_l2": self.relative_l2,
            "max_abs": self.max_abs,
            "cosine_mean": self.cosine,
            "cosine_min": self.cosine_min,
            "vectors": self.vectors,
            "non_finite": self.non_finite,
            "reference_non_finite": self.reference_non_finite,
        }


@dataclass
class LogitsDifference:
    """Differences of two distributions over the vocabulary, in nats.

    Attributes:
        positions: number of positions compared.
        kl_sum, kl_max: of ``KL(reference || model)``.
        top1_same: positions where both have the same most likely token.
        labels: number of positions with a next token.
        reference_nll, model_nll: summed negative log-likelihood of the next tokens.
    """

    positions: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    top1_same: int = 0
    labels: int = 0
    reference_nll: float = 0.0
    model_nll: float = 0.0

    def add(self, reference: NDArray[Any], model: NDArray[Any], labels: NDArray[np.int64]) -> None:
        """Take in more positions.

        Args:
            reference, model: ``[positions, vocabulary]``.
            labels: ``[positions]`` next token, -1 = none.
        """
        start = 0
        for r, m in _slices(reference, model):
            log_p, log_q = _log_softmax(r), _log_softmax(m)
            p = np.exp(log_p)
            with np.errstate(invalid="ignore"):
                terms = np.where(p > 0.0, p * (log_p - log_q), 0.0)
            # Rounding may leave a sum just below zero.
            kl = np.maximum(terms.sum(axis=1), 0.0)
            self.positions += len(r)
            self.kl_sum += float(kl.sum())
            self.kl_max = max(self.kl_max, float(kl.max(initial=0.0)))
            self.top1_same += int((r.argmax(axis=1) == m.argmax(axis=1)).sum())
            rows = np.arange(len(r))
            label = labels[start : start + len(r)]
            rows, label = rows[label >= 0], label[label >= 0]
            self.labels += len(rows)
            self.reference_nll -= float(log_p[rows, label].sum())
            self.model_nll -= float(log_q[rows, label].sum())
            start += len(r)

    def merge(self, other: LogitsDifference) -> None:
        """Take in everything ``other`` has seen."""
        self.positions += other.positions
        self.kl_sum += other.kl_sum
        self.kl_max = max(self.kl_max, other.kl_max)
        self.top1_same += other.top1_same
        self.labels += other.labels
        self.reference_nll += other.reference_nll
        self.model_nll += other.model_nll

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / self.positions if self.positions else math.nan

    @property
    def top1(self) -> float:
        """Share of positions with the same most likely token."""
        return self.top1_same / self.positions if self.positions else math.nan

    @property
    def reference_perplexity(self) -> float | None:
        return _perplexity(self.reference_nll, self.labels)

    @property
    def model_perplexity(self) -> float | None:
        return _perplexity(self.model_nll, self.labels)

    @property
    def perplexity_ratio(self) -> float | None:
        """Model over reference; above 1 is worse."""
        return _perplexity(self.model_nll - self.reference_nll, self.labels)

    def to_json(self) -> dict[str, Any]:
        return {
            "kl_mean": self.kl_mean,
            "kl_max": self.kl_max,
            "top1_agreement": self.top1,
            "positions": self.positions,
            "reference_perplexity": self.reference_perplexity,
            "model_perplexity": self.model_perplexity,
            "perplexity_ratio": self.perplexity_ratio,
            "labels": self.labels,
        }


def relative_change(before: NDArray[Any], after: NDArray[Any]) -> float:
    """0 if bit-identical (equal NaNs included), else the relative L2 norm of the change."""
    pairs = np.ravel(before), np.ravel(after)
    parts = [slice(n, n + _SLICE_ELEMENTS) for n in range(0, len(pairs[0]), _SLICE_ELEMENTS)]
    if all(pairs[0][part].tobytes() == pairs[1][part].tobytes() for part in parts):
        return 0.0
    squares = np.zeros(2)
    with np.errstate(invalid="ignore", over="ignore"):
        for part in parts:
            b, a = (np.asarray(values[part], np.float64) for values in pairs)
            squares += np.dot(a - b, a - b), np.dot(b, b)
    change, norm = np.sqrt(squares)
    if not np.isfinite(change) or norm == 0.0:
        return math.inf if change != 0.0 else 5e-324
    # Signed zeros differ in bits only; they still are a change.
    return max(float(change / norm), 5e-324)


def _slices(
    reference: NDArray[Any], model: NDArray[Any]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    step = max(1, _SLICE_ELEMENTS // max(1, reference.shape[1]))
    for start in range(0, len(reference), step):
        part = slice(start, start + step)
        yield np.asarray(reference[part], np.float64), np.asarray(model[part], np.float64)


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    product = norms[0] * norms[1]
    safe = np.where(product == 0.0, 1.0, product)
    cosine = np.einsum("ij,ij->i", a, b) / safe
    both_zero = (norms[0] == 0.0) & (norms[1] == 0.0)
    return np.where(both_zero, 1.0, np.clip(cosine, -1.0, 1.0))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    top = logits.max(axis=1, keepdims=True)
    shifted = logits - np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _perplexity(nll: float, count: int) -> float | None:
    if count == 0:
        return None
    try:
        return math.exp(nll / count)
    except OverflowError:
        return math.inf
