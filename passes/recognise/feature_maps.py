"""Which feature map made the operands of a linear attention, and whether features are negative."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.layout import Operand
from subquad.passes.recognise.symbolic import Interpreter

_NEVER_NEGATIVE = frozenset(
    ("Relu", "Exp", "Softmax", "Sigmoid", "HardSigmoid", "Softplus", "Abs", "Sqrt", "ReduceL2")
)
_MOVES = frozenset(
    ("Identity", "Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Slice")
    + ("Gather", "Tile", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "CumSum")
)
_MAX_DEPTH = 8


def shared_map(query: Operand, key: Operand) -> tuple[str, Operand, Operand]:
    """The feature map that made both, and of what; ``identity``: of themselves."""
    (first, of_query), (second, of_key) = _map_of(query.value), _map_of(key.value)
    if first == second:
        return first, replace(query, value=of_query), replace(key, value=of_key)
    return "identity", query, key


def _map_of(value: ir.Value) -> tuple[str, ir.Value]:
    node = value.producer()
    if node is not None and node.op_type == "Relu" and node.inputs[0] is not None:
        return "relu", node.inputs[0]
    if node is not None and node.op_type == "Add":
        for elu, one in (node.inputs, node.inputs[::-1]):
            inner = None if elu is None else elu.producer()
            tensor = None if one is None else ir.convenience.get_const_tensor(one)
            if inner is None or inner.op_type != "Elu" or tensor is None or tensor.size != 1:
                continue
            alpha = inner.attributes.get("alpha")
            unit = alpha is None or alpha.as_float() == 1.0
            if unit and float(tensor.numpy().reshape(())) == 1.0 and inner.inputs[0] is not None:
                return "elu", inner.inputs[0]
    return "identity", value


def is_never_negative(value: ir.Value, interpreter: Interpreter, depth: int = 0) -> bool:
    """Whether what computes ``value`` shows that no element is below zero."""
    number = uniform(value, interpreter)
    if number is not None:
        return number >= 0
    node = value.producer()
    if node is None or depth > _MAX_DEPTH or node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in _NEVER_NEGATIVE or _map_of(value)[0] == "elu":
        return True
    inputs = [v for v in node.inputs if v is not None]
    if node.op_type in _MOVES:
        return is_never_negative(inputs[0], interpreter, depth + 1)
    if node.op_type == "Concat":
        return all(is_never_negative(v, interpreter, depth + 1) for v in inputs)
    if node.op_type == "Max":
        return any(is_never_negative(v, interpreter, depth + 1) for v in inputs)
    if node.op_type == "Clip" and len(node.inputs) > 1 and node.inputs[1] is not None:
        return is_never_negative(node.inputs[1], interpreter, depth + 1)
    if node.op_type == "Pow":
        power = uniform(inputs[1], interpreter)
        return power is not None and power % 2 == 0
    if node.op_type == "Mul" and inputs[0] is inputs[1]:
        return True
    if node.op_type in ("Add", "Mul", "Div"):
        return all(is_never_negative(v, interpreter, depth + 1) for v in inputs)
    return False
