"""Block selection by its formula, float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.block_select.estimators import Estimator, mean_of_real
from subquad.kernels.block_sparse.reference import query_rows
from subquad.kernels.operator import UNLIMITED


@dataclass(frozen=True)
class BlockMasses:
    """What selection decides by, each ``[batch, num_heads or 1, query_blocks, key_blocks]``.

    Attributes:
        mass: estimated share of attention; zero where not a candidate.
        candidate: blocks that are ranked.
        always: blocks that are kept whatever their mass.
    """

    mass: NDArray[np.float64]
    candidate: NDArray[np.bool_]
    always: NDArray[np.bool_]


def block_masses(
    query: NDArray[np.floating],
    key: NDArray[np.floating],
    key_mask: NDArray[np.bool_] | None,
    query_positions: NDArray[np.int64],
    key_positions: NDArray[np.int64],
    *,
    estimator: Estimator,
    block: int,
    sinks: int,
    scale: float,
    softcap: float,
    left: int,
    right: int,
) -> BlockMasses:
    """Estimate, visibility and guards; see ``semantics.py``."""
    batch, num_heads, query_len, _ = query.shape
    kv_len = key.shape[2]
    query_blocks, key_blocks = -(-query_len // block), -(-kv_len // block)
    if key_mask is None:
        key_mask = np.ones((batch, kv_len), dtype=np.bool_)
    queries = np.zeros((batch, num_heads, query_blocks, block, query.shape[3]))
    real_queries = np.zeros((batch, query_blocks, block), dtype=np.bool_)
    pooled = np.zeros((batch, key.shape[1], key_blocks, key.shape[3]))
    key_count = np.zeros((batch, key_blocks), dtype=np.int64)
    rows = query_rows(query_positions, block)
    for b in range(batch):
        slots = query_positions[b] - key_positions[b, 0]
        inside = (slots >= 0) & (slots < kv_len)
        real = inside & key_mask[b, np.clip(slots, 0, kv_len - 1)]
        for r in range(query_blocks):
            members = np.flatnonzero(rows[b] == r)
            queries[b, :, r, : len(members)] = query[b][:, members]
            real_queries[b, r, : len(members)] = real[members]
        for c in range(key_blocks):
            members = np.flatnonzero((key_positions[b] // block == c) & key_mask[b])
            key_count[b, c] = len(members)
            if len(members):
                vectors = key[b, :, members].astype(np.float64).swapaxes(0, 1)
                pooled[b, :, c] = mean_of_real(vectors, np.ones(vectors.shape[:-1], np.bool_))
    each = np.broadcast_to(real_queries[:, None], queries.shape[:-1])
    representatives = estimator.represent(queries, each)
    pooled = np.repeat(pooled, num_heads // key.shape[1], axis=1)
    scores = scale * (representatives @ pooled.swapaxes(-1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + np.log(np.maximum(key_count, 1))[:, None, None]

    first = np.maximum(query_positions[:, :1], 0) + np.arange(query_blocks) * block
    first_query, first_key = first[:, None, :, None], np.arange(key_blocks) * block
    last_query, last_key = first_query + block - 1, first_key + block - 1
    partly, wholly = np.bool_(True), np.bool_(True)
    if left != UNLIMITED:
        partly, wholly = first_query - last_key <= left, last_query - first_key <= left
    if right != UNLIMITED:
        partly = partly & (first_key - last_query <= right)
        wholly = wholly & (last_key - first_query <= right)
    has_query = np.asarray(real_queries.any(axis=-1))
    there = has_query[:, None, :, None] & (key_count > 0)[:, None, None]
    near = (first_key <= last_query + block) & (last_key >= first_query - block)
    sink = np.arange(key_blocks) < sinks
    always = there & partly & (near | sink | ~wholly)
    own = (first_key <= last_query) & (last_key >= first_query)
    candidate = there & (wholly | (partly & own) if estimator.reads_later_queries else wholly)
    shown = np.where(candidate, scores, -np.inf)
    peak = shown.max(axis=-1, keepdims=True)
    weights = np.where(candidate, np.exp(scores - np.where(np.isfinite(peak), peak, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return BlockMasses(weights / np.where(total > 0.0, total, 1.0), candidate, always)


def kept_blocks(
    masses: BlockMasses, thresholds: NDArray[np.floating]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Blocks to keep, and the mass ranked before each."""
    order = np.argsort(-masses.mass, axis=-1, kind="stable")
    ranked = np.take_along_axis(masses.mass, order, axis=-1)
    before = np.empty_like(ranked)
    np.put_along_axis(before, order, np.cumsum(ranked, axis=-1) - ranked, axis=-1)
    limit = np.asarray(thresholds, np.float64)[:, None, None]
    enough = (before < limit) | (limit >= 1.0)
    return (masses.candidate & enough) | masses.always, before


def block_lists(keep: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``block_counts`` and ``block_indices``: rising, zeros behind the end."""
    counts = keep.sum(axis=-1).astype(np.int32)
    indices = np.zeros(keep.shape, np.int32)
    for at in np.ndindex(*counts.shape):
        indices[(*at, slice(counts[at]))] = np.flatnonzero(keep[at])
    return counts, indices
