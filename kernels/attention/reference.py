"""Softmax attention by its formula, float64, quadratic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.visibility import divide_or_zero


def attention(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    visible: NDArray[np.bool_],
    scale: float,
    softcap: float,
) -> NDArray[np.float64]:
    """``softmax(cap(scale * q k^T))`` over visible keys, times v; zeros where none is visible.

    Args:
        query, key, value: ``[batch, num_heads or num_kv_heads, length, dim]``.
        visible: ``[batch, query_len, kv_len]``.
    """
    group = query.shape[1] // key.shape[1]
    key = np.repeat(key, group, axis=1)
    value = np.repeat(value, group, axis=1)
    scores = scale * (query @ key.swapaxes(-1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    visible = visible[:, None]
    shift = np.where(visible, scores, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(shift), shift, 0.0)
    weights = np.where(visible, np.exp(np.minimum(scores - shift, 0.0)), 0.0)
    return divide_or_zero(weights @ value, weights.sum(axis=-1, keepdims=True))
