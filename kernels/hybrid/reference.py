"""Exact keys plus linear keys under one normaliser, by the formula, float64, quadratic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.visibility import divide_or_zero

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LinearWeights:
    """What the linear part weighs its keys by.

    Attributes:
        query_features, key_features: ``[batch, num_heads or num_kv_heads, length, features]``.
        log_decay: ``[num_kv_heads]``, at most 0; a key at ``distance`` counts ``exp(log_decay *
            distance)`` of its weight. ``None``: no decay.
        distance: ``[batch, query_len, kv_len]``, not negative.
        window_gain: ``[num_heads]``: the factor of the exact part in the ``shared`` mix; ``None``
            for ``lse``.
    """

    query_features: Array
    key_features: Array
    log_decay: Array | None = None
    distance: Array | None = None
    window_gain: Array | None = None

    def similarity(self, group: int) -> Array:
        keys = np.repeat(self.key_features, group, axis=1)
        similarity: Array = self.query_features @ keys.swapaxes(-1, -2)
        if self.log_decay is None:
            return similarity
        assert self.distance is not None
        rate = np.repeat(self.log_decay, group)[:, None, None]
        return similarity * np.exp(rate * self.distance[:, None])


def hybrid_attention(
    query: Array,
    key: Array,
    value: Array,
    linear_weights: LinearWeights | None,
    exact: NDArray[np.bool_],
    linear: NDArray[np.bool_],
    scale: float,
) -> Array:
    """Weights ``exp(s)`` on exact keys and ``phi(q).phi(k)`` on linear ones, normalised together.

    In the ``lse`` mix both are multiplied by ``exp(-m)``, which cancels; ``m`` keeps them finite.
    In the ``shared`` mix only the exact ones are, with ``m`` their maximum, and by the gain.

    Args:
        query, key, value: ``[batch, num_heads or num_kv_heads, length, dim]``.
        linear_weights: ``None``: no linear part.
        exact, linear: ``[batch, query_len, kv_len]``, disjoint.
    """
    group = query.shape[1] // key.shape[1]
    key = np.repeat(key, group, axis=1)
    value = np.repeat(value, group, axis=1)
    scores = scale * (query @ key.swapaxes(-1, -2))
    exact, linear = exact[:, None], linear[:, None]
    shift = np.where(exact, scores, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    gain: Array | None = None
    similarity = np.zeros_like(scores)
    if linear_weights is not None:
        similarity = np.where(linear, linear_weights.similarity(group), 0.0)
        gain = linear_weights.window_gain
    if gain is None:
        with np.errstate(divide="ignore"):
            shift = np.maximum(shift, np.log(similarity.sum(axis=-1, keepdims=True)))
    shift = np.where(np.isfinite(shift), shift, 0.0)
    weights = np.exp(np.minimum(scores - shift, 0.0))
    if gain is None:
        similarity = similarity * np.exp(-shift)
    else:
        weights *= gain[:, None, None]
    weights = np.where(exact, weights, similarity)
    return divide_or_zero(weights @ value, weights.sum(axis=-1, keepdims=True))


def linear_attention(
    value: Array,
    weights: LinearWeights,
    visible: NDArray[np.bool_],
    factor: float | None,
    epsilon: float,
    least: float = 0.0,
) -> Array:
    """``factor * sum r v`` over visible keys, or ``sum r v / max(least, epsilon + sum r)``.

    Args:
        value: ``[batch, num_kv_heads, kv_len, value_dim]``.
        visible: ``[batch, query_len, kv_len]``.
        factor: ``None``: there is a normaliser.
    """
    group = weights.query_features.shape[1] // value.shape[1]
    similarity = np.where(visible[:, None], weights.similarity(group), 0.0)
    sums: Array = similarity @ np.repeat(value, group, axis=1)
    if factor is not None:
        return factor * sums
    total = similarity.sum(axis=-1, keepdims=True) + epsilon
    return divide_or_zero(sums, np.maximum(total, least))
