"""Symbolic tensors: a shape of affine terms and the term of each element; constants among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.passes.recognise.affine import ONE, ZERO, Affine, OpaqueError, constant
from subquad.passes.recognise.expressions import Term, at_least_zero, both, where

Index: TypeAlias = tuple[Term, ...]
Shape: TypeAlias = tuple[Affine, ...]
# Larger constants are weights, not index tables.
LARGEST_TABLE = 1 << 26


class SymbolicTensor:
    """A tensor by the term of each element.

    Args:
        shape: one affine term per axis, or why the rank is unknown.
        at: from an index (one term per axis) to the element's term; raises OpaqueError.
        dtype: element type, None where unknown.
    """

    def __init__(
        self, shape: Shape | str, at: Callable[[Index], Term], dtype: ir.DataType | None
    ) -> None:
        self._shape = shape
        self.at = at
        self.dtype = dtype

    @property
    def shape(self) -> Shape:
        """Raises OpaqueError where the rank is unknown."""
        if isinstance(self._shape, str):
            raise OpaqueError(self._shape)
        return self._shape

    def reading(self, at: Callable[[Index], Term]) -> SymbolicTensor:
        """The same tensor, its elements read another way."""
        return SymbolicTensor(self._shape, at, self.dtype)

    @property
    def type_name(self) -> str:
        """NumPy's name of the element type; ``any`` where unknown."""
        return type_name(self.dtype)

    def scalar(self) -> Term:
        """The only element of a one-element tensor."""
        if any(dim != ONE for dim in self.shape):
            raise OpaqueError(f"expected one element, got shape {show(self.shape)}")
        return self.at(tuple(ZERO for _ in self.shape))

    def vector(self) -> list[Affine]:
        """The elements of a 1-D tensor of affine terms, as shapes and axes are."""
        if len(self.shape) != 1 or not self.shape[0].is_constant:
            raise OpaqueError("expected a one-dimensional tensor of known length")
        return [as_affine(self.at((constant(i),))) for i in range(int(self.shape[0].constant))]


def type_name(dtype: ir.DataType | None) -> str:
    """NumPy's name of an ONNX element type."""
    return "any" if dtype is None else str(dtype.numpy())


def show(shape: Sequence[Affine]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def as_affine(term: Term) -> Affine:
    if not isinstance(term, Affine):
        raise OpaqueError(f"expected an index or a length, got {term}")
    return term


def as_int(term: Term) -> int:
    affine = as_affine(term)
    if not affine.is_constant:
        raise OpaqueError(f"expected a constant, got {affine}")
    return int(affine.constant)


def opaque(message: str) -> Callable[[Index], Term]:
    """An ``at`` that has no elements to show."""

    def at(index: Index) -> Term:
        raise OpaqueError(message)

    return at


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The common shape; where two names meet, one is as good as the other and the first stays."""
    rank = max((len(s) for s in shapes), default=0)
    result = [ONE] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, start=rank - len(shape)):
            kept = result[axis]
            if dim != ONE and (kept == ONE or (dim.is_constant and not kept.is_constant)):
                result[axis] = dim
    return tuple(result)


def aligned(tensor: SymbolicTensor, index: Index) -> Term:
    """The element that broadcasting puts at ``index``."""
    offset = len(index) - len(tensor.shape)
    return tensor.at(
        tuple(ZERO if dim == ONE else index[axis + offset] for axis, dim in enumerate(tensor.shape))
    )


# --- constants -----------------------------------------------------------------------------


def from_constant(tensor: ir.TensorProtocol) -> SymbolicTensor:
    shape = tuple(constant(int(d)) for d in tensor.shape.numpy())
    if tensor.size > LARGEST_TABLE:
        return SymbolicTensor(shape, opaque(f"weight {tensor.name!r}"), tensor.dtype)
    if tensor.dtype == ir.DataType.STRING:
        return SymbolicTensor(shape, opaque("a string"), tensor.dtype)
    cache: list[NDArray[np.generic]] = []

    def at(index: Index) -> Term:
        if not cache:
            cache.append(tensor.numpy())
        return _table_entry(cache[0], index, tensor.name)

    return SymbolicTensor(shape, at, tensor.dtype)


def _table_entry(table: NDArray[np.generic], index: Index, name: str | None) -> Term:
    """An element of a constant: fixed, an arithmetic sequence, or a band over two indices."""
    symbolic: list[Affine] = []
    for axis, term in reversed(list(enumerate(index))):
        affine = as_affine(term)
        if table.shape[axis] == 1:
            table = np.take(table, 0, axis=axis)
        elif affine.is_constant:
            number = int(affine.constant)
            if not -table.shape[axis] <= number < table.shape[axis]:
                raise OpaqueError(f"index {number} outside constant {name!r} of {table.shape}")
            table = np.take(table, number, axis=axis)
        else:
            symbolic.insert(0, affine)
    if table.size == 0:
        raise OpaqueError(f"constant {name!r} is empty")
    first = table.flat[0]
    if bool(np.all(table == first)) or table.ndim == 0:
        return constant(_number(first))
    sequence = _arithmetic(table, symbolic)
    if sequence is not None:
        return sequence
    if table.ndim == 1:
        return _run(table, symbolic[0], name)
    if table.ndim == 2:
        return _band(table, symbolic[0], symbolic[1], name)
    raise OpaqueError(f"constant {name!r} varies over {table.ndim} indices in no known way")


def _number(scalar: np.generic) -> int | float:
    value = scalar.item()
    return int(value) if isinstance(value, bool | int) else float(value)


def _arithmetic(table: NDArray[np.generic], symbolic: list[Affine]) -> Affine | None:
    """A table whose entries are whole numbers, affine in every index."""
    if table.dtype == np.bool_:
        return None
    numbers = table.astype(np.float64)
    if not bool(np.all(np.isfinite(numbers))) or not bool(np.all(numbers == np.rint(numbers))):
        return None
    origin = (0,) * table.ndim
    term, expected = constant(int(numbers[origin])), np.full(table.shape, numbers[origin])
    for axis, index in enumerate(symbolic):
        second = tuple(int(a == axis) for a in range(table.ndim))
        step = int(numbers[second] - numbers[origin])
        term = term + index.scaled(step)
        grid = np.arange(table.shape[axis]) * step
        expected = expected + grid.reshape([-1 if a == axis else 1 for a in range(table.ndim)])
    return term if bool(np.array_equal(expected, numbers)) else None


def _two_values(
    table: NDArray[np.generic], name: str | None
) -> tuple[NDArray[np.bool_], Affine, Affine]:
    """Where the first value stands, that value, and the other one."""
    first = table.flat[0]
    mask = np.asarray(table == first)
    rest = table[~mask]
    if not bool(np.all(rest == rest.flat[0])):
        raise OpaqueError(f"constant {name!r} holds many values: a bias, not a mask")
    return mask, constant(_number(first)), constant(_number(rest.flat[0]))


def _run(table: NDArray[np.generic], index: Affine, name: str | None) -> Term:
    """Two-valued vector of which the first value fills one stretch at the start."""
    mask, first, other = _two_values(table, name)
    length = int(np.argmin(mask))
    if bool(mask[length:].any()):
        raise OpaqueError(f"constant {name!r} is a two-valued vector that changes more than once")
    inside = at_least_zero(constant(length - 1) - index)
    return where(inside, lambda: first, lambda: other)


def _band(table: NDArray[np.generic], row: Affine, column: Affine, name: str | None) -> Term:
    """Two-valued table of which one value fills exactly a band of ``row - column``."""
    mask, first, other = _two_values(table, name)
    limits = _band_limits(mask)
    if limits is None:
        mask, first, other = ~mask, other, first
        limits = _band_limits(mask)
    if limits is None:
        raise OpaqueError(f"constant {name!r} is a two-valued table, but not a band")
    (low, high), (rows, columns) = limits, table.shape
    difference = row - column
    inside: Term = ONE
    if low > 1 - columns:
        inside = both(inside, at_least_zero(difference - constant(low)))
    if high < rows - 1:
        inside = both(inside, at_least_zero(constant(high) - difference))
    return where(inside, lambda: first, lambda: other)


def _band_limits(mask: NDArray[np.bool_]) -> tuple[int, int] | None:
    distance = np.arange(mask.shape[0])[:, None] - np.arange(mask.shape[1])[None, :]
    low, high = int(distance[mask].min()), int(distance[mask].max())
    exact = np.array_equal(mask, (distance >= low) & (distance <= high))
    return (low, high) if exact else None
