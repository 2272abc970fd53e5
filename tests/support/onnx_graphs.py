"""Small ONNX graphs written in Python, run in ONNX Runtime: what tests of passes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str]
Feeds = Mapping[str, NDArray[Any]]

FLOAT, BOOL, INT64, INT32 = (
    TensorProto.FLOAT,
    TensorProto.BOOL,
    TensorProto.INT64,
    TensorProto.INT32,
)


class Graph:
    """Records nodes; arrays and Python numbers among the operands become initializers."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def input(self, name: str, dtype: int, dims: Dims) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(dims)))
        return name

    def const(self, value: Any, dtype: Any = None) -> str:
        array = np.asarray(value, dtype=dtype)
        if dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        name = f"const_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(array, name))
        return name

    def __call__(self, op: str, *operands: Any, outputs: int = 1, **attributes: Any) -> str:
        return self.multi(op, *operands, outputs=outputs, **attributes)[0]

    def multi(self, op: str, *operands: Any, outputs: int, **attributes: Any) -> list[str]:
        names = ["" if o is None else o if isinstance(o, str) else self.const(o) for o in operands]
        results = [f"{op.lower()}_{len(self._nodes)}_{i}" for i in range(outputs)]
        node = helper.make_node(op, names, results, name=f"node_{len(self._nodes)}", **attributes)
        self._nodes.append(node)
        return results

    def dim(self, value: str, axis: int) -> str:
        """One dimension as a scalar."""
        return self("Squeeze", self("Shape", value, start=axis, end=axis + 1), [0])

    def arange(self, end: str, start: Any = 0) -> str:
        first = start if isinstance(start, str) else self.const(start, np.int64)
        return self("Range", first, end, self.const(1, np.int64))

    def model(self, outputs: Sequence[str], *, opset: int = 24) -> ir.Model:
        """With types and shapes inferred."""
        infos = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(
            self._nodes, "test", self._inputs, infos, initializer=self._initializers
        )
        domains = sorted({node.domain for node in self._nodes if node.domain})
        imports = [helper.make_opsetid("", opset)]
        imports += [helper.make_opsetid(domain, 1) for domain in domains]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
        return inferred(ir.from_proto(onnx.shape_inference.infer_shapes(proto)))


def inferred(model: ir.Model) -> ir.Model:
    common_passes.ShapeInferencePass()(model)
    return model


def session(model: ir.Model, outputs: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A one-thread session of the graph as it stands, unoptimised; ``outputs`` are added."""
    proto = ir.to_proto(model)
    known = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in outputs if n not in known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_DISABLE_ALL if outputs else level.ORT_ENABLE_ALL
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class Runner:
    """A model opened once; extra inputs are ignored."""

    def __init__(self, model: ir.Model, outputs: Sequence[str] = ()) -> None:
        self._session = session(model, outputs)
        self._outputs = list(outputs) or None
        self._inputs = {value.name for value in self._session.get_inputs()}

    def __call__(self, feeds: Feeds) -> list[NDArray[Any]]:
        used = {name: array for name, array in feeds.items() if name in self._inputs}
        results: list[NDArray[Any]] = self._session.run(self._outputs, used)
        return results
