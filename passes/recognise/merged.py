"""Undo the merging of batch and heads into one axis, as ``baddbmm`` and ``bmm`` want it.

BLOOM and DeBERTa compute scores as ``[batch * heads, query, key]``, split that axis for the mask
and the softmax, and merge it again for the product with values. The rewriting moves the split up
to the factors of the score product and down past the product with values::

    softmax(split(q k^T + bias) + mask)        softmax(split(q) split(k)^T + split(bias) + mask)
    merge(weights) v                       ->  merge(weights split(v))

torch's ``MultiheadAttention`` stays merged all the way. There the number of heads is read from the
size of the axis, ``heads * batch``: rows do not meet in an attention, so any split is exact.

Elements are moved, none is computed differently. Nothing is changed unless all of it fits.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from subquad.passes.recognise.affine import ONE, OpaqueError
from subquad.passes.recognise.scores import SCORE_OPERATORS, carries_scores
from subquad.passes.recognise.symbolic import Interpreter

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity", "Tanh")
_RESHAPED = ("Reshape",)


def split_merged_heads(model: ir.Model, interpreter: Interpreter) -> None:
    """Rewrite every softmax or sigmoid of scores that is computed that way; modifies ``model``."""
    changed = False
    for node in list(model.graph):
        if node.op_type not in ("Softmax", "Sigmoid") or node.domain not in ("", "ai.onnx"):
            continue
        split = _split_before(node, interpreter)
        merge = _merge_after(node, interpreter)
        if split is None or merge is None:
            changed |= _split_throughout(model.graph, node, interpreter)
            continue
        heads = int(interpreter.tensor(split.outputs[0]).shape[1].constant)
        rewriter = _Rewriter(interpreter, heads)
        source = split.inputs[0]
        assert source is not None
        scores = rewriter.scores(source)
        if scores is None:
            continue
        _finish(model.graph, split, merge, scores, rewriter)
        changed = True
    if changed:
        # A node is inserted where its output was made: shared values may be needed earlier.
        model.graph.sort()


def _split_throughout(graph: ir.Graph, softmax: ir.Node, interpreter: Interpreter) -> bool:
    """Split an attention that is merged from its products to its weights."""
    logits = softmax.inputs[0]
    heads = None if logits is None else _heads_of_axis(logits, interpreter)
    path = _to_product(softmax)
    if logits is None or heads is None or path is None or not carries_scores(logits, _RESHAPED):
        return False
    rewriter = _Rewriter(interpreter, heads)
    scores = rewriter.scores(logits)
    if scores is None:
        return False
    *steps, product = path
    weights = scores
    for step in (softmax, *steps):
        weights = rewriter.repeat(step, weights)
    values = product.inputs[1]
    assert values is not None
    output = rewriter.merge(rewriter.product(weights, values))
    graph.insert_before(product, rewriter.nodes)
    old = product.outputs[0]
    output.name, old.name = old.name, None
    output.shape = old.shape
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    graph.remove([product, *reversed(steps), softmax], safe=True)
    return True


def _heads_of_axis(logits: ir.Value, interpreter: Interpreter) -> int | None:
    """``n`` where the first of three axes is ``n`` times a dimension."""
    try:
        shape = interpreter.tensor(logits).shape
    except OpaqueError:
        return None
    if len(shape) != 3 or shape[0].constant or len(shape[0].terms) != 1:
        return None
    heads = shape[0].terms[0][1]
    return int(heads) if float(heads).is_integer() and heads > 1 else None


def _to_product(softmax: ir.Node) -> list[ir.Node] | None:
    """What stands between a softmax and the product with values, and the product."""
    path: list[ir.Node] = []
    value = softmax.outputs[0]
    axis = softmax.attributes.get("axis")
    if axis is not None and axis.as_int() not in (-1, 2):
        return None
    for _ in range(4):
        users = [u.node for u in value.uses() if u.node.op_type != "Shape"]
        if len(users) != 1 or len(users) != len(value.uses()) or value.is_graph_output():
            return None
        path.append(users[0])
        if users[0].op_type == "MatMul":
            fits = users[0].inputs[0] is value and users[0].inputs[1] is not value
            return path if fits else None
        if users[0].op_type not in ("Cast", "Identity", "Dropout") or len(users[0].outputs) > 1:
            return None
        value = users[0].outputs[0]
    return None


def _split_before(softmax: ir.Node, interpreter: Interpreter) -> ir.Node | None:
    """The Reshape ``[batch * heads, q, k] -> [batch, heads, q, k]`` that the scores go through."""
    value = softmax.inputs[0]
    for _ in range(8):
        node = value.producer() if value is not None else None
        if node is None:
            return None
        if node.op_type == "Reshape":
            return node if _splits(node.inputs[0], node.outputs[0], interpreter) else None
        if node.op_type not in SCORE_OPERATORS:
            return None
        value = next(
            (v for v in node.inputs if v is not None and carries_scores(v, _RESHAPED)), None
        )
    return None


def _splits(merged: ir.Value | None, split: ir.Value, interpreter: Interpreter) -> bool:
    """Whether ``split`` is ``merged`` with its first axis taken apart into batch and heads."""
    try:
        if merged is None:
            return False
        small, large = interpreter.tensor(merged).shape, interpreter.tensor(split).shape
    except OpaqueError:
        return False
    if len(small) != 3 or len(large) != 4 or not large[1].is_constant:
        return False
    return small[0] == large[0].scaled(large[1].constant) and small[1:] == large[2:]


def _merge_after(softmax: ir.Node, interpreter: Interpreter) -> tuple[ir.Node, ir.Node] | None:
    """The Reshape that merges again, and the product with values."""
    value = softmax.outputs[0]
    for _ in range(4):
        users = [u.node for u in value.uses() if u.node.op_type != "Shape"]
        if len(users) != 1 or value.is_graph_output():
            return None
        node = users[0]
        if node.op_type == "Reshape":
            if not _splits(node.outputs[0], value, interpreter):
                return None
            after = [u.node for u in node.outputs[0].uses() if u.node.op_type != "Shape"]
            if len(after) != 1 or after[0].op_type != "MatMul":
                return None
            return (node, after[0]) if after[0].inputs[0] is node.outputs[0] else None
        if node.op_type not in ("Cast", "Identity", "Dropout"):
            return None
        value = node.outputs[0]
    return None


class _Rewriter:
    """Builds the split form of values."""

    def __init__(self, interpreter: Interpreter, heads: int) -> None:
        self._interpreter = interpreter
        self._tape = ir.tape.Tape()
        self._heads = heads

    @property
    def nodes(self) -> list[ir.Node]:
        return list(self._tape.nodes)

    def scores(self, value: ir.Value) -> ir.Value | None:
        """``value`` of three axes as four, split at its matrix product; None if that fails."""
        node = value.producer()
        if node is None:
            return None
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type == "MatMul":
            if any(self._rank(v) != 3 for v in inputs):
                return None
            parts: list[ir.Value | None] = [self.split(v) for v in inputs]
        elif node.op_type in _ELEMENTWISE:
            parts = []
            for v in inputs:
                rank = self._rank(v)
                if rank is None or rank > 3:
                    return None
                if rank == 3 and carries_scores(v, _RESHAPED):
                    parts.append(self.scores(v))
                elif rank == 3 and self._interpreter.tensor(v).shape[0] != ONE:
                    parts.append(self.split(v))
                else:
                    parts.append(v)
        else:
            return None
        if any(part is None for part in parts):
            return None
        return self._op(node.op_type, parts, value.dtype, dict(node.attributes))

    def repeat(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """The operator of ``node`` on another first input; a softmax over the last axis."""
        attributes: dict[str, Any] = dict(node.attributes)
        if node.op_type == "Softmax":
            attributes = {"axis": -1}
        return self._op(node.op_type, [value, *node.inputs[1:]], node.outputs[0].dtype, attributes)

    def split(self, value: ir.Value) -> ir.Value:
        """``[batch * heads, a, b]`` to ``[batch, heads, a, b]``; before a transposition if any."""
        node = value.producer()
        if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
            perm = node.attributes.get("perm")
            if perm is not None and tuple(perm.as_ints()) == (0, 2, 1):
                moved = self.split(node.inputs[0])
                return self._op("Transpose", [moved], value.dtype, {"perm": [0, 1, 3, 2]})
        sizes = self._op("Shape", [value], ir.DataType.INT64, {"start": 1, "end": 3})
        shape = self._op(
            "Concat", [self._ints([-1, self._heads]), sizes], ir.DataType.INT64, {"axis": 0}
        )
        return self._op("Reshape", [value, shape], value.dtype)

    def merge(self, value: ir.Value) -> ir.Value:
        """The reverse."""
        sizes = self._op("Shape", [value], ir.DataType.INT64, {"start": 2, "end": 4})
        shape = self._op("Concat", [self._ints([-1]), sizes], ir.DataType.INT64, {"axis": 0})
        return self._op("Reshape", [value, shape], value.dtype)

    def product(self, weights: ir.Value, values: ir.Value) -> ir.Value:
        return self._op("MatMul", [weights, self.split(values)], values.dtype)

    def _rank(self, value: ir.Value) -> int | None:
        try:
            return len(self._interpreter.tensor(value).shape)
        except OpaqueError:
            return None

    def _ints(self, numbers: list[int]) -> ir.Value:
        tensor = ir.tensor(numbers, dtype=ir.DataType.INT64)
        output = ir.Value(
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([len(numbers)]),
            const_value=tensor,
        )
        return self._tape.op("Constant", [], {"value": tensor}, output=output)

    def _op(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        dtype: ir.DataType | None,
        attributes: dict[str, Any] | None = None,
    ) -> ir.Value:
        output = ir.Value(type=None if dtype is None else ir.TensorType(dtype))
        return self._tape.op(op_type, inputs, attributes or {}, output=output)


def _finish(
    graph: ir.Graph,
    split: ir.Node,
    merge: tuple[ir.Node, ir.Node],
    scores: ir.Value,
    rewriter: _Rewriter,
) -> None:
    merging, product = merge
    weights, values = merging.inputs[0], product.inputs[1]
    assert weights is not None and values is not None
    before = len(rewriter.nodes)
    output = rewriter.merge(rewriter.product(weights, values))
    nodes = rewriter.nodes
    graph.insert_before(split, nodes[:before])
    graph.insert_before(product, nodes[before:])
    scores.name, split.outputs[0].name = split.outputs[0].name, None
    old, split_output = product.outputs[0], split.outputs[0]
    output.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(split_output, scores)
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    graph.remove([product, split], safe=True)
    if not merging.outputs[0].uses():
        graph.remove(merging, safe=True)
