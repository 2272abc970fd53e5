"""Writes ONNX function bodies so that they read like the formulas they stand for.

``Body`` wraps the node list of one graph (a function body or a branch of ``If``). Plain numbers,
lists and arrays become ``Constant`` nodes, made once per body. Scalars that steer shapes are kept
as int64 tensors of shape ``[1]``, so they can be concatenated into shapes without further nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.operator import DOMAIN, OPSET

MICROSOFT = "com.microsoft"

Operand = ir.Value | NDArray[np.generic] | Sequence[int] | int | float | None
AttributeValue = int | float | str | Sequence[int] | Sequence[float] | ir.Attr


class Body:
    """Nodes under construction; branches see the values of the body around them."""

    def __init__(self, parent: Body | None = None) -> None:
        self._parent = parent
        self._nodes: list[ir.Node] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._names: count[int] = parent._names if parent is not None else count()

    def __call__(
        self,
        op_type: str,
        *operands: Operand,
        domain: str = "",
        **attributes: AttributeValue,
    ) -> ir.Value:
        """Append one node and return its first output."""
        return self.multi(op_type, *operands, domain=domain, num_outputs=1, **attributes)[0]

    def multi(
        self,
        op_type: str,
        *operands: Operand,
        num_outputs: int,
        domain: str = "",
        **attributes: AttributeValue,
    ) -> Sequence[ir.Value]:
        """Append one node with ``num_outputs`` outputs."""
        node = ir.node(
            op_type,
            [None if operand is None else self.value(operand) for operand in operands],
            attributes,
            domain=domain,
            num_outputs=num_outputs,
            name=f"n{next(self._names)}",
        )
        for output in node.outputs:
            output.name = f"{op_type.lower()}_{next(self._names)}"
        self._nodes.append(node)
        return node.outputs

    def value(self, operand: Operand) -> ir.Value:
        """Turn a Python number (int64 or float32, shape ``[1]`` or list) or array into a value."""
        if isinstance(operand, ir.Value):
            return operand
        if operand is None:
            raise TypeError("an absent operand has no value")
        if isinstance(operand, np.ndarray):
            array = operand
        elif isinstance(operand, float):
            array = np.array([operand], dtype=np.float32)
        else:
            array = np.atleast_1d(np.array(operand, dtype=np.int64))
        return self._constant(array)

    def scalar(self, number: int | float, dtype: type[np.generic]) -> ir.Value:
        """A rank-0 constant, for inputs that demand one."""
        return self._constant(np.array(number, dtype=dtype))

    def _constant(self, array: NDArray[np.generic]) -> ir.Value:
        key = (array.dtype.str, array.shape, array.tobytes())
        scope: Body | None = self
        while scope is not None:
            if key in scope._constants:
                return scope._constants[key]
            scope = scope._parent
        output = self("Constant", value=ir.AttrTensor("value", ir.tensor(array)))
        self._constants[key] = output
        return output

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Size of one axis (counted from the front), as ``[1]`` int64."""
        return self("Shape", value, start=axis, end=axis + 1)

    def shape(self, *dims: ir.Value | int) -> ir.Value:
        """A shape tensor; 0 copies and -1 infers, as in ``Reshape``."""
        if all(isinstance(dim, int) for dim in dims):
            return self.value([dim for dim in dims if isinstance(dim, int)])
        return self("Concat", *dims, axis=0)

    def reshape(self, value: ir.Value, *dims: ir.Value | int) -> ir.Value:
        return self("Reshape", value, self.shape(*dims))

    def transpose(self, value: ir.Value, *perm: int) -> ir.Value:
        return self("Transpose", value, perm=perm)

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        return self("Unsqueeze", value, list(axes))

    def slice(self, value: ir.Value, start: Operand, end: Operand, axis: int) -> ir.Value:
        return self("Slice", value, start, end, [axis])

    def pad(
        self, value: ir.Value, axis: int, rank: int, *, before: int = 0, after: ir.Value | int = 0
    ) -> ir.Value:
        """``value`` with zeros before and after along one axis.

        Pads are written for all axes: with ``axes``, ONNX Runtime's transpose optimizer permutes
        them as if they were for all, and the model fails where a transposition comes before.
        """
        zeros = [0] * rank
        if isinstance(after, int):
            pads = [*zeros, *zeros]
            pads[axis], pads[rank + axis] = before, after
            return self("Pad", value, pads)
        first = [*zeros, *zeros[:axis]]
        first[axis] = before
        rest = [zeros[axis + 1 :]] if axis + 1 < rank else []
        return self("Pad", value, self("Concat", first, after, *rest, axis=0))

    def matmul_transposed(self, a: ir.Value, b: ir.Value, rank: int) -> ir.Value:
        """``a @ b^T`` over the last two axes (the runtime fuses the transposition)."""
        perm = [*range(rank - 2), rank - 1, rank - 2]
        return self("MatMul", a, self.transpose(b, *perm))

    def arange(self, length: ir.Value | int) -> ir.Value:
        """``0 .. length-1`` as int64; ``length`` is a ``[1]`` tensor."""
        zero, one = self.scalar(0, np.int64), self.scalar(1, np.int64)
        if isinstance(length, int):
            return self._constant(np.arange(length, dtype=np.int64))
        return self("Range", zero, self("Squeeze", length, 0), one)

    def ceil_div(self, a: ir.Value, b: Operand) -> ir.Value:
        """``ceil(a / b)`` for ``a >= 0, b > 0``."""
        return self("Div", self("Sub", self("Add", a, b), 1), b)

    def between(self, value: ir.Value, low: Operand, high: Operand) -> ir.Value:
        """``low <= value <= high``."""
        return self("And", self("GreaterOrEqual", value, low), self("LessOrEqual", value, high))

    def all_of(self, *conditions: ir.Value | None) -> ir.Value | None:
        """Conjunction of those present; ``None`` when there is none."""
        present = [condition for condition in conditions if condition is not None]
        if not present:
            return None
        result = present[0]
        for condition in present[1:]:
            result = self("And", result, condition)
        return result

    def all_true(self, value: ir.Value) -> ir.Value:
        """Rank-0 bool: whether every element of a bool tensor is true."""
        return self("Cast", self("ReduceMin", self("Cast", value, to=6), keepdims=0), to=9)

    def as_float(self, value: ir.Value) -> ir.Value:
        return self("Cast", value, to=1)

    def branch(
        self,
        condition: ir.Value,
        then: Callable[[Body], ir.Value],
        otherwise: Callable[[Body], ir.Value],
    ) -> ir.Value:
        """``If`` with one output; only the branch taken is computed."""
        return self(
            "If",
            condition,
            then_branch=self._branch_graph("then_branch", then),
            else_branch=self._branch_graph("else_branch", otherwise),
        )

    def stack(self, count: ir.Value, build: Callable[[Body, ir.Value], ir.Value]) -> ir.Value:
        """``build(inner, step)`` for step 0 .. count - 1 (rank 0), stacked on a new first axis.

        Args:
            count: ``[1]`` int64.
            build: its results have one shape.
        """
        inner = Body(self)
        step = ir.Value(
            name=f"step_{next(self._names)}",
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape(()),
        )
        going = ir.Value(
            name=f"going_{next(self._names)}",
            type=ir.TensorType(ir.DataType.BOOL),
            shape=ir.Shape(()),
        )
        result = inner("Identity", build(inner, step))
        on = inner("Identity", going)
        graph = ir.Graph([step, going], [on, result], nodes=inner._nodes, name="step")
        trips = self("Squeeze", count, 0)
        # Passes drop an absent last input, but Loop needs its second.
        start = self._constant(np.array(True))
        return self("Loop", trips, start, body=ir.AttrGraph("body", graph))

    def _branch_graph(self, name: str, build: Callable[[Body], ir.Value]) -> ir.Attr:
        inner = Body(self)
        result = inner("Identity", build(inner))
        return ir.AttrGraph(name, ir.Graph([], [result], nodes=inner._nodes, name=name))

    def function(
        self,
        op_type: str,
        overload: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        attributes: Mapping[str, ir.Attr],
    ) -> ir.Function:
        """Close the body. Attributes are declared with the variant's values as defaults."""
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._nodes,
            opset_imports={"": OPSET, MICROSOFT: 1},
            name=op_type,
        )
        return ir.Function(DOMAIN, op_type, overload, graph=graph, attributes=attributes)
