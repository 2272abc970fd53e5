"""What scores pass between the product of queries and keys and the softmax."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

SCORE_OPERATORS = ("Add", "Where", "Mul", "Div", "Cast", "Identity", "Tanh")
"""Scales, masks, biases, softcaps and casts."""


def carries_scores(value: ir.Value, also: Collection[str] = ()) -> bool:
    """Whether a matrix product is behind ``value``, through operators that scores pass.

    Args:
        value: where to begin.
        also: further operators to look through.
    """
    stack, seen = [value], set()
    while stack:
        current = stack.pop()
        node = current.producer()
        if node is None or current in seen:
            continue
        seen.add(current)
        if node.op_type == "MatMul":
            return True
        if node.op_type in SCORE_OPERATORS or node.op_type in also:
            stack.extend(v for v in node.inputs if v is not None)
    return False
