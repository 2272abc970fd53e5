"""Example lists of blocks, for benchmarks, tuning and the cost table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.operator import OperatorVariant

if TYPE_CHECKING:
    from subquad.kernels.example_inputs import Sizes


def example_lists(
    variant: OperatorVariant, sizes: Sizes, rng: np.random.Generator
) -> Mapping[str, NDArray[np.int32]]:
    """Random lists: ``sizes.density`` of the blocks that a causal query block may see, or of all.

    The query block's own keys are always among them. Queries are the last of the slots.
    """
    assert isinstance(variant, BlockSparseVariant)
    block = variant.block
    rows = -(-sizes.query_len // block)
    columns = -(-sizes.kv_len // block)
    counts = np.zeros((sizes.batch, variant.num_heads, rows), np.int32)
    indices = np.zeros((*counts.shape, columns), np.int32)
    for at in np.ndindex(*counts.shape):
        last = min(sizes.kv_len - sizes.query_len + (at[2] + 1) * block, sizes.kv_len) - 1
        seen = last // block + 1 if variant.window_right == 0 else columns
        kept = max(1, round(sizes.density * seen))
        others = np.delete(np.arange(seen), min(last // block, seen - 1))
        chosen = rng.permutation(others)[: kept - 1]
        counts[at] = 1 + len(chosen)
        indices[at][: counts[at]] = np.sort(np.append(chosen, last // block))
    return {"block_counts": counts, "block_indices": indices}
