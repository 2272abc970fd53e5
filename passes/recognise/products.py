"""Read values as sums of products: which tensors are multiplied, and over which axes the sum runs.

A matrix product, an Einsum, a product element by element, a sum over an axis and a running sum are
all of one form,

    result[x, y] = scale * sum over z of  a[x, z] * b[z, y] * ...

so the order in which a graph multiplies and sums does not matter here: ``(q k^T) v`` and
``q (k^T v)`` read alike. A ``Product`` has the factors with a label for each of their axes; a label
that the result lacks is summed over. What is no product (a nonlinear function, a projection by
weights) is a factor as it is.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Literal, TypeAlias

import onnx_ir as ir

from subquad.passes.recognise.affine import ONE, Affine, OpaqueError, position, product
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.decomposed import uniform_factor
from subquad.passes.recognise.expressions import Entry, atoms
from subquad.passes.recognise.mask import zero_or_one
from subquad.passes.recognise.other_forms import computed_from_inputs
from subquad.passes.recognise.symbolic import Interpreter

Axis: TypeAlias = tuple[int, ...]
"""The labels that are merged into one axis, outermost first; none for an axis of one entry."""
Acts: TypeAlias = Literal["times", "divides", "visible", "hidden"]
RunKind: TypeAlias = Literal["up to", "before", "from", "after"]

_MAX_FACTORS = 12
_STANDARD = ("", "ai.onnx")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
# What may stand between a sum and the quotient in which it is the divisor.
_ON_DIVISORS = frozenset(
    ("Add", "Max", "Clip", "Identity", "Unsqueeze", "Squeeze", "Transpose", "Reshape", "Expand")
    + ("Abs", "Cast", "Where", "Sqrt", "Sub", "Mul", "Min", "Pow", "Neg", "Div", "Reciprocal")
    + ("Exp", "Log", "Softplus", "Relu", "Sigmoid", "Tanh")
)


@dataclass(frozen=True)
class Factor:
    """One tensor of a product.

    Attributes:
        value: the tensor.
        axes: of its axes; each has one label, or none where it has one entry.
        acts: multiplies, divides, or lets through where it is true or false.
    """

    value: ir.Value
    axes: tuple[Axis, ...]
    acts: Acts = "times"

    @property
    def labels(self) -> frozenset[int]:
        return frozenset(label for axis in self.axes for label in axis)


@dataclass(frozen=True)
class Run:
    """A running sum: over the entries of ``summed`` as they stand to ``at``, an axis of the result
    of the same size."""

    summed: int
    at: int
    kind: RunKind


@dataclass(frozen=True)
class Product:
    """A sum of products.

    Attributes:
        factors: what is multiplied.
        axes: of the result.
        scale: multiplies it.
        runs: which sums are running sums.
    """

    factors: tuple[Factor, ...]
    axes: tuple[Axis, ...]
    scale: Fraction = Fraction(1)
    runs: tuple[Run, ...] = ()

    @property
    def result(self) -> frozenset[int]:
        return frozenset(label for axis in self.axes for label in axis)

    @property
    def labels(self) -> frozenset[int]:
        return frozenset().union(*(factor.labels for factor in self.factors))

    @property
    def summed(self) -> frozenset[int]:
        return self.labels - self.result

    @property
    def is_single(self) -> bool:
        """One tensor, at most with its axes moved."""
        alone = len(self.factors) == 1 and self.factors[0].acts == "times"
        return alone and not self.summed and not self.runs and self.scale == 1

    @property
    def divisors(self) -> tuple[Factor, ...]:
        return tuple(factor for factor in self.factors if factor.acts == "divides")


class _ApartError(Exception):
    """Axes that do not correspond: what is multiplied is taken as it is."""


class ProductReader:
    """Reads the values of one graph, in its order.

    Args:
        graph: sorted.
        interpreter: has read it, and is asked for sizes and constants.

    Attributes:
        sizes: of labels.
    """

    def __init__(self, graph: ir.Graph, interpreter: Interpreter) -> None:
        self.sizes: dict[int, Affine] = {}
        self._interpreter = interpreter
        self._computed = computed_from_inputs(graph)
        self._known: dict[ir.Value, Product] = {}
        self._masks: dict[ir.Value, bool] = {}
        self._numbers = count()
        for node in graph:
            read = _READERS.get(node.op_type)
            if read is None or node.domain not in _STANDARD:
                continue
            if not any(value in self._computed for value in node.inputs):
                continue
            try:
                found = read(self, node)
            except (_ApartError, OpaqueError):
                continue
            if found is not None and len(found.factors) <= _MAX_FACTORS:
                self._known[node.outputs[0]] = found

    def of(self, value: ir.Value) -> Product:
        """``value`` as a sum of products; of itself alone, if it is none.

        Raises:
            OpaqueError: its rank is not known.
        """
        known = self._known.get(value)
        return self.alone(value) if known is None else known

    def is_product(self, value: ir.Value) -> bool:
        """Whether anything was multiplied, summed or moved to compute ``value``."""
        return value in self._known

    def alone(self, value: ir.Value) -> Product:
        """``value`` as a product of itself."""
        axes = []
        for size in self._interpreter.tensor(value).shape:
            axes.append(() if size == ONE else (self._label(size),))
        return Product((Factor(value, tuple(axes)),), tuple(axes))

    def size(self, axis: Axis) -> Affine:
        total: Affine | None = ONE
        for label in axis:
            total = None if total is None else product(total, self.sizes[label])
        if total is None:
            raise _ApartError
        return total

    # --- what the readers use ---

    def _label(self, size: Affine) -> int:
        label = next(self._numbers)
        self.sizes[label] = size
        return label

    def _input(self, node: ir.Node, number: int) -> ir.Value:
        value = node.inputs[number]
        if value is None:
            raise _ApartError
        return value

    def _ints(self, node: ir.Node, number: int) -> tuple[int, ...]:
        tensor = ir.convenience.get_const_tensor(self._input(node, number))
        if tensor is None:
            raise _ApartError
        return tuple(int(x) for x in tensor.numpy().reshape(-1))

    def _scaled(self, value: ir.Value, factor: Fraction) -> Product:
        found = self.of(value)
        if found.divisors:
            raise _ApartError  # the quotient is scaled, which no operator says
        return replace(found, scale=found.scale * factor)

    def _relabelled(self, of: Product, names: Mapping[int, int]) -> Product:
        def axes(old: Iterable[Axis]) -> tuple[Axis, ...]:
            return tuple(tuple(names.get(label, label) for label in axis) for axis in old)

        return Product(
            tuple(replace(factor, axes=axes(factor.axes)) for factor in of.factors),
            axes(of.axes),
            of.scale,
            tuple(
                replace(run, summed=names.get(run.summed, run.summed), at=names.get(run.at, run.at))
                for run in of.runs
            ),
        )

    def _apart(self, left: Product, right: Product) -> Product:
        """``right`` with labels of its own: one tensor may stand on both sides."""
        shared = sorted(left.labels & right.labels)
        return self._relabelled(right, {label: self._label(self.sizes[label]) for label in shared})

    def _joined(self, left: Product, right: Product, names: dict[int, int]) -> Product:
        """Both multiplied; ``names``: labels of ``right`` that are some of ``left``."""
        if len(set(names.values())) < len(names):
            raise _ApartError  # a diagonal
        right = self._relabelled(right, names)
        return Product(
            left.factors + right.factors, (), left.scale * right.scale, left.runs + right.runs
        )

    def _multiplied(self, left: Product, right: Product) -> Product:
        """Element by element, broadcast."""
        right, names = self._apart(left, right), dict[int, int]()
        axes = _broadcast(left.axes, right.axes, names)
        return replace(self._joined(left, right, names), axes=axes)

    def _matrix_product(self, left: Product, right: Product) -> Product:
        if len(left.axes) < 2 or len(right.axes) < 2:
            raise _ApartError
        right, names = self._apart(left, right), dict[int, int]()
        batch = _broadcast(left.axes[:-2], right.axes[:-2], names)
        inner = _broadcast(left.axes[-1:], right.axes[-2:-1], names)
        if (left.axes[-1] == ()) != (right.axes[-2] == ()) or not inner:
            raise _ApartError
        axes = (*batch, left.axes[-2], tuple(names.get(x, x) for x in right.axes[-1]))
        return replace(self._joined(left, right, names), axes=axes)

    def _first_that_fits(
        self, join: Callable[[Product, Product], Product], a: ir.Value, b: ir.Value
    ) -> Product:
        """Operands taken apart where their axes correspond, else as they are."""
        for left in (self.of(a), self.alone(a)):
            for right in (self.of(b), self.alone(b)):
                try:
                    return join(left, right)
                except _ApartError:
                    continue
        raise _ApartError

    def _is_mask(self, value: ir.Value) -> bool:
        """Whether a tensor is 0 or 1 everywhere, by what it is computed from."""
        if value not in self._masks:
            try:
                dims = self._interpreter.tensor(value).shape
                index = tuple(position(f"x{axis}", dim) for axis, dim in enumerate(dims))
                term = self._interpreter.element(value, index)
                floats = any(isinstance(a, Entry) and "float" in a.dtype for a in atoms(term))
                self._masks[value] = not floats and zero_or_one(term)
            except OpaqueError:
                self._masks[value] = False
        return self._masks[value]

    def holds_sum(self, value: ir.Value) -> bool:
        """Whether a divisor is made of a sum of products of two tensors."""
        stack, seen = [value], set[ir.Value]()
        while stack and len(seen) < 24:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            known = self._known.get(current)
            if known is not None and known.summed:
                computed = [f for f in known.factors if f.acts == "times" and f.axes]
                if len(computed) > 1:
                    return True
            node = current.producer()
            if node is not None and node.op_type in _ON_DIVISORS:
                stack.extend(v for v in node.inputs if v is not None)
        return False

    def _divided_by(self, divisor: ir.Value) -> Product:
        """One over ``divisor``."""
        found = self.of(divisor)
        if not found.is_single:
            found = self.alone(divisor)
        (factor,) = found.factors
        return replace(found, factors=(replace(factor, acts="divides"),))

    # --- one operator each ---

    def read_same(self, node: ir.Node) -> Product | None:
        value = self._input(node, 0)
        if node.op_type == "Cast":
            types = [self._interpreter.tensor(v).dtype for v in (value, node.outputs[0])]
            if any(dtype not in _FLOATS for dtype in types):
                return None
        return self._known.get(value) or self.alone(value)

    def read_transpose(self, node: ir.Node) -> Product:
        found = self.of(self._input(node, 0))
        attribute = node.attributes.get("perm")
        rank = len(found.axes)
        perm = tuple(range(rank))[::-1] if attribute is None else tuple(attribute.as_ints())
        return replace(found, axes=tuple(found.axes[axis] for axis in perm))

    def read_unsqueeze(self, node: ir.Node) -> Product:
        found = self.of(self._input(node, 0))
        places = self._ints(node, 1)
        rank = len(found.axes) + len(places)
        added = {place % rank for place in places}
        rest = iter(found.axes)
        return replace(
            found, axes=tuple(() if axis in added else next(rest) for axis in range(rank))
        )

    def read_squeeze(self, node: ir.Node) -> Product:
        found = self.of(self._input(node, 0))
        rank = len(found.axes)
        places = {place % rank for place in self._ints(node, 1)} if len(node.inputs) > 1 else None
        if places is None:
            places = {axis for axis in range(rank) if not found.axes[axis]}
        if any(found.axes[place] for place in places):
            raise _ApartError
        return replace(
            found, axes=tuple(axis for n, axis in enumerate(found.axes) if n not in places)
        )

    def read_reshape(self, node: ir.Node) -> Product:
        found = self.of(self._input(node, 0))
        labels = [label for axis in found.axes for label in axis]
        axes: list[Axis] = []
        for size in self._interpreter.tensor(node.outputs[0]).shape:
            axis: Axis = ()
            while self.size(axis) != size:
                if not labels:
                    raise _ApartError
                axis = (*axis, labels.pop(0))
            axes.append(axis)
        if labels:
            raise _ApartError
        return replace(found, axes=tuple(axes))

    def read_mul(self, node: ir.Node) -> Product | None:
        a, b = self._input(node, 0), self._input(node, 1)
        for number, other in ((a, b), (b, a)):
            factor = uniform_factor(number, self._interpreter)
            if factor is not None:
                return self._scaled(other, factor)
        left, right = self.of(a), self.of(b)
        if left.is_single and right.is_single:
            a_wider, b_wider = _wider(left.axes, right.axes), _wider(right.axes, left.axes)
            if a_wider == b_wider:
                # An outer product is one; a product of two alike is one tensor.
                return self._first_that_fits(self._multiplied, a, b) if a_wider else None
            smaller = right if a_wider else left
            if not self._is_mask(smaller.factors[0].value):
                return None
        return self._first_that_fits(self._multiplied, a, b)

    def read_div(self, node: ir.Node) -> Product | None:
        a, b = self._input(node, 0), self._input(node, 1)
        factor = uniform_factor(b, self._interpreter)
        if factor is not None:
            return self._scaled(a, 1 / factor)
        if not self.holds_sum(b):
            return None
        factor = uniform_factor(a, self._interpreter)
        if factor is not None:
            return self._scaled_divisor(b, factor)
        return self._multiplied(self.of(a), self._divided_by(b))

    def _scaled_divisor(self, divisor: ir.Value, factor: Fraction) -> Product:
        return replace(self._divided_by(divisor), scale=factor)

    def read_reciprocal(self, node: ir.Node) -> Product | None:
        value = self._input(node, 0)
        return self._divided_by(value) if self.holds_sum(value) else None

    def read_where(self, node: ir.Node) -> Product | None:
        condition, chosen, other = (self._input(node, number) for number in range(3))
        acts: Acts
        if uniform(other, self._interpreter) == 0.0:
            value, acts = chosen, "visible"
        elif uniform(chosen, self._interpreter) == 0.0:
            value, acts = other, "hidden"
        else:
            return None
        found = self.of(value)
        mask = self.of(condition)
        if not mask.is_single:
            mask = self.alone(condition)
        if found.is_single and not _wider(found.axes, mask.axes):
            return None
        mask = replace(mask, factors=(replace(mask.factors[0], acts=acts),))
        return self._multiplied(found, mask)

    def read_matmul(self, node: ir.Node) -> Product | None:
        a, b = self._input(node, 0), self._input(node, 1)
        if a not in self._computed or b not in self._computed:
            return None
        return self._first_that_fits(self._matrix_product, a, b)

    def read_reduce_sum(self, node: ir.Node) -> Product:
        found = self.of(self._input(node, 0))
        rank = len(found.axes)
        noop = node.attributes.get("noop_with_empty_axes")
        given = self._ints(node, 1) if len(node.inputs) > 1 and node.inputs[1] is not None else ()
        if not given and noop is not None and noop.as_int():
            return found
        places = {place % rank for place in given} or set(range(rank))
        keep = node.attributes.get("keepdims")
        kept = keep is None or bool(keep.as_int())
        axes = tuple(
            () if number in places else axis
            for number, axis in enumerate(found.axes)
            if kept or number not in places
        )
        return replace(found, axes=axes)

    def read_cum_sum(self, node: ir.Node) -> Product:
        found = self.of(self._input(node, 0))
        (place,) = self._ints(node, 1)
        if len(found.axes[place]) != 1:
            raise _ApartError
        (summed,) = found.axes[place]
        at = self._label(self.sizes[summed])
        flags = _flag(node, "exclusive"), _flag(node, "reverse")
        kinds: dict[tuple[bool, bool], RunKind] = {
            (False, False): "up to",
            (True, False): "before",
            (False, True): "from",
            (True, True): "after",
        }
        axes = list(found.axes)
        axes[place] = (at,)
        return replace(found, axes=tuple(axes), runs=(*found.runs, Run(summed, at, kinds[flags])))

    def read_einsum(self, node: ir.Node) -> Product | None:
        equation = node.attributes["equation"].as_string().replace(" ", "")
        values = [self._input(node, number) for number in range(len(node.inputs))]
        if len(values) > 1 and not all(value in self._computed for value in values):
            return None
        ranks = [len(self._interpreter.tensor(value).shape) for value in values]
        left, arrow, result = _without_ellipsis(equation, ranks).partition("->")
        if not arrow:
            raise _ApartError
        total: Product | None = None
        places: dict[str, Axis] = {}
        for letters, value in zip(left.split(","), values, strict=True):
            if len(set(letters)) < len(letters):
                raise _ApartError
            for found in (self.of(value), self.alone(value)):
                if total is not None:
                    found = self._apart(total, found)
                names: dict[int, int] = {}
                try:
                    merged = {
                        letter: _one_of(places.get(letter, ()), axis, names)
                        for letter, axis in zip(letters, found.axes, strict=True)
                    }
                    total = found if total is None else self._joined(total, found, names)
                    places |= merged
                    break
                except _ApartError:
                    continue
            else:
                raise _ApartError
        assert total is not None
        return replace(total, axes=tuple(places[letter] for letter in result))


_READERS: dict[str, Callable[[ProductReader, ir.Node], Product | None]] = {
    "Identity": ProductReader.read_same,
    "Cast": ProductReader.read_same,
    "Transpose": ProductReader.read_transpose,
    "Unsqueeze": ProductReader.read_unsqueeze,
    "Squeeze": ProductReader.read_squeeze,
    "Reshape": ProductReader.read_reshape,
    "Mul": ProductReader.read_mul,
    "Div": ProductReader.read_div,
    "Reciprocal": ProductReader.read_reciprocal,
    "Where": ProductReader.read_where,
    "MatMul": ProductReader.read_matmul,
    "ReduceSum": ProductReader.read_reduce_sum,
    "CumSum": ProductReader.read_cum_sum,
    "Einsum": ProductReader.read_einsum,
}
MOVEMENT = frozenset(("Identity", "Cast", "Transpose", "Unsqueeze", "Squeeze", "Reshape"))
"""Operators that leave a product what it is."""


def _without_ellipsis(equation: str, ranks: Sequence[int]) -> str:
    """An Einsum's equation with letters for the axes that ``...`` stands for."""
    left, arrow, result = equation.partition("->")
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    operands = left.split(",")
    if len(operands) != len(ranks):
        raise _ApartError
    hidden = [rank - len(o.replace("...", "")) for o, rank in zip(operands, ranks, strict=True)]
    letters = "".join(unused[: max(hidden)])
    # Fewer axes stand for the last ones.
    spelled = [
        operand.replace("...", letters[len(letters) - number :])
        for operand, number in zip(operands, hidden, strict=True)
    ]
    return ",".join(spelled) + arrow + result.replace("...", letters)


def _flag(node: ir.Node, name: str) -> bool:
    attribute = node.attributes.get(name)
    return attribute is not None and bool(attribute.as_int())


def _one_of(left: Axis, right: Axis, names: dict[int, int]) -> Axis:
    """The axis that both are; labels of ``right`` get the names of ``left``."""
    if not left:
        return tuple(names.get(label, label) for label in right)
    if not right:
        return left
    if len(left) != len(right):
        raise _ApartError
    for ours, theirs in zip(left, right, strict=True):
        if names.setdefault(theirs, ours) != ours:
            raise _ApartError
    return left


def _broadcast(
    left: Sequence[Axis], right: Sequence[Axis], names: dict[int, int]
) -> tuple[Axis, ...]:
    rank = max(len(left), len(right))
    ours, theirs = ([()] * (rank - len(axes)) + list(axes) for axes in (left, right))
    return tuple(_one_of(a, b, names) for a, b in zip(ours, theirs, strict=True))


def _wider(left: Sequence[Axis], right: Sequence[Axis]) -> bool:
    """Whether ``left`` has an axis along which ``right`` is broadcast."""
    rank = max(len(left), len(right))
    ours, theirs = ([()] * (rank - len(axes)) + list(axes) for axes in (left, right))
    return any(a and not b for a, b in zip(ours, theirs, strict=True))
