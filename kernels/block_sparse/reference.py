"""Block-sparse attention by its formula, float64, quadratic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def listed_pairs(
    counts: NDArray[np.integer],
    indices: NDArray[np.integer],
    query_positions: NDArray[np.int64],
    key_positions: NDArray[np.int64],
    block: int,
) -> NDArray[np.bool_]:
    """Whether a query's list has the block of a key, ``[batch, num_heads, query_len, kv_len]``.

    Args:
        counts, indices: ``[batch, num_heads, query_blocks]`` and ``[..., width]``.
        query_positions, key_positions: ``[batch, query_len]`` and ``[batch, kv_len]``.
    """
    batch, num_heads, query_blocks = counts.shape
    rows = query_rows(query_positions, block)
    columns = np.floor_divide(key_positions, block)
    listed = np.zeros((batch, num_heads, rows.shape[1], columns.shape[1]), dtype=np.bool_)
    for b, h, r in np.ndindex(batch, num_heads, query_blocks):
        chosen = np.isin(columns[b], indices[b, h, r, : counts[b, h, r]])
        listed[b, h, rows[b] == r] = chosen & (key_positions[b] >= 0)
    return listed


def query_rows(query_positions: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    """Query block of each query, ``[batch, query_len]``; -1: none, it stands before position 0."""
    first = np.maximum(query_positions[:, :1], 0)
    rows = (query_positions - first) // block
    return np.where(query_positions < 0, -1, rows)
