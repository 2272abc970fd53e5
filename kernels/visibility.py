"""Which key slots a query slot may see, in plain NumPy: shared by the float64 references."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.operator import UNLIMITED


def in_band(
    query_positions: NDArray[np.int64],
    key_positions: NDArray[np.int64],
    left: int,
    right: int,
) -> NDArray[np.bool_]:
    """``-right <= query_position - key_position <= left`` as ``[batch, query_len, kv_len]``."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    visible = np.ones(distance.shape, dtype=np.bool_)
    if left != UNLIMITED:
        visible &= distance <= left
    if right != UNLIMITED:
        visible &= -distance <= right
    return visible


def allowed_keys(
    shape: tuple[int, int, int],
    left: int,
    right: int,
    key_mask: NDArray[np.bool_] | None,
    query_positions: NDArray[np.int64] | None,
    key_positions: NDArray[np.int64] | None,
) -> NDArray[np.bool_]:
    """Keys that are real and inside the band, ``[batch, query_len, kv_len]``."""
    visible = np.ones(shape, dtype=np.bool_)
    if left != UNLIMITED or right != UNLIMITED:
        if query_positions is None or key_positions is None:
            raise ValueError("a banded variant needs query_positions and key_positions")
        visible &= in_band(query_positions, key_positions, left, right)
    if key_mask is not None:
        visible &= key_mask[:, None, :]
    return visible


def divide_or_zero(
    numerator: NDArray[np.float64], denominator: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Quotient, exactly zero where the denominator is."""
    safe = np.where(denominator == 0.0, 1.0, denominator)
    return np.where(denominator == 0.0, 0.0, numerator / safe)
