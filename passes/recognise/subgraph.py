"""Cut a piece out of a graph and run it, to check claims against what the graph computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from subquad.passes.recognise.expressions import OpaqueError

# A piece with more constants than this is not a mask or an attention core.
_MAX_CONSTANT_BYTES = 256 << 20


def reached_inputs(outputs: Sequence[ir.Value], cut: Sequence[ir.Value]) -> list[ir.Value]:
    """Graph inputs from which ``outputs`` are computed without passing through ``cut``."""
    found: dict[ir.Value, None] = {}
    seen, stack = set(cut), list(outputs)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is not None:
            stack.extend(v for v in node.inputs if v is not None)
        elif value.is_graph_input():
            found[value] = None
    return list(found)


def nodes_between(outputs: Sequence[ir.Value], cut: Sequence[ir.Value]) -> list[ir.Node]:
    """Nodes that compute ``outputs`` from ``cut`` and leaves."""
    seen_values, seen, stack = set(cut), {}, list(outputs)
    while stack:
        value = stack.pop()
        if value in seen_values:
            continue
        seen_values.add(value)
        node = value.producer()
        if node is not None and node not in seen:
            seen[node] = None
            stack.extend(v for v in node.inputs if v is not None)
    return list(seen)


class Piece:
    """A runnable copy of the nodes that compute ``outputs`` from ``inputs``.

    Args:
        source: model that holds the nodes (for opset imports and functions).
        inputs: values fed from outside; must cut every path to other computed values, but may
            be graph inputs.
        outputs: values to read.
    """

    def __init__(
        self, source: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
    ) -> None:
        graph = ir.convenience.extract(source.graph, inputs=inputs, outputs=outputs)
        total = 0
        for value in graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            total += tensor.nbytes
            if total > _MAX_CONSTANT_BYTES:
                raise OpaqueError(
                    f"the subgraph of {outputs[0].name!r} holds more than "
                    f"{_MAX_CONSTANT_BYTES >> 20} MiB of constants"
                )
            value.const_value = ir.tensor(tensor.numpy(), name=value.name)
        model = ir.Model(graph, ir_version=10, functions=list(source.functions.values()))
        model.graph.opset_imports.update(source.opset_imports)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        # Each node as written: an optimised reference would check our claim against a rewrite.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._names = [value.name for value in outputs]
        self._session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {value.name for value in self._session.get_inputs()}

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        """Run on named arrays; extra names are ignored."""
        used = {name: array for name, array in feeds.items() if name in self._inputs}
        results: list[NDArray[np.generic]] = self._session.run(self._names, used)
        return results
