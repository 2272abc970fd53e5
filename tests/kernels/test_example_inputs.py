from __future__ import annotations

import numpy as np
import pytest

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.example_inputs import Sizes, example_inputs
from subquad.kernels.operator import Blocks, TensorSpec, present_inputs

VARIANT = AttentionVariant(4, 2, 8, 5, 0.3, window_right=0, has_key_mask=True)


def test_names_shapes_and_positions_follow_the_variant() -> None:
    inputs = example_inputs(VARIANT, Sizes(batch=2, query_len=3, kv_len=10, real=0.5))
    assert tuple(inputs) == present_inputs(VARIANT)
    assert inputs["query"].shape == (2, 4, 3, 8) and inputs["value"].shape == (2, 2, 10, 5)
    assert inputs["key_mask"].sum(axis=1).tolist() == [5, 5]
    assert inputs["query_positions"].tolist() == [[7, 8, 9]] * 2


def test_equal_arguments_give_equal_arrays() -> None:
    sizes = Sizes(1, 4, 4)
    first, again = (example_inputs(VARIANT, sizes, seed=3) for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    other = example_inputs(VARIANT, sizes, seed=4)
    assert not np.array_equal(first["query"], other["query"])


def test_lists_of_blocks_keep_the_load_and_the_own_block() -> None:
    variant = BlockSparseVariant(2, 1, 8, 8, 0.3, block=8, window_right=0)
    for query_len, kv_len in ((160, 160), (19, 160), (1, 33)):
        sizes = Sizes(2, query_len, kv_len, density=0.3)
        feeds = example_inputs(variant, sizes)
        counts, indices = feeds["block_counts"], feeds["block_indices"]
        assert counts.shape == (2, 2, -(-query_len // 8))
        for at in np.ndindex(*counts.shape):
            own = min(kv_len - query_len + at[2] * 8 + 7, kv_len - 1) // 8
            listed = indices[at][: counts[at]]
            assert own in listed and listed.max() <= own and len(set(listed)) == len(listed)
            assert counts[at] == max(1, round(0.3 * (own + 1)))


def test_unknown_sizes_and_inputs_are_refused() -> None:
    sizes = Sizes(2, 100, 200)
    assert sizes.of(Blocks("kv_len", 64)) == 4 and sizes.of(7) == 7
    with pytest.raises(ValueError, match="'states'"):
        sizes.of("states")

    class Listed(AttentionVariant):
        @property
        def inputs(self) -> tuple[TensorSpec | None, ...]:
            return (*super().inputs, TensorSpec("offsets", "int32", ("batch", 3)))

    with pytest.raises(ValueError, match="'offsets'"):
        example_inputs(Listed(4, 2, 8, 5, 0.3), sizes)
