"""Symbolic reading of a subgraph: shapes as affine terms, elements as terms of their indices.

``Interpreter.tensor(value)`` gives a ``SymbolicTensor`` whose ``at(index)`` is the term of one
element. Reading is lazy: an operator outside the language costs nothing until an element of its
output is asked for, so shapes can be followed through projections and normalisations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.passes.recognise.expressions import (
    Affine,
    AtLeastZero,
    Entry,
    OpaqueError,
    Term,
    apply,
    compare,
    constant,
)

Index = tuple[Term, ...]
_ZERO = constant(0)
_ONE = constant(1)
# Larger constants are weights, not index tables.
_MAX_TABLE = 1 << 26


@dataclass(frozen=True)
class SymbolicTensor:
    """A tensor by the term of each element.

    Attributes:
        shape: one affine term per axis.
        at: from an index (one term per axis) to the element's term; raises OpaqueError.
    """

    shape: tuple[Affine, ...]
    at: Callable[[Index], Term]

    def scalar(self) -> Term:
        """The only element of a one-element tensor."""
        return self.at(tuple(_ZERO for _ in self.shape))

    def vector(self) -> list[Affine]:
        """The elements of a 1-D tensor of affine terms, as shapes and axes are."""
        if len(self.shape) != 1 or not self.shape[0].is_constant:
            raise OpaqueError("expected a one-dimensional tensor of known length")
        return [as_affine(self.at((constant(i),))) for i in range(int(self.shape[0].constant))]


def as_affine(term: Term) -> Affine:
    if not isinstance(term, Affine):
        raise OpaqueError(f"expected an index or a length, got {term}")
    return term


def as_int(term: Term) -> int:
    affine = as_affine(term)
    if not affine.is_constant:
        raise OpaqueError(f"expected a constant, got {affine}")
    return int(affine.constant)


class Interpreter:
    """Reads values of one graph; results are remembered."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, SymbolicTensor] = {}

    def tensor(self, value: ir.Value) -> SymbolicTensor:
        """The symbolic form of ``value``."""
        # An explicit stack: graphs are deeper than Python's recursion limit.
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._known:
                stack.pop()
                continue
            node = current.producer()
            missing = [
                v for v in (node.inputs if node is not None else ()) if v and v not in self._known
            ]
            if missing and current.const_value is None:
                stack.extend(missing)
                continue
            self._known[current] = self._read(current)
            stack.pop()
        return self._known[value]

    def _read(self, value: ir.Value) -> SymbolicTensor:
        if value.const_value is not None:
            return _from_constant(value.const_value)
        node = value.producer()
        if node is None:
            return _graph_input(value)
        handler = _HANDLERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if handler is None:
            return _opaque(value, f"operator {node.op_type}")
        inputs = [None if v is None else self._known[v] for v in node.inputs]
        try:
            return handler(node, inputs)
        except OpaqueError as error:
            return _opaque(value, str(error))


def _opaque(value: ir.Value, reason: str) -> SymbolicTensor:
    message = f"{reason} (value {value.name!r})"
    if value.shape is None:
        raise_shape: tuple[Affine, ...] = ()
        return SymbolicTensor(raise_shape, _raiser(message + " of unknown rank"))
    return SymbolicTensor(_annotated_shape(value), _raiser(message))


def _raiser(message: str) -> Callable[[Index], Term]:
    def at(index: Index) -> Term:
        raise OpaqueError(message)

    return at


def _annotated_shape(value: ir.Value) -> tuple[Affine, ...]:
    assert value.shape is not None
    return tuple(
        constant(dim)
        if isinstance(dim, int)
        else Affine.symbol(dim.value if dim.value is not None else f"?{value.name}.{axis}")
        for axis, dim in enumerate(value.shape)
    )


def _graph_input(value: ir.Value) -> SymbolicTensor:
    if value.shape is None:
        return _opaque(value, "graph input")
    shape, name = _annotated_shape(value), value.name or "?"
    return SymbolicTensor(shape, lambda index: Entry(name, tuple(as_affine(i) for i in index)))


def _from_constant(tensor: ir.TensorProtocol) -> SymbolicTensor:
    shape = tuple(constant(int(d)) for d in tensor.shape.numpy())
    if tensor.size > _MAX_TABLE:
        return SymbolicTensor(shape, _raiser(f"weight {tensor.name!r}"))
    cache: list[NDArray[np.generic]] = []

    def at(index: Index) -> Term:
        if not cache:
            cache.append(tensor.numpy())
        return _table_entry(cache[0], index, tensor.name)

    return SymbolicTensor(shape, at)


def _table_entry(table: NDArray[np.generic], index: Index, name: str | None) -> Term:
    """An element of a constant: fixed, an arithmetic sequence, or a band over two indices."""
    symbolic: list[Affine] = []
    for axis, term in reversed(list(enumerate(index))):
        affine = as_affine(term)
        if table.shape[axis] == 1:
            table = np.take(table, 0, axis=axis)
        elif affine.is_constant:
            table = np.take(table, int(affine.constant), axis=axis)
        else:
            symbolic.insert(0, affine)
    if table.size == 0:
        raise OpaqueError(f"constant {name!r} is empty")
    first = table.flat[0]
    if bool(np.all(table == first)):
        return constant(first.item())
    if table.ndim == 1 and np.issubdtype(table.dtype, np.integer):
        steps = np.diff(table)
        if bool(np.all(steps == steps[0])):
            return symbolic[0].scaled(int(steps[0])) + constant(int(table[0]))
    if table.ndim == 2:
        return _band_table(table, symbolic[0], symbolic[1], name)
    raise OpaqueError(f"constant {name!r} varies over {table.ndim} indices in no known way")


def _band_table(table: NDArray[np.generic], row: Affine, column: Affine, name: str | None) -> Term:
    """Two-valued table whose second value fills exactly a band of ``row - column``."""
    rows, columns = table.shape
    inside, outside = table[0, 0], None
    distance = np.arange(rows)[:, None] - np.arange(columns)[None, :]
    mask = table == inside
    rest = table[~mask]
    if rest.size == 0 or not bool(np.all(rest == rest.flat[0])):
        raise OpaqueError(f"constant {name!r} is a table of more than two values")
    outside = rest.flat[0]
    low, high = int(distance[mask].min()), int(distance[mask].max())
    if not bool(np.array_equal(mask, (distance >= low) & (distance <= high))):
        raise OpaqueError(f"constant {name!r} is a two-valued table, but not a band")
    difference = row - column
    term: Term = constant(inside.item())
    if low > 1 - columns:
        term = apply(
            "Where", AtLeastZero(difference - constant(low)), term, constant(outside.item())
        )
    if high < rows - 1:
        term = apply(
            "Where", AtLeastZero(constant(high) - difference), term, constant(outside.item())
        )
    return term


# --- operators -----------------------------------------------------------------------------

Handler = Callable[[ir.Node, Sequence["SymbolicTensor | None"]], SymbolicTensor]
_HANDLERS: dict[str, Handler] = {}


def _handles(*op_types: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        for op_type in op_types:
            _HANDLERS[op_type] = function
        return function

    return register


def _need(inputs: Sequence[SymbolicTensor | None], position: int) -> SymbolicTensor:
    tensor = inputs[position] if position < len(inputs) else None
    if tensor is None:
        raise OpaqueError(f"input {position} is absent")
    return tensor


def _optional(inputs: Sequence[SymbolicTensor | None], position: int) -> SymbolicTensor | None:
    return inputs[position] if position < len(inputs) else None


def _int_attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _is_one(dim: Affine) -> bool:
    return dim == _ONE


def broadcast_shape(shapes: Sequence[tuple[Affine, ...]]) -> tuple[Affine, ...]:
    rank = max((len(s) for s in shapes), default=0)
    result = [_ONE] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, start=rank - len(shape)):
            if not _is_one(dim) and (_is_one(result[axis]) or not result[axis].is_constant):
                result[axis] = dim
    return tuple(result)


def _aligned(tensor: SymbolicTensor, index: Index) -> Term:
    offset = len(index) - len(tensor.shape)
    return tensor.at(
        tuple(
            _ZERO if _is_one(dim) else index[axis + offset] for axis, dim in enumerate(tensor.shape)
        )
    )


def _elementwise(op: str, tensors: Sequence[SymbolicTensor]) -> SymbolicTensor:
    return SymbolicTensor(
        broadcast_shape([t.shape for t in tensors]),
        lambda index: apply(op, *(_aligned(t, index) for t in tensors)),
    )


@_handles("Add", "Sub", "Mul", "Div", "And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual")
@_handles("Less", "LessOrEqual", "Where", "Not", "Neg", "IsNaN", "IsInf", "Sqrt", "Pow")
@_handles("Reciprocal")
def _pointwise(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    return _elementwise(node.op_type, [_need(inputs, i) for i in range(len(inputs))])


@_handles("Min", "Max")
def _extremum(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    result = _need(inputs, 0)
    for i in range(1, len(inputs)):
        result = _elementwise(node.op_type, [result, _need(inputs, i)])
    return result


@_handles("Identity", "Dropout")
def _identity(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    return _need(inputs, 0)


@_handles("Cast")
def _cast(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    if node.attributes["to"].as_int() != ir.DataType.BOOL:
        return data  # positions and 0/1 values are exact in every dtype that masks use

    def at(index: Index) -> Term:
        term = data.at(index)
        if isinstance(term, Affine) and not term.is_constant:
            raise OpaqueError(f"position {term} cast to bool")
        return term if isinstance(term, AtLeastZero | Entry) else apply("Bool", term)

    return SymbolicTensor(data.shape, at)


@_handles("Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "Exp", "Log", "Softplus", "Cos", "Sin")
@_handles(
    "Softmax", "LayerNormalization", "RMSNormalization", "Clip", "Swish", "BatchNormalization"
)
def _same_shape(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    return SymbolicTensor(_need(inputs, 0).shape, _raiser(f"operator {node.op_type}"))


@_handles("MatMul")
def _matmul(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    a, b = _need(inputs, 0).shape, _need(inputs, 1).shape
    if len(a) < 2 or len(b) < 2:
        raise OpaqueError("MatMul of vectors")
    shape = (*broadcast_shape([a[:-2], b[:-2]]), a[-2], b[-1])
    return SymbolicTensor(shape, _raiser("operator MatMul"))


@_handles("Gemm")
def _gemm(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    a, b = _need(inputs, 0).shape, _need(inputs, 1).shape
    rows = a[1] if _int_attribute(node, "transA", 0) else a[0]
    columns = b[0] if _int_attribute(node, "transB", 0) else b[1]
    return SymbolicTensor((rows, columns), _raiser("operator Gemm"))


@_handles("Shape")
def _shape(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    dims = _need(inputs, 0).shape
    if not dims:
        raise OpaqueError("shape of a value of unknown rank")
    end = node.attributes.get("end")
    dims = dims[_int_attribute(node, "start", 0) : None if end is None else end.as_int()]
    return SymbolicTensor((constant(len(dims)),), lambda index: dims[as_int(index[0])])


@_handles("Size")
def _size(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    total: Term = _ONE
    for dim in _need(inputs, 0).shape:
        total = apply("Mul", total, dim)
    return SymbolicTensor((), lambda index: total)


@_handles("Range")
def _range(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    start, limit, step = (as_affine(_need(inputs, i).scalar()) for i in range(3))
    if not step.is_constant or step.constant == 0:
        raise OpaqueError(f"Range with step {step}")
    span = limit - start
    if step.constant == 1:
        length = span
    elif span.is_constant:
        length = constant(max(0, int(np.ceil(span.constant / step.constant))))
    else:
        raise OpaqueError(f"Range of {span} by {step}")
    return SymbolicTensor((length,), lambda i: as_affine(i[0]).scaled(step.constant) + start)


@_handles("ConstantOfShape")
def _constant_of_shape(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    shape = tuple(_need(inputs, 0).vector())
    attribute = node.attributes.get("value")
    value = 0 if attribute is None else attribute.as_tensor().numpy().reshape(-1)[0].item()
    return SymbolicTensor(shape, lambda index: constant(value))


@_handles("Unsqueeze")
def _unsqueeze(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    rank = len(data.shape)
    raw = [as_int(a) for a in _need(inputs, 1).vector()]
    axes = {a % (rank + len(raw)) for a in raw}
    dims, source = iter(data.shape), range(rank + len(raw))
    shape = tuple(_ONE if axis in axes else next(dims) for axis in source)
    return SymbolicTensor(
        shape, lambda index: data.at(tuple(i for axis, i in enumerate(index) if axis not in axes))
    )


@_handles("Squeeze")
def _squeeze(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    rank, given = len(data.shape), _optional(inputs, 1)
    if given is None:
        axes = {axis for axis, dim in enumerate(data.shape) if _is_one(dim)}
    else:
        axes = {as_int(a) % rank for a in given.vector()}

    def at(index: Index) -> Term:
        rest = iter(index)
        return data.at(tuple(_ZERO if axis in axes else next(rest) for axis in range(rank)))

    return SymbolicTensor(tuple(d for a, d in enumerate(data.shape) if a not in axes), at)


@_handles("Transpose")
def _transpose(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    rank = len(data.shape)
    attribute = node.attributes.get("perm")
    perm = list(attribute.as_ints()) if attribute is not None else list(range(rank))[::-1]

    def at(index: Index) -> Term:
        source: list[Term] = [_ZERO] * rank
        for axis, origin in enumerate(perm):
            source[origin] = index[axis]
        return data.at(tuple(source))

    return SymbolicTensor(tuple(data.shape[p] for p in perm), at)


@_handles("Expand")
def _expand(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    target = tuple(_need(inputs, 1).vector())
    shape = broadcast_shape([data.shape, target])
    return SymbolicTensor(shape, lambda index: _aligned(data, index))


@_handles("Reshape")
def _reshape(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    target = list(_need(inputs, 1).vector())
    if not _int_attribute(node, "allowzero", 0):
        target = [data.shape[a] if d == _ZERO else d for a, d in enumerate(target)]
    shape = _resolve_minus_one(data.shape, target)
    kept_source = [a for a, d in enumerate(data.shape) if not _is_one(d)]
    kept_target = [a for a, d in enumerate(shape) if not _is_one(d)]
    if [data.shape[a] for a in kept_source] != [shape[a] for a in kept_target]:
        text = f"Reshape {_show(data.shape)} -> {_show(shape)} that merges or splits axes"
        return SymbolicTensor(shape, _raiser(text))

    def at(index: Index) -> Term:
        source: list[Term] = [_ZERO] * len(data.shape)
        for from_axis, to_axis in zip(kept_source, kept_target, strict=True):
            source[from_axis] = index[to_axis]
        return data.at(tuple(source))

    return SymbolicTensor(shape, at)


def _resolve_minus_one(source: tuple[Affine, ...], target: list[Affine]) -> tuple[Affine, ...]:
    """Replace -1 by cancelling equal factors of source and target."""
    unknown = [a for a, d in enumerate(target) if d == constant(-1)]
    if not unknown:
        return tuple(target)
    left = [d for d in source if not _is_one(d)]
    numerator, denominator = 1, 1
    for dim in target:
        if dim == constant(-1):
            continue
        if dim in left:
            left.remove(dim)
        elif dim.is_constant:
            denominator *= int(dim.constant)
        else:
            raise OpaqueError(f"Reshape {_show(source)} -> {_show(target)}")
    symbols = [d for d in left if not d.is_constant]
    for dim in left:
        if dim.is_constant:
            numerator *= int(dim.constant)
    if len(symbols) > 1 or numerator % denominator or (symbols and numerator != denominator):
        raise OpaqueError(f"Reshape {_show(source)} -> {_show(target)}")
    target[unknown[0]] = symbols[0] if symbols else constant(numerator // denominator)
    return tuple(target)


def _show(shape: Sequence[Affine]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


@_handles("Concat")
def _concat(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    parts = [_need(inputs, i) for i in range(len(inputs))]
    axis = _int_attribute(node, "axis", 0) % max(len(parts[0].shape), 1)
    starts = [_ZERO]
    for part in parts:
        starts.append(starts[-1] + part.shape[axis])
    shape = (*parts[0].shape[:axis], starts[-1], *parts[0].shape[axis + 1 :])

    def at(index: Index) -> Term:
        position = as_affine(index[axis])

        def element(number: int) -> Term:
            local = (*index[:axis], position - starts[number], *index[axis + 1 :])
            return parts[number].at(local)

        result = element(len(parts) - 1) if not position.is_constant else None
        for number in range(len(parts) - 1, -1, -1):
            end = starts[number + 1]
            if position.is_constant and end.is_constant:
                if starts[number].constant <= position.constant < end.constant:
                    return element(number)
            elif number < len(parts) - 1:
                inside = compare("Less", position, end)
                result = apply("Where", inside, element(number), result or element(number + 1))
        if result is None:
            raise OpaqueError(f"Concat index {position} outside constant extent")
        return result

    return SymbolicTensor(shape, at)


@_handles("Slice")
def _slice(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data = _need(inputs, 0)
    starts, ends = _need(inputs, 1).vector(), _need(inputs, 2).vector()
    axes_input, steps_input = _optional(inputs, 3), _optional(inputs, 4)
    axes = [as_int(a) for a in axes_input.vector()] if axes_input else list(range(len(starts)))
    steps = [as_int(s) for s in steps_input.vector()] if steps_input else [1] * len(starts)
    shape, begin = list(data.shape), [_ZERO] * len(data.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step != 1:
            raise OpaqueError(f"Slice with step {step}")
        axis %= len(shape)
        first = _clamped(start, shape[axis])
        begin[axis] = first
        shape[axis] = _clamped(end, shape[axis]) - first

    def at(index: Index) -> Term:
        return data.at(tuple(as_affine(i) + b for i, b in zip(index, begin, strict=True)))

    return SymbolicTensor(tuple(shape), at)


def _clamped(position: Affine, dim: Affine) -> Affine:
    """A slice bound: negative counts from the end, beyond the end is the end."""
    if position.is_constant and position.constant < 0:
        position = position + dim
        return _ZERO if dim.is_constant and position.constant < 0 else position
    beyond = position - dim
    if beyond.is_constant:
        return dim if beyond.constant >= 0 else position
    if position.is_constant and position.constant > 1 << 31:
        return dim
    # A constant table sliced to a dynamic length: lengths beyond the table are the source's error.
    if dim.is_constant or position == _ZERO:
        return position
    raise OpaqueError(f"Slice bound {position} against extent {dim}")


@_handles("Split")
def _split(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    raise OpaqueError("operator Split")


def _wrapped(term: Term, dim: Affine) -> Term:
    if isinstance(term, Affine) and term.is_constant and term.constant < 0:
        return term + dim
    return term


@_handles("Gather")
def _gather(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data, indices = _need(inputs, 0), _need(inputs, 1)
    if not data.shape:
        raise OpaqueError("Gather from a value of unknown rank")
    axis = _int_attribute(node, "axis", 0) % len(data.shape)
    width = len(indices.shape)

    def at(index: Index) -> Term:
        chosen = _wrapped(indices.at(index[axis : axis + width]), data.shape[axis])
        return data.at((*index[:axis], chosen, *index[axis + width :]))

    return SymbolicTensor((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), at)


@_handles("GatherElements")
def _gather_elements(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data, indices = _need(inputs, 0), _need(inputs, 1)
    axis = _int_attribute(node, "axis", 0) % len(data.shape)

    def at(index: Index) -> Term:
        chosen = _wrapped(indices.at(index), data.shape[axis])
        return data.at((*index[:axis], chosen, *index[axis + 1 :]))

    return SymbolicTensor(indices.shape, at)


@_handles("GatherND")
def _gather_nd(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data, indices = _need(inputs, 0), _need(inputs, 1)
    if _int_attribute(node, "batch_dims", 0):
        raise OpaqueError("GatherND with batch_dims")
    depth = as_int(indices.shape[-1])
    outer = len(indices.shape) - 1

    def at(index: Index) -> Term:
        coordinates = tuple(
            _wrapped(indices.at((*index[:outer], constant(k))), data.shape[k]) for k in range(depth)
        )
        return data.at((*coordinates, *index[outer:]))

    return SymbolicTensor((*indices.shape[:-1], *data.shape[depth:]), at)


@_handles("Trilu")
def _trilu(node: ir.Node, inputs: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    data, given = _need(inputs, 0), _optional(inputs, 1)
    offset = as_int(given.scalar()) if given is not None else 0
    upper = bool(_int_attribute(node, "upper", 1))

    def at(index: Index) -> Term:
        diagonal = as_affine(index[-1]) - as_affine(index[-2]) - constant(offset)
        keep = AtLeastZero(diagonal if upper else diagonal.scaled(-1))
        return apply("Where", keep, data.at(index), _ZERO)

    return SymbolicTensor(data.shape, at)
