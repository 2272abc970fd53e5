"""Symbolic reading of a subgraph: shapes as affine terms, elements as terms of their indices.

``Interpreter.tensor(value)`` gives a ``SymbolicTensor`` whose ``at(index)`` is the term of one
element. Reading is lazy: an operator outside the language costs nothing until an element of its
output is asked for, so shapes can be followed through projections and normalisations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import MICROSOFT
from subquad.passes.recognise.affine import Affine, OpaqueError, constant, dimension, product
from subquad.passes.recognise.arithmetic import ARITHMETIC, Handler
from subquad.passes.recognise.contributed import CONTRIBUTED
from subquad.passes.recognise.expressions import Entry, Term
from subquad.passes.recognise.movement import MOVEMENT, split_part
from subquad.passes.recognise.tensors import (
    LARGEST_TABLE,
    Index,
    Shape,
    SymbolicTensor,
    as_affine,
    from_constant,
    opaque,
    type_name,
)

_HANDLERS = {**ARITHMETIC, **MOVEMENT}
# Elements read for one question; a mask takes some hundreds.
_MAX_ELEMENTS = 20_000


class Interpreter:
    """Reads values of one graph; results are remembered."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, SymbolicTensor] = {}
        self._budget = _MAX_ELEMENTS

    def tensor(self, value: ir.Value) -> SymbolicTensor:
        """The symbolic form of ``value``."""
        # An explicit stack: graphs are deeper than Python's recursion limit.
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._known:
                stack.pop()
                continue
            missing = [v for v in _node_inputs(current) if v is not None and v not in self._known]
            if missing:
                stack.extend(missing)
                continue
            self._known[current] = self._read(current)
            stack.pop()
        return self._known[value]

    def add_types(self, graph: ir.Graph) -> None:
        """Give values the types that ONNX's inference did not find, behind operators of others."""
        for node in graph:
            for value in node.outputs:
                if value.dtype is None and (dtype := self.tensor(value).dtype) is not None:
                    value.type = ir.TensorType(dtype)

    def element(self, value: ir.Value, index: Index) -> Term:
        """The term of one element, within a fixed amount of work.

        Raises:
            OpaqueError: it lies outside the language, or is too large to be a mask.
        """
        self._budget = _MAX_ELEMENTS
        try:
            return self.tensor(value).at(index)
        except RecursionError:
            raise OpaqueError(f"the subgraph of {value.name!r} is nested too deeply") from None

    def beginning_at(self, source: ir.Value, path: Sequence[ir.Value]) -> Interpreter:
        """An interpreter for which the elements of ``source`` are what cannot be read further.

        Args:
            source: the value that is taken as given.
            path: the values computed from it, which must be read anew.
        """
        shape = self.tensor(source).shape
        name = source.name or "?"
        other = Interpreter()
        other._known = {v: t for v, t in self._known.items() if v not in path}
        other._known[source] = SymbolicTensor(
            shape, lambda index: Entry(name, tuple(as_affine(i) for i in index)), source.dtype
        )
        return other

    def _read(self, value: ir.Value) -> SymbolicTensor:
        # An initializer that is also a graph input is only a default: callers may replace it.
        if value.is_graph_input():
            return _graph_input(value)
        if value.const_value is not None:
            return self._remembering(self._constant(value.const_value))
        node = value.producer()
        if node is None:
            return _unread(value, "a value from outside the graph")
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            tensor = ir.convenience.get_const_tensor(value)
            return (
                _unread(value, "a constant of another kind")
                if tensor is None
                else self._remembering(self._constant(tensor))
            )
        handler = _handler(node, node.outputs.index(value))
        if handler is None:
            return _unread(value, f"operator {node.op_type} is outside the mask language")
        inputs = [None if v is None else self._known[v] for v in node.inputs]
        try:
            result = handler(node, inputs)
        except OpaqueError as error:
            return _unread(value, str(error))
        return result if result in inputs else self._remembering(result)

    def _constant(self, tensor: ir.TensorProtocol) -> SymbolicTensor:
        return from_constant(tensor)

    def _remembering(self, tensor: SymbolicTensor) -> SymbolicTensor:
        """Each element read once: masks share subgraphs, so their terms must too."""
        known: dict[Index, Term] = {}
        read = tensor.at

        def at(index: Index) -> Term:
            if index not in known:
                self._budget -= 1
                if self._budget < 0:
                    raise OpaqueError("the subgraph is too large to be a mask")
                known[index] = read(index)
            return known[index]

        return tensor.reading(at)


class TableInterpreter(Interpreter):
    """Reads elements of constants that fit no simple rule as entries of a table.

    Attributes:
        tables: the arrays, by the ``source`` of the entries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, NDArray[np.generic]] = {}

    def _constant(self, tensor: ir.TensorProtocol) -> SymbolicTensor:
        plain = from_constant(tensor)

        def at(index: Index) -> Term:
            try:
                return plain.at(index)
            except OpaqueError:
                if tensor.dtype != ir.DataType.FLOAT or tensor.size > LARGEST_TABLE:
                    raise
                name = f"constant {tensor.name}"
                self.tables[name] = tensor.numpy()
                return Entry(name, tuple(as_affine(i) for i in index), "float32")

        return plain.reading(at)


def _handler(node: ir.Node, number: int) -> Handler | None:
    """What reads output ``number`` of a node."""
    if node.domain == MICROSOFT:
        contributed = CONTRIBUTED.get(node.op_type)
        if contributed is None:
            return None
        return lambda node, inputs: contributed(node, inputs, number)
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Split":
        return partial(split_part, number=number)
    return _HANDLERS.get(node.op_type) if number == 0 else None


def _node_inputs(value: ir.Value) -> tuple[ir.Value | None, ...]:
    node = value.producer()
    if node is None or value.const_value is not None or value.is_graph_input():
        return ()
    return tuple(node.inputs)


def _unread(value: ir.Value, reason: str) -> SymbolicTensor:
    message = f"{reason} (value {value.name!r})"
    shape = _annotated_shape(value)
    return SymbolicTensor(
        f"{message} of unknown rank" if shape is None else shape, opaque(message), value.dtype
    )


def _annotated_shape(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(
        constant(dim) if isinstance(dim, int) else _named(dim, value, axis)
        for axis, dim in enumerate(value.shape)
    )


_FACTOR = re.compile(r"(\d+)|([A-Za-z_]\w*)")


def _named(dim: ir.SymbolicDim, value: ir.Value, axis: int) -> Affine:
    """A dimension name; exporters also write sums and products: ``past + length``."""
    if dim.value is None:
        return dimension(f"?{value.name}.{axis}")
    total = constant(0)
    for part in dim.value.replace(" - ", " + -").split(" + "):
        sign, text = (-1, part[1:]) if part.startswith("-") else (1, part)
        term: Affine | None = constant(sign)
        for factor in text.split("*"):
            match = _FACTOR.fullmatch(factor.strip())
            if match is None or term is None:
                return dimension(dim.value)
            number, name = match.groups()
            term = product(term, constant(int(number)) if number else dimension(name))
        if term is None:
            return dimension(dim.value)
        total = total + term
    return total


def _graph_input(value: ir.Value) -> SymbolicTensor:
    if value.dtype is None or value.shape is None:
        return _unread(value, "graph input of unknown type")
    shape, name, dtype = _annotated_shape(value), value.name or "?", type_name(value.dtype)
    assert shape is not None
    return SymbolicTensor(
        shape, lambda index: Entry(name, tuple(as_affine(i) for i in index), dtype), value.dtype
    )
