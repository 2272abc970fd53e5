"""One spelling per idea, before recognition: operators that change nothing are removed."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

_INT32_MAX = 2**31 - 1


class RemoveNoOpPass(ir.passes.InPlacePass):
    """Remove operators that return their input.

    1. ``Identity``, by onnx_ir's own pass.
    2. ``Slice`` of every axis from 0 to "the end" (exporters write 2**63 - 1) in steps of 1.
    3. ``Cast`` to the type the value is known to have.
    4. ``Dropout`` without training mode and without use of its mask.

    A node whose output is a graph output stays.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = bool(common_passes.IdentityEliminationPass()(model).modified)
        for node in list(model.graph):
            if node.domain not in ("", "ai.onnx") or node.outputs[0].is_graph_output():
                continue
            check = _CHECKS.get(node.op_type)
            value = node.inputs[0] if node.inputs else None
            if check is None or value is None or not check(node):
                continue
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            model.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified)


def canonicalise(model: ir.Model) -> None:
    """Bring ``model`` into the form recognition reads; modifies it.

    Types and shapes are inferred first: recognition reads integers, floats and bools differently.
    """
    common_passes.ShapeInferencePass(data_prop=True)(model)
    RemoveNoOpPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)


def _is_full_slice(node: ir.Node) -> bool:
    constants = [_constant_ints(v) for v in node.inputs[1:]]
    if len(constants) < 2 or any(c is None for c in constants):
        return False
    starts, ends = constants[0], constants[1]
    steps = constants[3] if len(constants) > 3 else []
    assert starts is not None and ends is not None and steps is not None
    return (
        all(start == 0 for start in starts)
        and all(end >= _INT32_MAX for end in ends)
        and all(step == 1 for step in steps)
    )


def _constant_ints(value: ir.Value | None) -> list[int] | None:
    """Elements of a constant, ``[]`` for an absent input, None if not constant."""
    if value is None:
        return []
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(x) for x in tensor.numpy().reshape(-1)]


def _is_same_cast(node: ir.Node) -> bool:
    value = node.inputs[0]
    return value is not None and value.dtype == node.attributes["to"].as_int()


def _is_inert_dropout(node: ir.Node) -> bool:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    mask_used = len(node.outputs) > 1 and bool(node.outputs[1].uses())
    return training is None and not mask_used


_CHECKS = {"Slice": _is_full_slice, "Cast": _is_same_cast, "Dropout": _is_inert_dropout}
