"""Read sigmoid attention: sigmoids of scores in the place of a softmax.

    sigmoid(scale * q k^T + bias + mask) v        (sigmoid(scale * q k^T + bias) * visible) v

Ramapuram et al., 2024, https://arxiv.org/abs/2409.04431. Each weight stands by itself, so what
cancels in a softmax counts here: a constant added to all scores is the site's offset, one that is
computed (``-log n`` of the length at hand) a bias. A mask may also stand behind the sigmoid, where
it sets weights to zero; there it must be proved, since no bias says the same.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.candidates import Candidate, node_input
from subquad.passes.recognise.decomposed import peel_masks, read_products
from subquad.passes.recognise.mask import Mask
from subquad.passes.recognise.scores import SCORE_OPERATORS, carries_scores
from subquad.passes.recognise.symbolic import Interpreter

_STANDARD = ("", "ai.onnx")
_MAX_STEPS = 16


def read_sigmoid(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """The attention around a Sigmoid.

    Raises:
        OpaqueError: it is none, or its parts cannot be told.
    """
    scores = node_input(node, 0)
    masks, value = peel_masks(scores, interpreter)
    behind, product = _to_values(node, interpreter)
    candidate = read_products(node, value, product, interpreter)
    return replace(
        candidate,
        masks=(*masks, *behind),
        mask_axes=len(interpreter.tensor(scores).shape),
        score_function="sigmoid",
    )


def without_offset(candidate: Candidate, interpreter: Interpreter) -> Candidate:
    """Biases that are one and the same number become the offset of a sigmoid's scores.

    A softmax does not see such a number: there it stays a bias that nothing reads.
    """
    if candidate.score_function != "sigmoid":
        return candidate
    rest, offset = [], 0.0
    for bias in candidate.biases:
        number = uniform(bias.value, interpreter) if bias.kind == "additive" else None
        if number is None:
            rest.append(bias)
        else:
            offset += number
    return replace(candidate, biases=tuple(rest), score_offset=offset)


def _to_values(sigmoid: ir.Node, interpreter: Interpreter) -> tuple[list[Mask], ir.Node]:
    """Masks on the weights, and the product of weights and values."""
    weights, masks = sigmoid.outputs[0], list[Mask]()
    while True:
        if weights.is_graph_output():
            raise OpaqueError("the attention weights are an output of the graph")
        users = list(dict.fromkeys(u.node for u in weights.uses() if u.node.op_type != "Shape"))
        if len(users) != 1:
            raise OpaqueError("the attention weights are used in several places")
        node = users[0]
        if node.graph is not sigmoid.graph:
            raise OpaqueError("the attention weights go into a subgraph (If, Loop or Scan)")
        others = [v for v in node.inputs if v is not weights and v is not None]
        if node.op_type == "Mul" and len(others) == 1:
            masks.append((others[0], "factor"))
        elif node.op_type == "Where" and len(others) == 2 and node.inputs[0] is others[0]:
            fill = uniform(others[1], interpreter)
            if fill != 0.0:
                what = "values that vary" if fill is None else f"{fill:g}"
                raise OpaqueError(f"some weights are set to {what}, not to zero")
            masks.append((others[0], "visible" if node.inputs[1] is weights else "hidden"))
        elif node.op_type == "MatMul" and node.inputs[0] is weights and others:
            return masks, node
        elif node.op_type not in ("Cast", "Identity", "Dropout"):
            raise OpaqueError(
                f"the sigmoids of scores go into {node.op_type} before they meet the values: no "
                "operator of ours does that"
            )
        weights = node.outputs[0]


# --- one spelling ----------------------------------------------------------------------------


def fold_sigmoid(model: ir.Model) -> None:
    """Write ``Sigmoid`` for ``1 / (1 + exp(-x))``, and sums for differences before sigmoids of
    scores; modifies ``model``."""
    for node in list(model.graph):
        if node.domain not in _STANDARD:
            continue
        if node.op_type in ("Div", "Reciprocal"):
            _fold_quotient(model.graph, node)
    for node in list(model.graph):
        if node.op_type == "Sigmoid" and node.domain in _STANDARD:
            _add_instead(model.graph, node)


def _fold_quotient(graph: ir.Graph, node: ir.Node) -> None:
    if node.op_type == "Div" and not _is_one(node.inputs[0]):
        return
    below = _producer(node.inputs[-1], "Add")
    if below is None:
        return
    powers = [v for v in below.inputs if not _is_one(v)]
    exp = _producer(powers[0], "Exp") if len(powers) == 1 else None
    negated = None if exp is None else _producer(exp.inputs[0], "Neg")
    if negated is None or not carries_scores(negated.outputs[0], ("Neg", "Sub")):
        return
    old = node.outputs[0]
    output = ir.Value(type=old.type, shape=old.shape)
    sigmoid = ir.node("Sigmoid", [negated.inputs[0]], outputs=[output], name=node.name)
    graph.insert_before(node, sigmoid)
    output.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    unused: ir.Node | None = node
    for step in (node, below, exp, negated):
        unused = step
        if unused is None or unused.outputs[0].uses() or unused.outputs[0].is_graph_output():
            break
        graph.remove(unused, safe=True)


def _add_instead(graph: ir.Graph, sigmoid: ir.Node) -> None:
    """``scores - x`` is ``scores + (-x)``, to the last bit."""
    value = sigmoid.inputs[0]
    for _ in range(_MAX_STEPS):
        node = None if value is None else value.producer()
        if node is None or node.op_type not in (*SCORE_OPERATORS, "Sub"):
            return
        carrying = [v for v in node.inputs if v is not None and carries_scores(v, ("Sub",))]
        if len(carrying) != 1:
            return
        value = carrying[0]
        if node.op_type == "Sub" and node.inputs[0] is value:
            value = _as_sum(graph, node)


def _as_sum(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Replaces a difference; returns the minuend."""
    scores, subtracted = node.inputs
    assert subtracted is not None
    old = node.outputs[0]
    negative = ir.Value(type=subtracted.type, shape=subtracted.shape)
    output = ir.Value(type=old.type, shape=old.shape)
    nodes = [
        ir.node("Neg", [subtracted], outputs=[negative]),
        ir.node("Add", [scores, negative], outputs=[output], name=node.name),
    ]
    graph.insert_before(node, nodes)
    output.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return scores


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _is_one(value: ir.Value | None) -> bool:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(())) == 1.0
