"""Where query, key and value lie, and in which order of axes.

Key and value are read before any repetition of their heads for grouped queries: the elements of
the repeated tensor are traced back, head by head, to the tensor they come from, whatever
operators repeated it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from subquad.passes.recognise.affine import Affine, OpaqueError, constant, position
from subquad.passes.recognise.expressions import Entry
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.tensors import Shape, show

Perm = tuple[int, int, int, int]
# Operators that only move elements of their first input.
_MOVES = frozenset(
    ("Reshape", "Transpose", "Expand", "Unsqueeze", "Squeeze", "Tile", "Gather", "Concat")
    + ("Identity", "Slice")
)
_IDENTITY: Perm = (0, 1, 2, 3)
_PERMUTATIONS = tuple((a, b, c, d) for a, b, c, d in itertools.permutations(range(4)))
# Enough for Transpose, Unsqueeze, Expand, Reshape in any order with a few more between them.
_MAX_STEPS = 8


@dataclass(frozen=True)
class Operand:
    """A value read in layout ``[batch, heads, length, dim]``.

    Attributes:
        value: the value in the source graph.
        perm: transposition that gives the layout, or None.
        heads: for a packed ``[batch, length, heads * dim]`` value, the number of heads, else 0.
    """

    value: ir.Value
    perm: Perm | None = None
    heads: int = 0

    def shape(self, interpreter: Interpreter) -> Shape:
        """``(batch, heads, length, dim)`` as affine terms.

        Raises:
            OpaqueError: the rank is not the expected one.
        """
        dims = interpreter.tensor(self.value).shape
        if self.heads:
            if len(dims) != 3 or not dims[2].is_constant or dims[2].constant % self.heads:
                raise OpaqueError(
                    f"{self.value.name!r} of shape {show(dims)} is not "
                    f"[batch, length, {self.heads} heads * dim]"
                )
            width = int(dims[2].constant) // self.heads
            return dims[0], constant(self.heads), dims[1], constant(width)
        if len(dims) != 4:
            raise OpaqueError(f"{self.value.name!r} has rank {len(dims)}, expected 4")
        return tuple(dims[p] for p in self.perm) if self.perm else dims


def as_query(value: ir.Value, interpreter: Interpreter) -> Operand:
    """The first factor of the score product; three axes are one head per batch row."""
    return Operand(value, heads=int(len(interpreter.tensor(value).shape) == 3))


def as_key(transposed: ir.Value, interpreter: Interpreter, *, grouped: bool = True) -> Operand:
    """Key from the second factor of the score product, ``[..., dim, length]``.

    Without ``grouped`` it keeps the heads it has there, repeated or not.
    """
    node = transposed.producer()
    rank = len(interpreter.tensor(transposed).shape)
    perm: tuple[int, ...] = ()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        attribute = node.attributes.get("perm")
        perm = tuple(attribute.as_ints()) if attribute is not None else tuple(range(rank))[::-1]
        source = node.inputs[0]
    if rank == 3:
        if perm != (0, 2, 1):
            raise OpaqueError(f"key {transposed.name!r} of three axes is not a transposition")
        return Operand(source, heads=1)
    if len(perm) == 4:
        swapped = (perm[0], perm[1], perm[3], perm[2])
        operand = Operand(source, None if swapped == _IDENTITY else swapped)
    else:
        operand = Operand(transposed, (0, 1, 3, 2))
    return before_repetition(operand, interpreter) if grouped else operand


def as_value(value: ir.Value, interpreter: Interpreter, *, grouped: bool = True) -> Operand:
    """The second factor of the output product."""
    if len(interpreter.tensor(value).shape) == 3:
        return Operand(value, heads=1)
    return before_repetition(Operand(value), interpreter) if grouped else Operand(value)


def before_repetition(operand: Operand, interpreter: Interpreter) -> Operand:
    """The operand with as few heads as grouped queries need.

    Follows back operators that move elements, and takes the source in which head ``h`` is found
    as head ``h // repeats``; the operand itself where there is none.
    """
    if operand.heads:
        return operand
    shape = operand.shape(interpreter)
    if not shape[1].is_constant or not shape[3].is_constant:
        return operand
    best, current, path = operand, operand.value, [operand.value]
    for _ in range(_MAX_STEPS):
        node = current.producer()
        if node is None or node.op_type not in _MOVES or node.inputs[0] is None:
            break
        current = node.inputs[0]
        found = _grouped(operand, shape, interpreter.beginning_at(current, path), current)
        best = found or best
        path.append(current)
    return best


def _grouped(
    operand: Operand, shape: Shape, interpreter: Interpreter, source: ir.Value
) -> Operand | None:
    """``source`` as operand, if the heads of ``operand`` are its heads repeated in a row."""
    try:
        dims = interpreter.tensor(source).shape
        if len(dims) != 4:
            return None
        elements = _origins(operand, shape, interpreter)
    except OpaqueError:
        return None  # not a movement of elements of this source
    heads = int(shape[1].constant)
    batch, length, dim = (
        position(name, size) for name, size in zip("bnd", (shape[0], *shape[2:]), strict=True)
    )
    for perm in _PERMUTATIONS:
        count = dims[perm[1]]
        if not count.is_constant or not count.constant or heads % int(count.constant):
            continue
        repeats = heads // int(count.constant)
        if repeats == 1:
            continue
        if all(
            tuple(index[p] for p in perm) == (batch, constant(head // repeats), length, dim)
            for head, index in enumerate(elements)
        ):
            return Operand(source, None if perm == _IDENTITY else perm)
    return None


def _origins(
    operand: Operand, shape: Shape, interpreter: Interpreter
) -> Sequence[tuple[Affine, ...]]:
    """For each head, the index in the source of the element at ``(batch, head, n, d)``."""
    inverse = _inverse(operand.perm or _IDENTITY)
    origins = []
    for head in range(int(shape[1].constant)):
        wanted = (
            position("b", shape[0]),
            constant(head),
            position("n", shape[2]),
            position("d", shape[3]),
        )
        index = tuple(wanted[axis] for axis in inverse)
        term = interpreter.element(operand.value, index)
        if not isinstance(term, Entry):
            raise OpaqueError("not a single element of the source")
        origins.append(term.index)
    return origins


def _inverse(perm: Perm) -> tuple[int, ...]:
    return tuple(perm.index(axis) for axis in range(4))
