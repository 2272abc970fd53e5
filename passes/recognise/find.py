"""Find everything in a model that looks like attention; each is read, or rejected with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir

from subquad.kernels.body import MICROSOFT
from subquad.kernels.operator import DOMAIN
from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.candidates import (
    Candidate,
    check_operands,
    node_label,
    read_attention,
    read_multi_head,
)
from subquad.passes.recognise.decomposed import read_softmax
from subquad.passes.recognise.linear import linear_products, read_linear_operator
from subquad.passes.recognise.other_forms import named_reason, unnormalised_attention
from subquad.passes.recognise.recurrent import recurrent_attention
from subquad.passes.recognise.sigmoid import read_sigmoid
from subquad.passes.recognise.spelled_out import needs_twin, twin_of
from subquad.passes.recognise.speller import Twin
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.twin_probe import check_twin
from subquad.runtime.errors import Rejection


def add_twins(model: ir.Model, interpreter: Interpreter) -> dict[ir.Node, Twin | OpaqueError]:
    """Put a twin before each attention operator that needs one; or why it has none."""
    twins: dict[ir.Node, Twin | OpaqueError] = {}
    opset = model.opset_imports.get("", 0)
    for node in list(model.graph):
        if not _is_anchor(node) or named_reason(node) or not needs_twin(node):
            continue
        try:
            twin = twin_of(node, interpreter, opset)
        except OpaqueError as error:
            twins[node] = error
            continue
        model.graph.insert_before(node, twin.nodes)
        try:
            check_twin(model, twin, interpreter)
            twins[node] = twin
        except OpaqueError as error:
            twins[node] = error
            model.graph.remove(twin.nodes, safe=True)
    return twins


def find_candidates(
    model: ir.Model,
    interpreter: Interpreter,
    twins: Mapping[ir.Node, Twin | OpaqueError] | None = None,
) -> list[Candidate | Rejection]:
    """Every attention operator, every ``Softmax`` and every sigmoid of scores, read or rejected, in
    order."""
    twins = twins or {}
    spelled = {node for twin in twins.values() if isinstance(twin, Twin) for node in twin.nodes}
    others = list(unnormalised_attention(model.graph))
    sigmoids = {other.sigmoid for other in others if other.sigmoid is not None}
    linear = dict(linear_products(model.graph, interpreter))
    linear |= dict(recurrent_attention(model.graph, interpreter))
    # A softmax over features, as of efficient attention, weights no values.
    features = {
        operand.value.producer()
        for candidate in linear.values()
        if isinstance(candidate, Candidate)
        for operand in (candidate.query, candidate.key)
    }
    found: list[Candidate | Rejection] = []
    for node in model.graph:
        known = node in linear or node in sigmoids
        if (not _is_anchor(node) and not known) or node in spelled or node in features:
            continue
        try:
            candidate = linear.get(node) or _read(node, interpreter, twins.get(node))
            if isinstance(candidate, OpaqueError):
                raise candidate
            check_operands(candidate, interpreter)
            found.append(candidate)
        except OpaqueError as error:
            found.append(Rejection(str(error), where=node_label(node)))
    left_alone = (
        Rejection(other.reason, where=node_label(other.scores))
        for other in others
        if other.sigmoid is None
    )
    return [*found, *left_alone, *_hidden_anchors(model)]


def _read(node: ir.Node, interpreter: Interpreter, twin: Twin | OpaqueError | None) -> Candidate:
    named = named_reason(node)
    if named:
        raise OpaqueError(named)
    if isinstance(twin, OpaqueError):
        raise twin
    if twin is not None:
        candidate = read_softmax(twin.softmax, interpreter)
        return replace(candidate, anchor=node, form=twin.form)
    if node.op_type == "LinearAttention":
        return read_linear_operator(node, interpreter)
    if node.domain == MICROSOFT:
        return read_multi_head(node, interpreter)
    readers = {"Attention": read_attention, "Softmax": read_softmax, "Sigmoid": read_sigmoid}
    return readers[node.op_type](node, interpreter)


def _is_anchor(node: ir.Node) -> bool:
    if named_reason(node):
        return True
    if node.domain == MICROSOFT:
        return node.op_type.endswith("Attention")
    known = ("Attention", "Softmax", "LinearAttention")
    return node.domain in ("", "ai.onnx") and node.op_type in known


def _hidden_anchors(model: ir.Model) -> Iterator[Rejection]:
    """Attention inside branches, loops and functions is found, and left alone."""
    for node in model.graph.all_nodes():
        if _is_anchor(node) and node.graph is not model.graph:
            yield Rejection(
                f"{node.op_type} inside a subgraph (If, Loop or Scan) is not raised: only the "
                "main graph is searched",
                where=node_label(node),
            )
    for function in model.functions.values():
        if function.domain == DOMAIN:
            continue
        for node in function.all_nodes():
            if _is_anchor(node):
                yield Rejection(
                    f"{node.op_type} inside function {function.domain}::{function.name} is not "
                    "raised: inline the functions of the model first",
                    where=node_label(node),
                )
