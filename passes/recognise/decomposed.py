"""Read attention that is spelled out: softmax between two matrix products."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import onnx_ir as ir

from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.candidates import (
    Candidate,
    checked_sizes,
    int_attribute,
    node_input,
)
from subquad.passes.recognise.facts import Facts, reduces_last_axis
from subquad.passes.recognise.guards import after_guard, leads_only_to_guards
from subquad.passes.recognise.layout import as_key, as_query, as_value
from subquad.passes.recognise.mask import HIDDEN_BELOW, Mask
from subquad.passes.recognise.other_forms import quantised_reason
from subquad.passes.recognise.scores import carries_scores
from subquad.passes.recognise.sinks import Sinks, read_sinks, without_sinks
from subquad.passes.recognise.symbolic import Interpreter

# Operators that may stand between the score product and the softmax.
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def read_softmax(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """The attention around a Softmax.

    Raises:
        OpaqueError: it is none, or its parts cannot be told.
    """
    logits = node_input(node, 0)
    rank = len(interpreter.tensor(logits).shape)
    _check_used(node.outputs[0])
    axis = int_attribute(node, "axis", -1)
    if axis not in (-1, rank - 1):
        raise OpaqueError(f"softmax over axis {axis}, not over keys")
    unshifted, largest = _unshifted(logits, interpreter)
    sinks, scores = read_sinks(unshifted, carries_scores, interpreter)
    masks, value = peel_masks(scores, interpreter)
    facts = Facts(interpreter, masks)
    facts.scores(logits)
    facts.scores(scores)
    output = _output_product(node, facts, sinks, interpreter)
    candidate = read_products(node, value, output, interpreter, largest)
    return replace(candidate, masks=tuple(masks), mask_axes=rank, sinks=sinks)


def read_products(
    anchor: ir.Node,
    value: ir.Value,
    output: ir.Node,
    interpreter: Interpreter,
    largest: ir.Node | None = None,
) -> Candidate:
    """What the two products of an attention multiply; masks and sinks are not read.

    Args:
        anchor: makes weights of scores.
        value: the scores before masks and biases.
        output: the product of weights and values.
        largest: finds the largest of the scores beside their other use.

    Raises:
        OpaqueError: ``value`` is no scaled or capped product of queries and keys.
    """
    scale, value = _peel_scale(value, interpreter)
    softcap = Fraction(0)
    tanh = value.producer()
    if tanh is not None and tanh.op_type == "Tanh":
        # c * tanh(f * x) is the softcap c of the scores (f * c) * x.
        inner, value = _peel_scale(node_input(tanh, 0), interpreter)
        softcap, scale = abs(scale), scale * inner
    _require_only_use(value, anchor, largest)
    product = value.producer()
    if product is None or product.op_type != "MatMul":
        quantised = quantised_reason(value)
        if quantised:
            raise OpaqueError(quantised)
        what = "a graph input or constant" if product is None else f"operator {product.op_type}"
        raise OpaqueError(f"expected query x key before scale, softcap and masks, found {what}")
    query_scale, query = _peel_scale(node_input(product, 0), interpreter)
    key_scale, key = _peel_scale(node_input(product, 1), interpreter)
    query_operand = as_query(query, interpreter)
    key_operand = as_key(key, interpreter)
    value_operand = as_value(node_input(output, 1), interpreter)
    if key_operand.shape(interpreter)[1] != value_operand.shape(interpreter)[1]:
        # Only one of them could be read before its repetition: neither is.
        key_operand = as_key(key, interpreter, grouped=False)
        value_operand = as_value(node_input(output, 1), interpreter, grouped=False)
    return Candidate(
        form="decomposed",
        anchor=anchor,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=(),
        mask_axes=4,
        scale=float(scale * query_scale * key_scale),
        softcap=float(softcap),
        is_causal=False,
        sizes=checked_sizes(query_operand, key_operand, value_operand, interpreter),
        output=output.outputs[0],
    )


def _unshifted(logits: ir.Value, interpreter: Interpreter) -> tuple[ir.Value, ir.Node | None]:
    """The logits before their largest is subtracted, which softmax does not see; and what found
    the largest."""
    value = _through_casts(logits, interpreter)
    node = value.producer()
    if node is None or node.op_type != "Sub":
        return value, None
    source = node_input(node, 0)
    largest = _through_casts(node_input(node, 1), interpreter).producer()
    if largest is None or largest.op_type != "ReduceMax" or largest.inputs[0] is not source:
        return value, None
    if not reduces_last_axis(largest, len(interpreter.tensor(source).shape)):
        return value, None
    return _through_casts(source, interpreter), largest


def _require_only_use(value: ir.Value, softmax: ir.Node, largest: ir.Node | None) -> None:
    # Its shape may be asked for: nothing of the value itself is. Guards and shifts compare it.
    users = {use.node for use in value.uses() if use.node.op_type != "Shape"} - {largest}
    if len(users) > 1:
        users = {u for u in users if not leads_only_to_guards(u, softmax)}
    if len(users) != 1 or value.is_graph_output():
        raise OpaqueError(f"the intermediate value {value.name!r} is used elsewhere too")


def _through_casts(value: ir.Value, interpreter: Interpreter) -> ir.Value:
    """Skip casts that keep float32, and those to a wider type and back."""
    while True:
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "Identity"):
            return value
        source = node_input(node, 0)
        if interpreter.tensor(source).dtype not in _FLOATS:
            return value
        value = source


def peel_masks(value: ir.Value, interpreter: Interpreter) -> tuple[list[Mask], ir.Value]:
    """Masks added to, or selecting, the scores; nearest the softmax first."""
    masks: list[Mask] = []
    while True:
        value = _through_casts(value, interpreter)
        node = value.producer()
        if node is None or node.op_type not in ("Add", "Where"):
            return masks, value
        if node.op_type == "Add":
            left, right = node_input(node, 0), node_input(node, 1)
            carrying = [carries_scores(left), carries_scores(right)]
            if carrying == [True, True]:
                raise OpaqueError("two computed terms are added: a score bias, not a mask")
            if carrying == [False, False]:
                quantised = quantised_reason(value)
                if quantised:
                    raise OpaqueError(quantised)
                raise OpaqueError("no matrix product before the softmax: not an attention")
            value, mask = (left, right) if carrying[0] else (right, left)
            masks.append((mask, "additive"))
            continue
        condition, chosen, other = (node_input(node, i) for i in range(3))
        value, fill = (chosen, other) if carries_scores(chosen) else (other, chosen)
        filled = uniform(fill, interpreter)
        if filled is None or not filled <= HIDDEN_BELOW:
            what = "values that vary" if filled is None else f"{filled:g}"
            raise OpaqueError(f"masked scores are set to {what}, not to a large negative value")
        masks.append((condition, "visible" if value is chosen else "hidden"))


def _peel_scale(value: ir.Value, interpreter: Interpreter) -> tuple[Fraction, ir.Value]:
    """Factors and divisors that are the same everywhere -> their exact product and the rest."""
    scale = Fraction(1)
    while True:
        value = _through_casts(value, interpreter)
        node = value.producer()
        if node is None or node.op_type not in ("Mul", "Div"):
            return scale, value
        left, right = node_input(node, 0), node_input(node, 1)
        factor = uniform_factor(right, interpreter)
        if factor is not None:
            scale, value = (scale / factor if node.op_type == "Div" else scale * factor), left
            continue
        factor = uniform_factor(left, interpreter) if node.op_type == "Mul" else None
        if factor is None:
            return scale, value
        scale, value = scale * factor, right


def uniform_factor(value: ir.Value, interpreter: Interpreter) -> Fraction | None:
    """A finite constant other than zero."""
    number = uniform(value, interpreter)
    if number is None or number == 0 or not math.isfinite(number):
        return None
    return Fraction(number)


def _check_used(weights: ir.Value) -> None:
    if weights.is_graph_output() or not weights.uses():
        raise OpaqueError("the softmax is an output of the graph, or unused")


def _output_product(
    softmax: ir.Node, facts: Facts, sinks: Sinks | None, interpreter: Interpreter
) -> ir.Node:
    """The product of attention weights and values.

    Only casts, guards of rows that see no key and, with sinks, the dropping of their column may
    stand between.
    """
    weights = softmax.outputs[0]
    facts.weights(weights)
    dropped = sinks is None
    while True:
        _check_used(weights)
        # Its shape may be asked for: nothing of the weights themselves is.
        users = list(dict.fromkeys(u.node for u in weights.uses() if u.node.op_type != "Shape"))
        guarded = after_guard(weights, users, facts, interpreter) if dropped else None
        if guarded is not None:
            weights = guarded
            continue
        if len(users) != 1:
            raise OpaqueError("the softmax is used in several places: its weights are needed")
        node = users[0]
        if node.op_type in ("Cast", "Identity", "Dropout"):
            weights = node.outputs[0]
            facts.weights(weights)
            continue
        if sinks is not None and not dropped:
            kept = without_sinks(weights, node, sinks, interpreter)
            if kept is None:
                raise OpaqueError(
                    f"a column is added to the scores and not dropped after the softmax, "
                    f"which goes into {node.op_type}"
                )
            weights, dropped = kept, True
            facts.weights(weights)
            continue
        if node.op_type == "MatMul" and node.inputs[0] is weights:
            if node.inputs[1] is weights or node.graph is not softmax.graph:
                raise OpaqueError("the softmax is multiplied by itself, or inside a subgraph")
            return node
        if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
            raise OpaqueError(
                f"the weights are quantised ({node.op_type}) before they meet the values: integer "
                "attention is kept"
            )
        raise OpaqueError(
            f"the softmax goes into {node.op_type}, not into a product with values: no attention"
        )
