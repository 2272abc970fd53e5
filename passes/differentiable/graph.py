"""An onnx_ir model as a ``torch.nn.Module``: node by node, functions included, with gradients.

What is trained must be what ships. So the rewritten graph itself is executed, the bodies of
``ai.subquad`` included, whatever it came from; nothing is translated into another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from subquad.passes.differentiable.microsoft import MICROSOFT_OPERATORS
from subquad.passes.differentiable.operators import STANDARD_OPERATORS
from subquad.runtime.errors import UnsupportedModelError

OPERATORS: Mapping[tuple[str, str], Callable[..., Any]] = {
    **{("", name): call for name, call in STANDARD_OPERATORS.items()},
    **{("com.microsoft", name): call for name, call in MICROSOFT_OPERATORS.items()},
}
"""(domain, operator) -> its tensors in order, its attributes by name."""

_CONTROL = ("If", "Loop")

Environment = dict[ir.Value, Tensor]


class TorchGraph(torch.nn.Module):
    """Executes ``model`` in torch.

    Initializers are buffers, called as ``torch_name`` says.

    Args:
        model: not changed, and not referred to for weights after this: they are copied.

    Raises:
        UnsupportedModelError: the graph has an operator that is not known here.
    """

    def __init__(self, model: ir.Model) -> None:
        super().__init__()
        self._model = model
        _refuse_unknown(model)
        for name, value in model.graph.initializers.items():
            self.register_buffer(torch_name(name), _to_torch(value.const_value))

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run the graph.

        Args:
            inputs: by name, all of them.
            outputs: names of values anywhere in the main graph; default: the graph's outputs.
            weights: other values of some initializers, by name; gradients flow to them.
        """
        graph = self._model.graph
        given = weights or {}
        missing = set(given) - set(graph.initializers)
        if missing:
            raise KeyError(f"no initializer is called {sorted(missing)[0]!r}")
        environment: Environment = {
            value: given[name] if name in given else getattr(self, torch_name(name))
            for name, value in graph.initializers.items()
        }
        for value in graph.inputs:
            assert value.name is not None
            if value not in environment:
                environment[value] = inputs[value.name]
        wanted = [value.name or "" for value in graph.outputs] if outputs is None else list(outputs)
        found: dict[str, Tensor] = {}
        self._run(graph, environment, set(wanted), found)
        for value in (*graph.inputs, *graph.outputs):
            if value.name in wanted:
                found[value.name or ""] = environment[value]
        return {name: found[name] for name in wanted}

    def _run(
        self,
        nodes: Iterable[ir.Node],
        environment: Environment,
        keep: set[str],
        kept: dict[str, Tensor],
    ) -> None:
        last_use = _last_uses(nodes)
        for place, node in enumerate(nodes):
            results = self._node(node, environment)
            for value, tensor in zip(node.outputs, results, strict=False):
                environment[value] = tensor
                if value.name in keep:
                    kept[value.name or ""] = tensor
            for value in last_use.get(place, ()):
                environment.pop(value, None)

    def _node(self, node: ir.Node, environment: Environment) -> Sequence[Tensor]:
        given = [None if value is None else environment[value] for value in node.inputs]
        function = self._model.functions.get(node.op_identifier())
        if function is not None:
            return self._call(function, given)
        if node.op_type == "If":
            assert given[0] is not None
            branch = node.attributes["then_branch" if bool(given[0]) else "else_branch"].as_graph()
            return self._branch(branch, environment)
        if node.op_type == "Loop":
            return self._loop(node, given, environment)
        while given and given[-1] is None:
            given.pop()
        result = OPERATORS[node.domain, node.op_type](*given, **_attributes(node))
        results = result if isinstance(result, (tuple, list)) else (result,)
        for value in node.outputs[len(results) :]:
            if value.uses() or value.is_graph_output():
                raise UnsupportedModelError(
                    f"training cannot run {node.op_type} {node.name!r}: its output {value.name!r} "
                    "has no differentiable form here"
                )
        return results

    def _call(self, function: ir.Function, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
        # Our bodies have the attributes built in, so there are no references to resolve.
        environment: Environment = {
            value: tensor
            for value, tensor in zip(function.inputs, given, strict=False)
            if tensor is not None
        }
        return self._scope(function, function.outputs, environment)

    def _branch(
        self, graph: ir.Graph, environment: Environment, given: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        inner = dict(environment)  # what a branch computes stays in it
        for value in graph.initializers.values():
            inner[value] = _to_torch(value.const_value)
        inner.update(zip(graph.inputs, given, strict=True))
        return self._scope(graph, graph.outputs, inner)

    def _loop(
        self, node: ir.Node, given: Sequence[Tensor | None], environment: Environment
    ) -> Sequence[Tensor]:
        """Values carried from step to step, then what the steps give, stacked on a new axis 0."""
        body = node.attributes["body"].as_graph()
        trips, going, *start = [*given, None, None][: max(2, len(given))]
        carried = [tensor for tensor in start if tensor is not None]
        steps: list[Sequence[Tensor]] = []
        on = torch.tensor(True) if going is None else going
        while bool(on) and (trips is None or len(steps) < int(trips)):
            step = torch.tensor(len(steps))
            on, *results = self._branch(body, environment, [step, on, *carried])
            carried, stacked = results[: len(carried)], results[len(carried) :]
            steps.append(stacked)
        if not steps and len(node.outputs) > len(carried):
            raise UnsupportedModelError(
                f"training cannot run Loop {node.name!r} without a step: what its steps give has "
                "no shape then"
            )
        return [*carried, *(torch.stack(list(items)) for items in zip(*steps, strict=True))]

    def _scope(
        self, nodes: Iterable[ir.Node], outputs: Sequence[ir.Value], environment: Environment
    ) -> Sequence[Tensor]:
        for node in nodes:
            for value, tensor in zip(node.outputs, self._node(node, environment), strict=False):
                environment[value] = tensor
        return [environment[value] for value in outputs]


def torch_name(initializer: str) -> str:
    """What torch calls the buffer of ``initializer``; it allows no dots."""
    return "w/" + initializer.replace(".", "/")


def unknown_operators(model: ir.Model) -> list[str]:
    """Operators of ``model`` that cannot be executed here, ``domain::name``, sorted."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    unknown = set()
    for graph in graphs:
        for node in graph.all_nodes():
            known = (node.domain, node.op_type) in OPERATORS or node.op_type in _CONTROL
            if not known and node.op_identifier() not in model.functions:
                unknown.add(f"{node.domain or 'ai.onnx'}::{node.op_type}")
    return sorted(unknown)


def _refuse_unknown(model: ir.Model) -> None:
    unknown = unknown_operators(model)
    if unknown:
        raise UnsupportedModelError(
            f"the graph cannot be trained: {', '.join(unknown)} has no differentiable form here. "
            "Convert without distillation."
        )


def _last_uses(nodes: Iterable[ir.Node]) -> dict[int, list[ir.Value]]:
    """Values that no node after this place needs; a branch needs what its nodes need."""
    last: dict[ir.Value, int] = {}
    for place, node in enumerate(nodes):
        for inner in _with_branches(node):
            for value in inner.inputs:
                if value is not None:
                    last[value] = place
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                for value in attribute.as_graph().outputs:
                    last[value] = place
    uses: dict[int, list[ir.Value]] = {}
    for value, place in last.items():
        # Weights are kept by the module anyway, outputs are still to be read.
        if value.producer() is not None and not value.is_graph_output():
            uses.setdefault(place, []).append(value)
    return uses


def _with_branches(node: ir.Node) -> Iterable[ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def _attributes(node: ir.Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        assert not attribute.is_ref(), f"{node.op_type} refers to an attribute of its function"
        value = attribute.value
        found[name] = _to_torch(value) if attribute.type == ir.AttributeType.TENSOR else value
    return found


def _to_torch(tensor: ir.TensorProtocol | None) -> Tensor:
    assert tensor is not None
    return torch.from_numpy(np.array(tensor.numpy(), copy=True))
