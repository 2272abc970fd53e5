"""Inputs for a node of any variant: for benchmarks, tuning and the cost table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.block_sparse.examples import example_lists
from subquad.kernels.operator import Blocks, Dim, OperatorVariant, TensorSpec


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dimensions that a variant leaves open.

    Attributes:
        real: share of the keys that are real; the others are padding on the right.
        density: share of the key blocks that a list of blocks keeps, for operators that read one.
    """

    batch: int
    query_len: int
    kv_len: int
    real: float = 1.0
    density: float = 1.0

    @property
    def real_keys(self) -> int:
        return max(1, int(self.kv_len * self.real))

    def of(self, dim: Dim) -> int:
        """The size of a dimension.

        Raises:
            ValueError: a symbol that these sizes do not know.
        """
        if isinstance(dim, int):
            return dim
        if isinstance(dim, Blocks):
            return -(-self.of(dim.dim) // dim.size)
        known = {"batch": self.batch, "query_len": self.query_len, "kv_len": self.kv_len}
        if dim not in known:
            raise ValueError(f"no example size for the dimension {dim!r}; known: {list(known)}")
        return known[dim]


Maker = Callable[[OperatorVariant, Sizes, np.random.Generator], Mapping[str, NDArray[Any]]]


def _thresholds(
    variant: OperatorVariant, sizes: Sizes, rng: np.random.Generator
) -> Mapping[str, NDArray[Any]]:
    (spec,) = [item for item in variant.inputs if item is not None and item.name == "thresholds"]
    return {"thresholds": np.full([sizes.of(dim) for dim in spec.dims], 0.97, np.float32)}


def _decode_state(
    variant: OperatorVariant, sizes: Sizes, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """A state that real tokens could have left: sums of features are not negative."""
    made: dict[str, NDArray[Any]] = {}
    for spec in variant.inputs:
        if spec is None:
            continue
        shape = tuple(sizes.of(dim) for dim in spec.dims)
        if spec.name == "past_linear_normaliser":
            made[spec.name] = rng.uniform(1.0, 2.0, shape).astype(np.float32) * sizes.kv_len
        elif spec.name.endswith("_mask"):
            made[spec.name] = np.ones(shape, dtype=spec.dtype)
    return made


def _hybrid(
    variant: OperatorVariant, sizes: Sizes, rng: np.random.Generator
) -> Mapping[str, NDArray[Any]]:
    """Decay is at most 0, gains are positive."""
    signs = {"log_decay": np.float32(-0.02), "window_gain": np.float32(0.1)}
    made = {}
    for spec in variant.inputs:
        if spec is not None and spec.name in signs:
            shape = [sizes.of(dim) for dim in spec.dims]
            made[spec.name] = signs[spec.name] * rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return made


MAKERS: Mapping[str, Maker] = {
    "BlockSelect": _thresholds,
    "BlockSparseAttention": example_lists,
    "HybridDecode": _decode_state,
    "HybridAttention": _hybrid,
}
"""Operator -> the inputs of its own that random numbers cannot stand for."""


def example_inputs(
    variant: OperatorVariant, sizes: Sizes, seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Random inputs of ``variant`` by name; equal arguments give equal arrays.

    Queries are the last of the slots. Floats are normal; those beside query, key and value
    (weights, biases) have deviation 0.5.

    Raises:
        ValueError: an input that needs a line in ``MAKERS``, or a size that is not known.
    """
    rng = np.random.default_rng(seed)
    own = MAKERS[variant.op_type](variant, sizes, rng) if variant.op_type in MAKERS else {}
    return {
        spec.name: own[spec.name] if spec.name in own else _common(spec, sizes, rng)
        for spec in variant.inputs
        if spec is not None
    }


def _common(spec: TensorSpec, sizes: Sizes, rng: np.random.Generator) -> NDArray[Any]:
    shape = tuple(sizes.of(dim) for dim in spec.dims)
    if spec.dtype == "float32":
        numbers = rng.standard_normal(shape, dtype=np.float32)
        return numbers if spec.name in ("query", "key", "value") else numbers * np.float32(0.5)
    if spec.name == "key_mask":
        return np.tile(np.arange(sizes.kv_len) < sizes.real_keys, (sizes.batch, 1))
    if spec.name in ("query_positions", "key_positions"):
        slots = np.arange(sizes.kv_len, dtype=np.int64)
        wanted = slots[-sizes.query_len :] if spec.name == "query_positions" else slots
        return np.tile(wanted, (sizes.batch, 1))
    raise ValueError(f"no example for input {spec.name!r}: add its operator to MAKERS")
