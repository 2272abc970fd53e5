"""Lists of key blocks for tests of block-sparse attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles import Case
from subquad.kernels.block_sparse.semantics import BlockSparseVariant


def with_lists(
    rng: np.random.Generator,
    variant: BlockSparseVariant,
    case: Case,
    density: float = 0.5,
    *,
    empty: float = 0.2,
    slack: int = 0,
) -> Case:
    """``case`` with random lists, in random order; behind their ends stands rubbish.

    Args:
        density: chance of a block to be listed.
        empty: chance of a list to be empty.
        slack: how much wider than the longest possible list the rows are.
    """
    batch, num_heads, query_len, _ = case.query.shape
    query_blocks = -(-query_len // variant.block)
    key_blocks = -(-case.key.shape[2] // variant.block)
    shape = (batch, num_heads, query_blocks)
    chosen = rng.random((*shape, key_blocks)) < density
    chosen[rng.random(shape) < empty] = False
    counts = chosen.sum(axis=-1).astype(np.int32)
    indices = rng.integers(-999, 999, (*shape, key_blocks + slack)).astype(np.int32)
    for at in np.ndindex(*shape):
        indices[(*at, slice(counts[at]))] = rng.permutation(np.flatnonzero(chosen[at]))
    return case.with_(extra={"block_counts": counts, "block_indices": indices})


def every_block(variant: BlockSparseVariant, case: Case) -> Case:
    """``case`` with lists of all blocks."""
    batch, num_heads, query_len, _ = case.query.shape
    shape = (batch, num_heads, -(-query_len // variant.block))
    key_blocks = -(-case.key.shape[2] // variant.block)
    counts = np.full(shape, key_blocks, np.int32)
    indices: Any = np.broadcast_to(np.arange(key_blocks, dtype=np.int32), (*shape, key_blocks))
    lists = {"block_counts": counts, "block_indices": np.ascontiguousarray(indices)}
    return case.with_(extra=lists)
