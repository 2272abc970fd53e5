"""The few simplifications a fresh trace needs; attention and masks keep their spelling.

1. A transposed weight becomes a lazily transposed initializer, unless the weight is also used
   untransposed (tied embeddings): then the ``Transpose`` node stays and the file holds one copy.
   ONNX Runtime folds that node when it creates the session.
2. Small constant expressions are folded; constants become initializers.
3. Masks of ``Attention`` nodes with one row for all queries get a row for each: ONNX Runtime does
   not broadcast that axis, though the operator does.
4. Equal nodes are merged, dead ones removed.

Nothing is fused, inlined or rewritten: the recogniser wants the graph as it was traced. (The
optimiser's rewrite rules also cost more time than the export itself.)
"""

from __future__ import annotations

import math

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer

from subquad.converter.weights import transposed

FOLD_LIMIT = 8192
"""Largest tensor, in elements, that folding reads or creates."""

_SMALL = 1024  # elements; equal constants below this become one, larger ones are not read

_GENERATORS = frozenset({"ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile"})


def simplify(model: ir.Model) -> None:
    """Run all of the above, in place."""
    fold_weight_transposes(model.graph)
    widen_masks(model.graph)
    optimizer.fold_constants(
        model,
        onnx_shape_inference=False,
        input_size_limit=FOLD_LIMIT,
        output_size_limit=FOLD_LIMIT,
        should_fold=_should_fold,
    )
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(size_limit=_SMALL),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    register_dangling_constants(model)


def widen_masks(graph: ir.Graph) -> None:
    """Rule 3."""
    for node in tuple(graph):
        if node.op_type != "Attention" or node.domain != "" or len(node.inputs) < 4:
            continue
        query, mask = node.inputs[0], node.inputs[3]
        if query is None or query.shape is None or mask is None or mask.shape is None:
            continue
        axis = len(query.shape) - 2  # [B, H, N, D] or [B, N, H * D]
        if len(mask.shape) < 2 or mask.shape[-2] != 1 or query.shape[axis] == 1:
            continue
        one = ir.node("Constant", [], attributes={"value_ints": [1]})
        length = ir.node("Shape", [query], attributes={"start": axis, "end": axis + 1})
        target = ir.node("Concat", [length.outputs[0], one.outputs[0]], attributes={"axis": 0})
        wide = ir.node("Expand", [mask, target.outputs[0]])
        (value,) = wide.outputs
        value.type = mask.type
        dims = list(mask.shape)
        dims[-2] = query.shape[axis]
        value.shape = ir.Shape(dims)
        graph.insert_before(node, [one, length, target, wide])
        node.replace_input_with(3, value)


def fold_weight_transposes(graph: ir.Graph) -> None:
    """Rule 1."""
    for node in tuple(graph):
        if node.op_type != "Transpose" or node.domain != "":
            continue
        weight = node.inputs[0]
        if weight is None or not weight.is_initializer() or weight.is_graph_input():
            continue
        tensor = weight.const_value
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        if not all(user.op_type == "Transpose" for user, _ in weight.uses()):
            continue
        if node.outputs[0].is_graph_output():
            continue
        permutation = node.attributes.get_ints("perm") or tuple(reversed(range(len(tensor.shape))))
        name = f"{weight.name}.transposed"
        while name in graph.initializers and graph.initializers[name] is not None:
            name += "_"
        derived = transposed(tensor, permutation, name)
        value = ir.Value(
            name=name,
            shape=ir.Shape(derived.shape.numpy()),
            type=ir.TensorType(derived.dtype),
            const_value=derived,
        )
        graph.register_initializer(value)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)
        if not weight.uses():
            graph.initializers.pop(weight.name or "")


def register_dangling_constants(model: ir.Model) -> None:
    """The optimiser may leave constants that no graph owns; register them."""
    for node in model.graph.all_nodes():
        for value in node.inputs:
            if (
                value is not None
                and value.producer() is None
                and value.const_value is not None
                and not value.is_initializer()
                and not value.is_graph_input()
            ):
                model.graph.register_initializer(value)


def _should_fold(node: ir.Node) -> bool | None:
    """None = the optimiser's default; False for results that would be large.

    The default evaluates first and measures afterwards, which a hostile shape would exploit.
    """
    if node.domain != "":
        return None
    if node.op_type == "Transpose":
        tensor = node.inputs[0].const_value if node.inputs and node.inputs[0] else None
        return None if tensor is None or tensor.size <= FOLD_LIMIT else False
    if node.op_type not in _GENERATORS:
        return None
    return None if _result_size(node) <= FOLD_LIMIT else False


def _result_size(node: ir.Node) -> float:
    """Number of elements a generator node creates; infinity where not known."""
    values: list[list[float]] = []
    for value in node.inputs:
        tensor = value.const_value if value is not None else None
        if tensor is None or tensor.size > 64 or tensor.dtype == ir.DataType.STRING:
            values.append([])
        else:
            values.append([float(item) for item in tensor.numpy().reshape(-1)])
    if node.op_type == "ConstantOfShape" and len(values) == 1:
        return math.prod(abs(item) for item in values[0])
    if node.op_type == "Range" and len(values) == 3 and all(values) and values[2][0] != 0:
        return abs((values[1][0] - values[0][0]) / values[2][0])
    if node.op_type in {"Expand", "Tile"} and len(values) == 2:
        tensor = node.inputs[0].const_value if node.inputs[0] is not None else None
        if tensor is not None:
            return tensor.size * math.prod(max(1.0, abs(item)) for item in values[1])
    return math.inf
