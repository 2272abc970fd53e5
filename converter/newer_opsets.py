"""Bring a graph of opset 25 to 28 down to 24, where every operator has the same meaning there.

Most operators of these opsets only accept more element types. Those that are new, or have a new
attribute that is set, are refused by name; ``LinearAttention`` and ``CausalConvWithState`` are
operators of com.microsoft as well.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from subquad.kernels.body import MICROSOFT
from subquad.runtime.errors import UnsupportedModelError

NEWEST_OPSET = 28
_AS_CONTRIBUTED = ("LinearAttention", "CausalConvWithState")
_STANDARD = ("", "ai.onnx")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def step_down(model: ir.Model, opset: int, name: str) -> None:
    """Write ``model`` at ``opset``; modifies it.

    Args:
        model: at a newer opset, up to ``NEWEST_OPSET``.
        name: of the file, for messages.

    Raises:
        UnsupportedModelError: an operator or attribute that ``opset`` has not.
    """
    source = model.opset_imports[""]
    known = onnx.defs.onnx_opset_version()
    if known < source:
        raise UnsupportedModelError(
            f"{name} is of opset {source}, and the installed onnx {onnx.__version__} knows opsets "
            f"up to {known}, so it cannot be told what its operators mean. Install a newer onnx."
        )
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    contributed = False
    for holder in holders:
        for node in holder.all_nodes():
            if node.domain not in _STANDARD:
                continue
            if node.op_type in _AS_CONTRIBUTED:
                node.domain, contributed = MICROSOFT, True
                continue
            _check_node(node, source, opset, name)
    if contributed:
        model.opset_imports.setdefault(MICROSOFT, 1)
    for holder in holders:
        if holder.opset_imports.get("", 0) > opset:
            holder.opset_imports[""] = opset
        if contributed:
            holder.opset_imports.setdefault(MICROSOFT, 1)


def _check_node(node: ir.Node, source: int, opset: int, name: str) -> None:
    schema = onnx.defs.get_schema(node.op_type, source)
    if schema.since_version <= opset:
        return
    label = f"{name}: node {node.name!r} ({node.op_type})"
    try:
        older = onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError as error:
        raise UnsupportedModelError(
            f"{label} needs opset {schema.since_version}, and has no counterpart in opset {opset}, "
            "in which models are compiled. Export again with an older opset."
        ) from error
    for key in list(node.attributes):
        if key in older.attributes:
            continue
        default = onnx.helper.get_attribute_value(schema.attributes[key].default_value)
        given = node.attributes[key].value
        if given != (default.decode() if isinstance(default, bytes) else default):
            raise UnsupportedModelError(
                f"{label} has {key}={given}, which opset {opset}, in which models are compiled, "
                "does not know. Export again with an older opset."
            )
        node.attributes.pop(key)
    value = node.inputs[0] if node.inputs else None
    modulo = node.attributes.get("fmod")
    if node.op_type == "Mod" and value is not None and value.dtype in _FLOATS:
        if modulo is None or not modulo.as_int():
            raise UnsupportedModelError(
                f"{label} is a remainder of floats with the sign of the divisor, which needs opset "
                f"{schema.since_version}. Export again with an older opset."
            )
