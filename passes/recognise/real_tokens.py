"""Lengths that a graph counts in its mask input, as ONNX Runtime's model builder writes them."""

from __future__ import annotations

import onnx_ir as ir

from subquad.passes.recognise.affine import ZERO, OpaqueError
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.symbolic import Interpreter

_SAME_ELEMENTS = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"))


def counts_real(value: ir.Value, interpreter: Interpreter) -> ir.Value | None:
    """The graph input ``[batch, slots]`` of which ``value`` is each row's sum, less one."""
    added = 0.0
    summed: ir.Value | None = None
    while not value.is_graph_input():
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx") or node.inputs[0] is None:
            return None
        if node.op_type in ("Add", "Sub") and summed is None:
            assert node.inputs[1] is not None
            number = uniform(node.inputs[1], interpreter)
            if number is None:
                return None
            added += number if node.op_type == "Add" else -number
        elif node.op_type == "ReduceSum" and summed is None:
            summed = node.inputs[0]
            if not _sums_slots(node, interpreter):
                return None
        elif node.op_type not in _SAME_ELEMENTS or (
            # Between the input and its sum, rows must stay rows.
            summed is not None and node.op_type not in ("Cast", "Identity")
        ):
            return None
        value = node.inputs[0]
    whole = summed is not None and len(interpreter.tensor(value).shape) == 2
    return value if whole and added == -1 else None


def _sums_slots(node: ir.Node, interpreter: Interpreter) -> bool:
    """Whether a ReduceSum is one along the second of two axes."""
    source = node.inputs[0]
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if source is None or axes is None or len(interpreter.tensor(source).shape) != 2:
        return False
    return uniform(axes, interpreter) in (1, -1) and axes.shape is not None and axes.shape == (1,)


def counts_slots(value: ir.Value, real: ir.Value, interpreter: Interpreter) -> bool:
    """Whether ``value`` is the number of columns of ``real``."""
    shape = interpreter.tensor(value).shape
    try:
        element = interpreter.element(value, (ZERO,) * len(shape))
    except OpaqueError:
        return False
    return bool(element == interpreter.tensor(real).shape[1])
