"""Name linear attention that is written as a recurrence: a Scan or Loop that adds up ``k v^T``.

    S_t = decay * S_(t-1) + k_t v_t^T        o_t = q_t S_t

Recurrent cells (``c' = f * c + i * g``) multiply element by element; here the product is an outer
one, and the state meets the query in a product that sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from subquad.passes.recognise.other_forms import computed_from_inputs

_LOOPS = ("Scan", "Loop")
_MOVES = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
_MAX_STEPS = 8


def recurrent_attention(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    """Loops whose body is linear attention, and why they are left alone."""
    for node in graph:
        body = node.attributes.get("body")
        if node.op_type not in _LOOPS or node.domain not in ("", "ai.onnx") or body is None:
            continue
        if _adds_outer_products(body.as_graph()):
            yield (
                node,
                f"linear attention as a recurrence: {node.op_type} adds up products of keys and "
                "values, one token after the other. Recurrences are not raised: export it as "
                "products of whole sequences, or as the operator LinearAttention",
            )


def _adds_outer_products(body: ir.Graph) -> bool:
    computed = computed_from_inputs(body)
    states = set(body.inputs)
    for node in body:
        if node.op_type != "Add" or node.domain not in ("", "ai.onnx"):
            continue
        a, b = node.inputs
        if a is None or b is None or not _leads_to_output(node.outputs[0]):
            continue
        for old, new in ((a, b), (b, a)):
            updates = _decayed(old, states) and _is_outer_product(new, computed)
            if updates and (_is_contracted(node.outputs[0]) or _is_contracted(old)):
                return True
    return False


def _source(value: ir.Value) -> ir.Value:
    for _ in range(_MAX_STEPS):
        node = value.producer()
        if node is None or node.op_type not in _MOVES or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _leads_to_output(value: ir.Value) -> bool:
    if value.is_graph_output():
        return True
    return any(
        u.node.op_type in _MOVES and u.node.outputs[0].is_graph_output() for u in value.uses()
    )


def _decayed(value: ir.Value, states: set[ir.Value]) -> bool:
    """A state of the loop, perhaps times something."""
    node = value.producer()
    if node is not None and node.op_type == "Mul":
        return any(v is not None and _source(v) in states for v in node.inputs)
    return _source(value) in states


def _is_outer_product(value: ir.Value, computed: set[ir.Value]) -> bool:
    node = value.producer()
    if node is None or not all(v in computed for v in node.inputs):
        return False
    if node.op_type in ("MatMul", "Einsum"):
        return len(node.inputs) == 2
    if node.op_type != "Mul":
        return False
    axes = []
    for operand in node.inputs:
        producer = None if operand is None else operand.producer()
        if producer is None or producer.op_type != "Unsqueeze" or producer.inputs[1] is None:
            return False
        tensor = ir.convenience.get_const_tensor(producer.inputs[1])
        axes.append(None if tensor is None else tuple(tensor.numpy().reshape(-1)))
    return axes[0] != axes[1]


def _is_contracted(value: ir.Value) -> bool:
    """Whether it is multiplied by something and summed."""
    for use in value.uses():
        node = use.node
        if node.op_type in ("MatMul", "Einsum"):
            return True
        if node.op_type == "Mul":
            summed = any(u.node.op_type == "ReduceSum" for u in node.outputs[0].uses())
            if summed:
                return True
    return False
