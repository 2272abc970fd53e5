"""Cut a piece out of a graph and run it, to check claims against what the graph computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from subquad.passes.recognise.affine import OpaqueError

# Checked while the nodes are gathered: a piece with more is not a mask or an attention core.
_MAX_NODES = 600
_MAX_CONSTANT_BYTES = 256 << 20

ORT_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


@dataclass(frozen=True)
class Region:
    """The part of a graph that computes some values.

    Attributes:
        nodes: in no particular order.
        inputs: graph inputs it reads.
        measured: computed values of which it reads the shape only; they are fed, not computed.
    """

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    measured: tuple[ir.Value, ...]


def region_between(outputs: Sequence[ir.Value], cut: Sequence[ir.Value]) -> Region:
    """What computes ``outputs`` from ``cut``, graph inputs and constants.

    Raises:
        OpaqueError: that is most of the model.
    """
    nodes: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    measured: dict[ir.Value, None] = {}
    seen, stack = set(cut), list(outputs)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_input():
            inputs[value] = None
            continue
        node = value.producer()
        if node is None or node in nodes:
            continue
        nodes[node] = None
        if len(nodes) > _MAX_NODES:
            raise OpaqueError(
                f"the subgraph of {outputs[0].name!r} has more than {_MAX_NODES} nodes: "
                "it depends on most of the model"
            )
        sources = [v for v in node.inputs if v is not None]
        if node.op_type in ("Shape", "Size"):
            measured.update(dict.fromkeys(v for v in sources if _is_computed(v)))
        else:
            stack.extend(sources)
        stack.extend(v for v in _captured(node))
        if node.op_type in ("Shape", "Size"):
            stack.extend(v for v in sources if not _is_computed(v))
    return Region(tuple(nodes), tuple(inputs), tuple(v for v in measured if v not in seen))


def _is_computed(value: ir.Value) -> bool:
    return value.producer() is not None and value.const_value is None


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Values of the graph that the subgraphs of a node read."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                yield from (v for v in inner.inputs if v is not None and v.graph is node.graph)


def _brief(error: Exception) -> str:
    """What went wrong, without where in ONNX Runtime's sources."""
    text = str(error).strip().split("Status Message: ")[-1]
    return text.split(" was false. ")[-1].splitlines()[0][:200]


class Piece:
    """A runnable copy of the nodes that compute ``outputs`` from ``inputs``.

    Args:
        source: model that holds the nodes (for opset imports and functions).
        inputs: values fed from outside; must cut every path to other computed values, but may
            be graph inputs.
        outputs: values to read.

    Raises:
        OpaqueError: ONNX Runtime cannot run it, or it holds the weights of the model.
    """

    def __init__(
        self, source: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
    ) -> None:
        for value in inputs:
            if value.dtype is None:
                raise OpaqueError(f"value {value.name!r} has no known type: infer shapes first")
        graph = ir.convenience.extract(source.graph, inputs=inputs, outputs=outputs)
        for value in inputs:
            graph.initializers.pop(value.name or "", None)  # a default: it is fed instead
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
        self._outputs = list(outputs)
        try:
            self._session = onnxruntime.InferenceSession(
                ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except ORT_ERRORS as error:
            raise OpaqueError(
                f"ONNX Runtime cannot run the subgraph alone: {_brief(error)}"
            ) from error
        self._inputs = {value.name for value in self._session.get_inputs()}

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run on named arrays; extra names are ignored.

        Raises:
            OpaqueError: ONNX Runtime fails on them.
        """
        used = {name: array for name, array in feeds.items() if name in self._inputs}
        try:
            results: list[NDArray[Any]] = self._session.run(
                [value.name for value in self._outputs], used
            )
        except ORT_ERRORS as error:
            raise OpaqueError(f"ONNX Runtime failed on the subgraph: {_brief(error)}") from error
        return results
