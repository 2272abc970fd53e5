"""Softmax that is spelled out, ``exp(x) / sum(exp(x))``, as the operator."""

from __future__ import annotations

import onnx_ir as ir

from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.facts import reduces_last_axis
from subquad.passes.recognise.symbolic import Interpreter


def fold_softmax(model: ir.Model, interpreter: Interpreter) -> None:
    """Write ``Softmax`` where a quotient is one over the last axis; modifies ``model``.

    Whatever was subtracted from ``x`` first stays: the same for all keys, it changes nothing.
    """
    for node in list(model.graph):
        if node.op_type != "Div" or node.domain not in ("", "ai.onnx"):
            continue
        powers, total = node.inputs
        exp = None if powers is None else powers.producer()
        reduction = None if total is None else total.producer()
        if powers is None or exp is None or exp.op_type != "Exp" or reduction is None:
            continue
        if reduction.op_type != "ReduceSum" or reduction.inputs[0] is not powers:
            continue
        try:
            rank = len(interpreter.tensor(powers).shape)
        except OpaqueError:
            continue
        if not reduces_last_axis(reduction, rank):
            continue
        old = node.outputs[0]
        output = ir.Value(type=old.type, shape=old.shape)
        softmax = ir.node("Softmax", [exp.inputs[0]], {"axis": -1}, outputs=[output])
        model.graph.insert_before(node, softmax)
        output.name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        for unused in (reduction, exp):
            if not unused.outputs[0].uses() and not unused.outputs[0].is_graph_output():
                model.graph.remove(unused, safe=True)
