"""Softmax and sigmoid attention by their formulas, float64, quadratic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.operator import HIDING_BIAS
from subquad.kernels.visibility import divide_or_zero


@dataclass(frozen=True)
class AttentionResult:
    """Attention of every row, and what is known of its distribution.

    Attributes:
        output: ``[batch, num_heads, query_len, value_dim]``.
        lse: logarithm of the row's denominator, ``[batch, num_heads, query_len]``; -inf where the
            row sees nothing.
        entropy: of the row's weights in nats, same shape; 0 where the row sees nothing.
    """

    output: NDArray[np.float64]
    lse: NDArray[np.float64]
    entropy: NDArray[np.float64]


def attention(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    visible: NDArray[np.bool_],
    scale: float,
    softcap: float,
) -> NDArray[np.float64]:
    """The output of ``attend`` without biases."""
    return attend(query, key, value, visible, scale, softcap).output


def attend(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    visible: NDArray[np.bool_],
    scale: float,
    softcap: float = 0.0,
    biases: Sequence[NDArray[np.float64]] = (),
    sink_logits: NDArray[np.float64] | None = None,
) -> AttentionResult:
    """``softmax(cap(scale * q k^T) + bias)`` over visible keys, times v; zeros where none is.

    A sink logit is the score of one more key, which every query sees and whose value is zero.

    Args:
        query, key, value: ``[batch, num_heads or num_kv_heads, length, dim]``.
        visible: ``[batch, query_len, kv_len]``, or for each head on a second axis.
        biases: broadcast to ``[batch, num_heads, query_len, kv_len]``; hide a key where one is
            ``HIDING_BIAS`` or less.
        sink_logits: ``[num_heads]``.
    """
    value = np.repeat(value, query.shape[1] // key.shape[1], axis=1)
    scores, seen = _scores(query, key, visible, scale, softcap, biases)
    if sink_logits is not None:
        column = np.broadcast_to(sink_logits[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], axis=-1)
        seen = np.concatenate([seen, np.ones_like(column, dtype=np.bool_)], axis=-1)
        value = np.pad(value, ((0, 0), (0, 0), (0, 1), (0, 0)))
    shift = np.where(seen, scores, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(shift), shift, 0.0)
    relative = np.where(seen, np.minimum(scores - shift, 0.0), 0.0)
    weights = np.where(seen, np.exp(relative), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    shares = divide_or_zero(weights, np.broadcast_to(total, weights.shape))
    with np.errstate(divide="ignore"):
        log_total = np.log(total)
    expected = (shares * relative).sum(axis=-1, keepdims=True)
    entropy = np.where(total > 0.0, log_total - expected, 0.0)
    return AttentionResult(
        output=divide_or_zero(weights @ value, total),
        lse=np.where(total > 0.0, log_total + shift, -np.inf)[..., 0],
        entropy=entropy[..., 0],
    )


def attend_by_sigmoid(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    visible: NDArray[np.bool_],
    scale: float,
    softcap: float = 0.0,
    biases: Sequence[NDArray[np.float64]] = (),
) -> NDArray[np.float64]:
    """``sigmoid(cap(scale * q k^T) + bias)`` over visible keys, times v; arguments as there."""
    value = np.repeat(value, query.shape[1] // key.shape[1], axis=1)
    scores, seen = _scores(query, key, visible, scale, softcap, biases)
    # The larger of exp(x) and 1 in the denominator: neither form overflows.
    power = np.exp(-np.abs(scores))
    weights = np.where(scores >= 0, 1.0, power) / (1.0 + power)
    output: NDArray[np.float64] = np.where(seen, weights, 0.0) @ value
    return output


def _scores(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    visible: NDArray[np.bool_],
    scale: float,
    softcap: float,
    biases: Sequence[NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores with their biases, and which count: ``[batch, num_heads, query_len, kv_len]``."""
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    scores = scale * (query @ key.swapaxes(-1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    visible = visible[:, None] if visible.ndim == 3 else visible
    seen = np.broadcast_to(visible, scores.shape)
    for bias in biases:
        seen = seen & (bias > HIDING_BIAS)
        scores = scores + np.where(bias > HIDING_BIAS, bias, 0.0)
    return scores, seen
