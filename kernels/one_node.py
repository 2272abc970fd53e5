"""A model of one ``ai.subquad`` node: for tests, benchmarks and kernel tuning."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from subquad.kernels.operator import DOMAIN, DOMAIN_VERSION, OPSET, OperatorVariant

IR_VERSION = 10

_INTEGER_INPUTS = {
    "key_mask": ir.DataType.BOOL,
    "query_positions": ir.DataType.INT64,
    "key_positions": ir.DataType.INT64,
}


def one_node_model(variant: OperatorVariant) -> onnx.ModelProto:
    """A model of one node of this variant, all dimensions free, its function included."""
    inputs = [_graph_input(name) if name else None for name in variant.input_names]
    node = ir.node(
        variant.op_type,
        inputs,
        domain=DOMAIN,
        overload=variant.overload,
        attributes=variant.attributes(),
        num_outputs=1,
    )
    node.outputs[0].name = "output"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["batch", "num_heads", "query_len", "value_dim"])
    graph = ir.Graph(
        [value for value in inputs if value is not None],
        node.outputs,
        nodes=[node],
        opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION},
        name="one_node",
    )
    model = ir.Model(graph, ir_version=IR_VERSION, functions=[variant.build_function()])
    return ir.to_proto(model)


def _graph_input(name: str) -> ir.Value:
    is_plane = name in _INTEGER_INPUTS
    dims = [f"{name}_{axis}" for axis in range(2 if is_plane else 4)]
    element = _INTEGER_INPUTS.get(name, ir.DataType.FLOAT)
    return ir.Value(name=name, type=ir.TensorType(element), shape=ir.Shape(dims))
