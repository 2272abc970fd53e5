"""Attention sinks: one more column of logits in the softmax, whose weights are dropped after it.

    softmax([scores, sink]) without its last column, times v

The logit may differ between heads, and between nothing else: it must be one entry of a tensor of
fixed size, or one number (0 is "softmax with 1 in the denominator").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from subquad.passes.recognise.affine import ONE, OpaqueError, constant, position
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.expressions import Entry
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.tensors import as_affine, show

_MOVES = frozenset(
    ("Reshape", "Transpose", "Expand", "Unsqueeze", "Squeeze", "Tile", "Gather", "Slice")
    + ("Identity",)
)
_MAX_STEPS = 8


@dataclass(frozen=True)
class Sinks:
    """The logits of one attention.

    Attributes:
        value: holds the logits; None where all are ``number``.
        indices: for each head, which entry of the flattened ``value``.
        number: the logit of all heads where there is no value.
        is_first: whether the column stands before the keys.
    """

    value: ir.Value | None
    indices: tuple[int, ...]
    number: float
    is_first: bool


def read_sinks(
    logits: ir.Value, carries_scores: Callable[[ir.Value], bool], interpreter: Interpreter
) -> tuple[Sinks | None, ir.Value]:
    """The sinks that ``logits`` are concatenated with, and the scores of keys.

    Args:
        logits: what the softmax reads, ``[..., query_len, kv_len + 1]``.
        carries_scores: whether a value comes from the score product.

    Raises:
        OpaqueError: something else is concatenated with the scores.
    """
    node = logits.producer()
    if node is None or node.op_type != "Concat" or node.domain not in ("", "ai.onnx"):
        return None, logits
    parts = [v for v in node.inputs if v is not None]
    rank = len(interpreter.tensor(logits).shape)
    axis = node.attributes["axis"].as_int()
    carrying = [carries_scores(part) for part in parts]
    if axis not in (-1, rank - 1) or len(parts) != 2 or sum(carrying) != 1:
        return None, logits
    is_first = not carrying[0]
    column, scores = (parts[0], parts[1]) if is_first else (parts[1], parts[0])
    shape = interpreter.tensor(column).shape
    if shape[-1] != ONE:
        raise OpaqueError(f"{show(shape)} columns are added to the scores: one sink is known")
    number = uniform(column, interpreter)
    if number is not None:
        if not math.isfinite(number):
            raise OpaqueError(f"a sink of logit {number}")
        return Sinks(None, (), number, is_first), scores
    heads = interpreter.tensor(scores).shape[1] if rank == 4 else ONE
    if not heads.is_constant:
        raise OpaqueError(f"sinks of {heads} heads: the head count must be fixed")
    value, indices = _source(column, int(heads.constant), interpreter)
    if interpreter.tensor(value).dtype != ir.DataType.FLOAT:
        raise OpaqueError(f"sink logits {value.name!r} are not float32")
    return Sinks(value, indices, 0.0, is_first), scores


def without_sinks(
    weights: ir.Value, user: ir.Node, sinks: Sinks, interpreter: Interpreter
) -> ir.Value | None:
    """The weights of keys, if ``user`` drops the column of the sink and nothing else."""
    used = [output for output in user.outputs if output.uses()]
    if user.op_type not in ("Slice", "Split", "Gather") or len(used) != 1:
        return None
    (kept,) = used
    shape = interpreter.tensor(weights).shape
    kept_shape = interpreter.tensor(kept).shape
    if kept_shape != (*shape[:-1], shape[-1] - ONE):
        return None
    index = tuple(position(f"x{axis}", size) for axis, size in enumerate(kept_shape))
    try:
        found = interpreter.beginning_at(weights, [kept]).element(kept, index)
    except OpaqueError:
        return None
    shift = ONE if sinks.is_first else constant(0)
    wanted = (*index[:-1], index[-1] + shift)
    if not isinstance(found, Entry) or found.index != wanted:
        return None
    return kept


def _source(
    column: ir.Value, heads: int, interpreter: Interpreter
) -> tuple[ir.Value, tuple[int, ...]]:
    """The tensor of fixed size the logits come from, and the flat index of each head's."""
    current: ir.Value = column
    path: list[ir.Value] = []
    for _ in range(_MAX_STEPS):
        indices = _indices(column, heads, current, path, interpreter)
        if indices is not None:
            return current, indices
        path.append(current)
        node = current.producer()
        if node is None or node.op_type not in _MOVES or node.inputs[0] is None:
            break
        current = node.inputs[0]
    raise OpaqueError(
        f"the column {column.name!r} beside the scores is not one fixed logit for each head"
    )


def _indices(
    column: ir.Value,
    heads: int,
    source: ir.Value,
    path: list[ir.Value],
    interpreter: Interpreter,
) -> tuple[int, ...] | None:
    shape = interpreter.tensor(column).shape
    try:
        sizes = interpreter.tensor(source).shape
    except OpaqueError:
        return None
    if not sizes or not all(size.is_constant for size in sizes):
        return None
    dims = [int(size.constant) for size in sizes]
    reader = interpreter.beginning_at(source, path)
    found = []
    for head in range(heads):
        index = [position(f"x{axis}", size) for axis, size in enumerate(shape)]
        if len(shape) == 4 and shape[1] != ONE:
            index[1] = constant(head)
        try:
            term = reader.element(column, tuple(index))
        except OpaqueError:
            return None
        if not isinstance(term, Entry):
            return None
        at = [as_affine(i) for i in term.index]
        if not all(i.is_constant for i in at):
            return None  # it differs between rows or queries
        found.append(int(np.ravel_multi_index([int(i.constant) for i in at], dims)))
    return tuple(found)
