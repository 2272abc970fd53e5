from __future__ import annotations

import numpy as np
import pytest

from subquad.kernels.attention.semantics import AttentionVariant
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
