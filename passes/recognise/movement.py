"""Operators that move elements: their symbolic reading, by where each output element comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import onnx_ir as ir

from subquad.passes.recognise.affine import (
    ONE,
    ZERO,
    Affine,
    OpaqueError,
    constant,
    divided,
    monomial,
    product,
)
from subquad.passes.recognise.arithmetic import Handler, Inputs, int_attribute, need, optional
from subquad.passes.recognise.expressions import (
    Apply,
    AtLeastZero,
    Term,
    at_least_zero,
    both,
    compare,
    where,
)
from subquad.passes.recognise.tensors import (
    Index,
    Shape,
    SymbolicTensor,
    aligned,
    as_affine,
    as_int,
    broadcast_shape,
    opaque,
    show,
)

MOVEMENT: dict[str, Handler] = {}
_MINUS_ONE = constant(-1)
_SLICE_INFINITY = 1 << 30


def _handles(*op_types: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        for op_type in op_types:
            MOVEMENT[op_type] = function
        return function

    return register


@_handles("Unsqueeze")
def _unsqueeze(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    rank = len(data.shape)
    raw = [as_int(a) for a in _axes(need(inputs, 1))]
    axes = {a % (rank + len(raw)) for a in raw}
    dims = iter(data.shape)
    shape = tuple(ONE if axis in axes else next(dims) for axis in range(rank + len(raw)))
    return SymbolicTensor(
        shape,
        lambda index: data.at(tuple(i for axis, i in enumerate(index) if axis not in axes)),
        data.dtype,
    )


def _axes(tensor: SymbolicTensor) -> list[Affine]:
    """Axes as a vector; ONNX Runtime also takes a scalar."""
    return tensor.vector() if tensor.shape else [as_affine(tensor.scalar())]


@_handles("Squeeze")
def _squeeze(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    rank, given = len(data.shape), optional(inputs, 1)
    if given is not None:
        axes = {as_int(a) % rank for a in _axes(given)}
    elif all(dim.is_constant for dim in data.shape):
        axes = {axis for axis, dim in enumerate(data.shape) if dim == ONE}
    else:
        raise OpaqueError("Squeeze without axes of a tensor with dynamic dimensions")

    def at(index: Index) -> Term:
        rest = iter(index)
        return data.at(tuple(ZERO if axis in axes else next(rest) for axis in range(rank)))

    shape = tuple(d for a, d in enumerate(data.shape) if a not in axes)
    return SymbolicTensor(shape, at, data.dtype)


@_handles("Transpose")
def _transpose(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    rank = len(data.shape)
    attribute = node.attributes.get("perm")
    perm = list(attribute.as_ints()) if attribute is not None else list(range(rank))[::-1]

    def at(index: Index) -> Term:
        source: list[Term] = [ZERO] * rank
        for axis, origin in enumerate(perm):
            source[origin] = index[axis]
        return data.at(tuple(source))

    return SymbolicTensor(tuple(data.shape[p] for p in perm), at, data.dtype)


@_handles("Expand")
def _expand(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    target = tuple(need(inputs, 1).vector())
    shape = broadcast_shape([data.shape, target])
    return SymbolicTensor(shape, lambda index: aligned(data, index), data.dtype)


@_handles("Tile")
def _tile(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, repeats = need(inputs, 0), need(inputs, 1).vector()
    shape = []
    for dim, count in zip(data.shape, repeats, strict=True):
        if dim != ONE and not count.is_constant:
            raise OpaqueError(f"Tile of {dim} by {count}")
        shape.append(count if dim == ONE else dim.scaled(count.constant))

    def at(index: Index) -> Term:
        source: list[Term] = []
        for term, dim, count in zip(index, data.shape, repeats, strict=True):
            if dim == ONE or count == ONE:
                source.append(ZERO if dim == ONE else term)
            elif dim.is_constant:
                source.append(constant(as_int(term) % int(dim.constant)))
            else:
                raise OpaqueError(f"Tile of {dim} by {count}")
        return data.at(tuple(source))

    return SymbolicTensor(tuple(shape), at, data.dtype)


# --- Reshape -------------------------------------------------------------------------------


@_handles("Reshape")
def _reshape(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    target = list(need(inputs, 1).vector())
    if not int_attribute(node, "allowzero", 0):
        for axis, dim in enumerate(target):
            if dim == ZERO:
                if axis >= len(data.shape):
                    raise OpaqueError(f"Reshape {show(data.shape)} -> {show(target)}")
                target[axis] = data.shape[axis]
    return _reshaped(data, _resolved(data.shape, target))


def _reshaped(data: SymbolicTensor, shape: Shape) -> SymbolicTensor:
    groups = _groups(data.shape, shape)
    if groups is None:
        text = f"Reshape {show(data.shape)} -> {show(shape)} that mixes axes"
        return SymbolicTensor(shape, opaque(text), data.dtype)

    def at(index: Index) -> Term:
        source: list[Term] = [ZERO] * len(data.shape)
        for group in groups:
            _regroup(data.shape, shape, group, index, source)
        return data.at(tuple(source))

    return SymbolicTensor(shape, at, data.dtype)


def _resolved(source: Shape, target: list[Affine]) -> Shape:
    """Replace -1 by what the factors of the target leave over of those of the source."""
    if _MINUS_ONE not in target:
        return tuple(target)
    left, number, denominator = Counter[Affine](), 1, 1
    for dim in source:
        names, factor = _factors(dim)
        left.update(names)
        number *= factor
    for dim in target:
        if dim != _MINUS_ONE:
            names, factor = _factors(dim)
            left.subtract(names)
            denominator *= factor
    if denominator == 0 or number % denominator or min(left.values(), default=0) < 0:
        raise OpaqueError(f"Reshape {show(source)} -> {show(target)}")
    missing: Affine | None = constant(number // denominator)
    for name in left.elements():
        missing = None if missing is None else product(missing, name)
    if missing is None:
        raise OpaqueError(f"Reshape {show(source)} -> {show(target)}")
    return tuple(missing if dim == _MINUS_ONE else dim for dim in target)


def _factors(dim: Affine) -> tuple[tuple[Affine, ...], int]:
    """A dimension as names times number: ``4 * batch`` -> (batch,), 4 and ``12`` -> (), 12.

    A sum is one name: ``batch * past + batch * length`` -> (batch, past + length), 1.
    """
    if dim.is_constant:
        return (), int(dim.constant)
    number = math.gcd(*(int(c) for _, c in dim.terms), int(dim.constant))
    shared = Counter(dim.terms[0][0].parts)
    for symbol, _ in dim.terms[1:]:
        shared &= Counter(symbol.parts)
    if dim.constant:
        shared.clear()
    names = tuple(Affine(((part, 1),)) for part in shared.elements())
    if len(dim.terms) == 1 and not dim.constant:
        return names, int(dim.terms[0][1])
    rest = constant(int(dim.constant) // number)
    for symbol, coefficient in dim.terms:
        left = Counter(symbol.parts)
        left.subtract(shared)
        rest = rest + monomial(tuple(left.elements()), int(coefficient) // number)
    return (*names, rest), number


class _Product:
    """The number of elements of a run of axes: names and a number."""

    def __init__(self) -> None:
        self.axes: list[int] = []
        self.names: Counter[Affine] = Counter()
        self.number = 1

    def take(self, axis: int, names: tuple[Affine, ...], number: int) -> None:
        self.axes.append(axis)
        self.number *= number
        self.names.update(names)

    def equals(self, other: _Product) -> bool:
        return self.names == other.names and self.number == other.number

    def is_behind(self, other: _Product) -> bool:
        """Whether this run must grow to become equal to ``other``."""
        if self.names == other.names:
            return self.number < other.number
        return self.names <= other.names


def _groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]] | None:
    """Runs of axes that hold the same elements on both sides, axes of size 1 left out; or None.

    Names that are on one side only are the same dimensions under other names, in order: both
    sides have the same number of elements. (Two such names could be two others with the same
    product; probing would see it.)
    """
    left = [(axis, *_factors(d)) for axis, d in enumerate(source) if d != ONE]
    right = [(axis, *_factors(d)) for axis, d in enumerate(target) if d != ONE]
    names = [Counter(name for _, names, _ in side for name in names) for side in (left, right)]
    extra = [list((names[a] - names[b]).elements()) for a, b in ((0, 1), (1, 0))]
    if extra[0] and len(extra[0]) == len(extra[1]):
        same = dict(zip(extra[1], extra[0], strict=True))
        right = [(a, tuple(same.get(n, n) for n in names), c) for a, names, c in right]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        ours, theirs = _Product(), _Product()
        ours.take(*left.pop(0))
        theirs.take(*right.pop(0))
        while not ours.equals(theirs):
            if ours.is_behind(theirs) and left:
                ours.take(*left.pop(0))
            elif theirs.is_behind(ours) and right:
                theirs.take(*right.pop(0))
            else:
                return None
        groups.append((ours.axes, theirs.axes))
    return None if left or right else groups


def _regroup(
    source: Shape,
    target: Shape,
    group: tuple[list[int], list[int]],
    index: Index,
    result: list[Term],
) -> None:
    """Fill in ``result`` the source index of one group of axes from the target index."""
    from_axes, to_axes = group
    if len(from_axes) == len(to_axes) == 1:
        result[from_axes[0]] = index[to_axes[0]]
        return
    flat = as_affine(index[to_axes[0]])
    for axis in to_axes[1:]:
        scaled = product(flat, target[axis])
        if scaled is None:
            raise OpaqueError(f"Reshape that multiplies index {flat} by {target[axis]}")
        flat = scaled + as_affine(index[axis])
    for axis in reversed(from_axes[1:]):
        parts = divided(flat, source[axis])
        if parts is None:
            raise OpaqueError(f"Reshape that cuts index {flat} into blocks of {source[axis]}")
        flat, result[axis] = parts
    result[from_axes[0]] = flat


@_handles("Flatten")
def _flatten(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    axis = int_attribute(node, "axis", 1)
    axis += len(data.shape) if axis < 0 else 0
    sides: list[Affine] = []
    for dims in (data.shape[:axis], data.shape[axis:]):
        size: Affine | None = ONE
        for dim in dims:
            size = None if size is None else product(size, dim)
        if size is None:
            raise OpaqueError(f"Flatten of {show(data.shape)}")
        sides.append(size)
    return _reshaped(data, tuple(sides))


# --- Concat, Split, Slice ------------------------------------------------------------------


@_handles("Concat")
def _concat(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    parts = [need(inputs, i) for i in range(len(inputs))]
    rank = max(len(parts[0].shape), 1)
    axis = int_attribute(node, "axis", 0) % rank
    starts = [ZERO]
    for part in parts:
        starts.append(starts[-1] + part.shape[axis])
    shape = list(parts[0].shape)
    for part in parts:
        # Other axes are equal: a number says more than a name.
        for other, dim in enumerate(part.shape):
            shape[other] = dim if dim.is_constant else shape[other]
    shape[axis] = starts[-1]

    def at(index: Index) -> Term:
        position = as_affine(index[axis])

        def element(number: int) -> Term:
            local = (*index[:axis], position - starts[number], *index[axis + 1 :])
            return parts[number].at(local)

        def pick(number: int) -> Term:
            if number == len(parts) - 1:
                return element(number)
            inside = compare("Less", position, starts[number + 1])
            return where(inside, lambda: element(number), lambda: pick(number + 1))

        return pick(0)

    return SymbolicTensor(tuple(shape), at, parts[0].dtype)


@_handles("Pad")
def _pad(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, fill, given = need(inputs, 0), optional(inputs, 2), optional(inputs, 3)
    mode = node.attributes.get("mode")
    if mode is not None and mode.as_string() != "constant":
        raise OpaqueError(f"Pad of mode {mode.as_string()}")
    rank, pads = len(data.shape), need(inputs, 1).vector()
    axes = [as_int(a) % rank for a in given.vector()] if given else list(range(rank))
    before, after = [ZERO] * rank, [ZERO] * rank
    for number, axis in enumerate(axes):
        before[axis], after[axis] = pads[number], pads[number + len(axes)]
    shape = tuple(d + b + a for d, b, a in zip(data.shape, before, after, strict=True))

    def at(index: Index) -> Term:
        inside: Term = ONE
        source = []
        for term, dim, low, high in zip(index, data.shape, before, after, strict=True):
            place = term if low == ZERO else as_affine(term) - low
            source.append(place)
            if low != ZERO:
                inside = both(inside, at_least_zero(as_affine(place)))
            if high != ZERO:
                inside = both(inside, at_least_zero(dim - ONE - as_affine(place)))
        return where(
            inside,
            lambda: data.at(tuple(source)),
            lambda: ZERO if fill is None else fill.scalar(),
        )

    return SymbolicTensor(shape, at, data.dtype)


def split_part(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    """Output ``number`` of a Split."""
    data, given = need(inputs, 0), optional(inputs, 1)
    axis = int_attribute(node, "axis", 0) % len(data.shape)
    if given is not None:
        sizes = given.vector()
    else:
        count, total = len(node.outputs), as_int(data.shape[axis])
        each = -(-total // count)
        sizes = [constant(each)] * (count - 1) + [constant(total - each * (count - 1))]
    start = ZERO
    for size in sizes[:number]:
        start = start + size
    shape = (*data.shape[:axis], sizes[number], *data.shape[axis + 1 :])

    def at(index: Index) -> Term:
        return data.at((*index[:axis], as_affine(index[axis]) + start, *index[axis + 1 :]))

    return SymbolicTensor(shape, at, data.dtype)


@_handles("Slice")
def _slice(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    starts, ends = _starts(need(inputs, 1)), need(inputs, 2).vector()
    axes_input, steps_input = optional(inputs, 3), optional(inputs, 4)
    axes = [as_int(a) for a in axes_input.vector()] if axes_input else list(range(len(starts)))
    steps = [as_int(s) for s in steps_input.vector()] if steps_input else [1] * len(starts)
    shape, begin = list(data.shape), [ZERO] * len(data.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step != 1:
            raise OpaqueError(f"Slice with step {step}: a strided pattern")
        axis %= len(shape)
        first, last = _clamped(start, shape[axis]), _clamped(end, shape[axis])
        length = last - first
        if at_least_zero(length) == ZERO:
            length = ZERO
        begin[axis], shape[axis] = first, length

    def at(index: Index) -> Term:
        moved = (i if b == ZERO else as_affine(i) + b for i, b in zip(index, begin, strict=True))
        return data.at(tuple(moved))

    return SymbolicTensor(tuple(shape), at, data.dtype)


def _starts(given: SymbolicTensor) -> list[Affine]:
    """The first bounds of a slice; ``max(0, x)`` is ``x``: see ``_clamped``."""
    if len(given.shape) != 1 or not given.shape[0].is_constant:
        return given.vector()
    terms = [given.at((constant(i),)) for i in range(int(given.shape[0].constant))]
    return [as_affine(_not_below_zero(term)) for term in terms]


def _not_below_zero(term: Term) -> Term:
    if not isinstance(term, Apply) or term.op != "Where":
        return term
    condition, chosen, other = term.args
    for number, rest, holds in ((chosen, other, 1), (other, chosen, -1)):
        if isinstance(number, Affine) and rest == ZERO and isinstance(condition, AtLeastZero):
            gap = condition.affine - number.scaled(holds)
            if gap.is_constant and gap.constant in (-1, 0):
                return number
    return term


def _clamped(position: Affine, dim: Affine) -> Affine:
    """A slice bound: negative counts from the end, beyond the end is the end.

    Some bounds are taken on trust: a constant table of which the first or the last ``length``
    entries are sliced is long enough (a source whose table is too short fails by itself at that
    length).
    """
    if at_least_zero(position) != ONE:
        if dim.is_constant and not position.is_constant and at_least_zero(dim - position) == ONE:
            return position
        if at_least_zero(position) != ZERO:
            raise OpaqueError(f"Slice bound {position} of unknown sign")
        position = position + dim
        if at_least_zero(position) == ZERO:
            return ZERO
        if at_least_zero(position) != ONE:
            raise OpaqueError(f"Slice bound {position} against extent {dim}")
    if at_least_zero(position - dim) == ONE:
        return dim
    if position.is_constant and position.constant > _SLICE_INFINITY:
        return dim
    if dim.is_constant or at_least_zero(dim - position) == ONE:
        return position
    raise OpaqueError(f"Slice bound {position} against extent {dim}")


# --- Gather --------------------------------------------------------------------------------


def _read_at(term: Term, dim: Affine, element: Callable[[Affine], Term]) -> Term:
    """``element`` at an index that counts from the end where it is negative."""
    if isinstance(term, Affine):
        return where(at_least_zero(term), lambda: element(term), lambda: element(term + dim))
    if isinstance(term, Apply) and term.choices:
        condition, chosen, other = term.args
        return where(
            condition,
            lambda: _read_at(chosen, dim, element),
            lambda: _read_at(other, dim, element),
        )
    raise OpaqueError("a table is read at values that are no positions, as for a relative bias")


@_handles("Gather")
def _gather(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, indices = need(inputs, 0), need(inputs, 1)
    axis = int_attribute(node, "axis", 0) % max(len(data.shape), 1)
    width = len(indices.shape)

    def at(index: Index) -> Term:
        return _read_at(
            indices.at(index[axis : axis + width]),
            data.shape[axis],
            lambda chosen: data.at((*index[:axis], chosen, *index[axis + width :])),
        )

    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return SymbolicTensor(shape, at, data.dtype)


@_handles("GatherElements")
def _gather_elements(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, indices = need(inputs, 0), need(inputs, 1)
    axis = int_attribute(node, "axis", 0) % len(data.shape)

    def at(index: Index) -> Term:
        return _read_at(
            indices.at(index),
            data.shape[axis],
            lambda chosen: data.at((*index[:axis], chosen, *index[axis + 1 :])),
        )

    return SymbolicTensor(indices.shape, at, data.dtype)


@_handles("GatherND")
def _gather_nd(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, indices = need(inputs, 0), need(inputs, 1)
    if int_attribute(node, "batch_dims", 0):
        raise OpaqueError("GatherND with batch_dims")
    depth = as_int(indices.shape[-1])
    outer = len(indices.shape) - 1

    def at(index: Index) -> Term:
        def read(done: Sequence[Affine]) -> Term:
            number = len(done)
            if number == depth:
                return data.at((*done, *index[outer:]))
            coordinate = indices.at((*index[:outer], constant(number)))
            return _read_at(coordinate, data.shape[number], lambda c: read([*done, c]))

        return read([])

    return SymbolicTensor((*indices.shape[:-1], *data.shape[depth:]), at, data.dtype)
