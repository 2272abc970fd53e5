"""A model of one ``ai.subquad`` node: for tests, benchmarks and kernel tuning."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from subquad.kernels.operator import DOMAIN, DOMAIN_VERSION, OPSET, OperatorVariant, TensorSpec

IR_VERSION = 10

_ELEMENTS = {"float32": "FLOAT", "bool": "BOOL", "int32": "INT32", "int64": "INT64"}


def one_node_model(variant: OperatorVariant) -> onnx.ModelProto:
    """A model of one node of this variant, all dimensions free, its function included."""
    inputs = [_graph_value(spec) if spec else None for spec in variant.inputs]
    node = ir.node(
        variant.op_type,
        inputs,
        domain=DOMAIN,
        overload=variant.overload,
        attributes=variant.attributes(),
        outputs=[_graph_value(spec) for spec in variant.outputs],
    )
    graph = ir.Graph(
        [value for value in inputs if value is not None],
        node.outputs,
        nodes=[node],
        opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION},
        name="one_node",
    )
    model = ir.Model(graph, ir_version=IR_VERSION, functions=[variant.build_function()])
    return ir.to_proto(model)


def _graph_value(spec: TensorSpec) -> ir.Value:
    """All sizes free, none tied to another: wrong ones are for the operator to find."""
    dims = [f"{spec.name}_{axis}" for axis in range(len(spec.dims))]
    element = ir.DataType[_ELEMENTS[spec.dtype]]
    return ir.Value(name=spec.name, type=ir.TensorType(element), shape=ir.Shape(dims))
