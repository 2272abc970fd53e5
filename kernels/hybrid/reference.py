"""Exact keys plus linear keys under one normaliser, by the formula, float64, quadratic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.visibility import divide_or_zero


def hybrid_attention(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    query_features: NDArray[np.float64] | None,
    key_features: NDArray[np.float64] | None,
    exact: NDArray[np.bool_],
    linear: NDArray[np.bool_],
    scale: float,
) -> NDArray[np.float64]:
    """Weights ``exp(s)`` on exact keys and ``phi(q).phi(k)`` on linear ones, normalised together.

    Both are multiplied by ``exp(-m)``, which cancels; ``m`` keeps them finite.

    Args:
        query, key, value: ``[batch, num_heads or num_kv_heads, length, dim]``.
        query_features, key_features: the same after the feature map; ``None``: no linear part.
        exact, linear: ``[batch, query_len, kv_len]``, disjoint.
    """
    group = query.shape[1] // key.shape[1]
    key = np.repeat(key, group, axis=1)
    value = np.repeat(value, group, axis=1)
    scores = scale * (query @ key.swapaxes(-1, -2))
    exact, linear = exact[:, None], linear[:, None]
    shift = np.where(exact, scores, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    similarity = np.zeros_like(scores)
    if query_features is not None and key_features is not None:
        key_features = np.repeat(key_features, group, axis=1)
        similarity = np.where(linear, query_features @ key_features.swapaxes(-1, -2), 0.0)
    total = similarity.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        shift = np.maximum(shift, np.log(total))
    shift = np.where(np.isfinite(shift), shift, 0.0)
    weights = np.where(exact, np.exp(np.minimum(scores - shift, 0.0)), similarity * np.exp(-shift))
    return divide_or_zero(weights @ value, weights.sum(axis=-1, keepdims=True))
