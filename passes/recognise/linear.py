"""Read linear attention: weights that are products of features, without a softmax.

    o_t = scale * sum_{s <= t} (q_t . k_s) v_s                  LinearAttention, update rule linear
    ((phi(q) phi(k)^T * visible) / (epsilon + its sums)) v      spelled out, with or without sums

A feature map is part of the site where both sides have the same one of those that
``HybridAttention`` knows (``elu(x) + 1``, ``relu``). Without a normaliser any other will do: the
operands are then the features, as the source computes them.

Katharopoulos et al., 2020, https://arxiv.org/abs/2006.16236.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import onnx_ir as ir

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.candidates import (
    Candidate,
    checked_sizes,
    int_attribute,
    node_input,
)
from subquad.passes.recognise.decomposed import uniform_factor
from subquad.passes.recognise.facts import reduces_last_axis
from subquad.passes.recognise.layout import (
    Operand,
    as_key,
    as_query,
    as_value,
    before_repetition,
)
from subquad.passes.recognise.mask import Mask
from subquad.passes.recognise.other_forms import computed_from_inputs
from subquad.passes.recognise.site import LinearForm, MaskPredicate
from subquad.passes.recognise.symbolic import Interpreter

_MAX_STEPS = 12


def read_linear_operator(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """The operator ``LinearAttention`` with the update rule ``linear``, without a state."""
    inputs = list(node.inputs) + [None] * (4 - len(node.inputs))
    if inputs[3] is not None:
        raise OpaqueError("LinearAttention that goes on from a state of earlier calls")
    used = [o.name for o in node.outputs[1:] if o.uses() or o.is_graph_output()]
    if used:
        raise OpaqueError(f"the state that LinearAttention leaves is used: {used[0]}")
    heads, kv_heads = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
    query = Operand(node_input(node, 0), heads=heads)
    key, value = (Operand(node_input(node, place), heads=kv_heads) for place in (1, 2))
    sizes = checked_sizes(query, key, value, interpreter)
    scale = node.attributes.get("scale")
    given = 0.0 if scale is None else scale.as_float()
    return Candidate(
        form="LinearAttention",
        anchor=node,
        query=query,
        key=key,
        value=value,
        masks=(),
        mask_axes=4,
        scale=given or sizes.head_dim**-0.5,
        softcap=0.0,
        is_causal=True,
        sizes=sizes,
        output=node.outputs[0],
        linear=LinearForm("identity", "none"),
    )


@dataclass
class _Weights:
    """What stands between the product of features and the product with values.

    Attributes:
        masks: on the products.
        scale: multiplies them.
        total: sums them up, over keys; ``None``: nothing does.
        divided: whether the weights are divided by it before they meet the values.
        last: the product with values.
    """

    masks: list[Mask] = field(default_factory=list)
    scale: Fraction = Fraction(1)
    total: ir.Node | None = None
    divided: ir.Node | None = None
    last: ir.Node | None = None


def linear_products(graph: ir.Graph, interpreter: Interpreter) -> Iterator[Candidate]:
    """Spelled-out linear attention, by its product of features; what is none is passed over."""
    computed = computed_from_inputs(graph)
    for node in graph:
        if node.op_type == "MatMul" and all(v in computed for v in node.inputs):
            try:
                candidate = _read(node, computed, interpreter)
            except OpaqueError:
                continue  # products of other things
            if candidate is not None:
                yield candidate


def _read(product: ir.Node, computed: set[ir.Value], interpreter: Interpreter) -> Candidate | None:
    weights = _follow(product, computed, interpreter)
    if weights is None or weights.last is None:
        return None
    output, epsilon = weights.last.outputs[0], 0.0
    if weights.total is not None:
        quotient = weights.divided or _only_user(output)
        if quotient is None or quotient.op_type != "Div":
            return None
        numerator = quotient.inputs[0] if weights.divided is None else output
        found = _epsilon(quotient.inputs[1], weights.total, interpreter)
        if found is None or numerator is not output:
            return None
        epsilon = found
        if weights.divided is None:
            output = quotient.outputs[0]
    query = as_query(node_input(product, 0), interpreter)
    key = as_key(node_input(product, 1), interpreter, grouped=False)
    value = as_value(node_input(weights.last, 1), interpreter, grouped=False)
    grouped = before_repetition(value, interpreter)
    feature_map, query, features = _shared_map(query, before_repetition(key, interpreter))
    features = before_repetition(features, interpreter)
    if features.shape(interpreter)[1] == grouped.shape(interpreter)[1]:
        key, value = features, grouped
    else:
        # Only one of them could be read before its repetition: neither is.
        feature_map, query, key = _shared_map(as_query(node_input(product, 0), interpreter), key)
    normaliser = "none" if weights.total is None else "sum"
    return Candidate(
        form="decomposed",
        anchor=product,
        query=query,
        key=key,
        value=value,
        masks=tuple(weights.masks),
        mask_axes=len(interpreter.tensor(product.outputs[0]).shape),
        scale=float(weights.scale),
        softcap=0.0,
        is_causal=False,
        sizes=checked_sizes(query, key, value, interpreter),
        output=output,
        linear=LinearForm(feature_map, normaliser, epsilon),  # type: ignore[arg-type]
    )


def _follow(product: ir.Node, computed: set[ir.Value], interpreter: Interpreter) -> _Weights | None:
    found, value = _Weights(), product.outputs[0]
    for _ in range(_MAX_STEPS):
        if value.is_graph_output():
            return None
        users = list(dict.fromkeys(u.node for u in value.uses() if u.node.op_type != "Shape"))
        totals = [node for node in users if node.op_type == "ReduceSum"]
        if totals and found.total is None:
            if not reduces_last_axis(totals[0], len(interpreter.tensor(value).shape)):
                return None
            found.total = totals[0]
            users.remove(totals[0])
        if len(users) != 1 or users[0].graph is not product.graph:
            return None
        node = users[0]
        others = [v for v in node.inputs if v is not value and v is not None]
        if node.op_type == "MatMul":
            fits = node.inputs[0] is value and bool(others) and others[0] in computed
            found.last = node
            return found if fits else None
        if not _take(found, node, value, others, interpreter):
            return None
        value = node.outputs[0]
    return None


def _take(
    found: _Weights,
    node: ir.Node,
    value: ir.Value,
    others: list[ir.Value],
    interpreter: Interpreter,
) -> bool:
    """Note one step; False where it is none of linear attention."""
    if node.op_type == "Identity":
        return True
    if node.op_type in ("Mul", "Div") and len(others) == 1:
        factor = uniform_factor(others[0], interpreter)
        first = node.inputs[0] is value
        if factor is not None and (first or node.op_type == "Mul"):
            # Behind the sums it would scale the quotient.
            found.scale *= factor if node.op_type == "Mul" else 1 / factor
            return found.total is None
        if node.op_type == "Mul":
            found.masks.append((others[0], "factor"))
            return found.total is None
        found.divided = node
        return first and found.total is not None
    if node.op_type == "Where" and len(others) == 2 and node.inputs[0] is others[0]:
        found.masks.append((others[0], "visible" if node.inputs[1] is value else "hidden"))
        return found.total is None and uniform(others[1], interpreter) == 0.0
    return False


def _only_user(value: ir.Value) -> ir.Node | None:
    users = list(dict.fromkeys(u.node for u in value.uses()))
    alone = len(users) == 1 and not value.is_graph_output()
    return users[0] if alone and users[0].graph is value.graph else None


def _epsilon(
    denominator: ir.Value | None, total: ir.Node, interpreter: Interpreter
) -> float | None:
    """What is added to the sums; ``None``: the divisor is something else."""
    if denominator is total.outputs[0]:
        return 0.0
    node = None if denominator is None else denominator.producer()
    if node is None or node.op_type != "Add" or total.outputs[0] not in node.inputs:
        return None
    others = [v for v in node.inputs if v is not None and v is not total.outputs[0]]
    number = uniform(others[0], interpreter) if len(others) == 1 else None
    return number if number is not None and number >= 0 else None


# --- feature maps ------------------------------------------------------------------------------


def _shared_map(query: Operand, key: Operand) -> tuple[str, Operand, Operand]:
    """The feature map that made both, and of what; ``identity``: of themselves."""
    (first, of_query), (second, of_key) = _map_of(query.value), _map_of(key.value)
    if first == second:
        return first, replace(query, value=of_query), replace(key, value=of_key)
    return "identity", query, key


def _map_of(value: ir.Value) -> tuple[str, ir.Value]:
    node = value.producer()
    if node is not None and node.op_type == "Relu" and node.inputs[0] is not None:
        return "relu", node.inputs[0]
    if node is not None and node.op_type == "Add":
        for elu, one in (node.inputs, node.inputs[::-1]):
            inner = None if elu is None else elu.producer()
            tensor = None if one is None else ir.convenience.get_const_tensor(one)
            if inner is None or inner.op_type != "Elu" or tensor is None or tensor.size != 1:
                continue
            alpha = inner.attributes.get("alpha")
            unit = alpha is None or alpha.as_float() == 1.0
            if unit and float(tensor.numpy().reshape(())) == 1.0 and inner.inputs[0] is not None:
                return "elu", inner.inputs[0]
    return "identity", value


def check_linear(candidate: Candidate, mask: MaskPredicate) -> None:
    """What ``HybridAttention`` cannot say.

    Raises:
        OpaqueError: with the reason.
    """
    form = candidate.linear
    if form is None:
        return
    if candidate.biases:
        raise OpaqueError(
            f"linear attention under what is no mask: {candidate.biases[0].claim.reason}"
        )
    if form.normaliser == "sum" and form.feature_map == "identity":
        raise OpaqueError(
            "linear attention whose normaliser sums features of a kind that is not known: they may "
            "be negative"
        )
    if mask.window_left != UNLIMITED or mask.window_right > 0:
        raise OpaqueError(f"linear attention within a window ({mask.describe()})")
    if form.epsilon and candidate.scale != 1.0:
        raise OpaqueError("linear attention whose products are scaled beside an epsilon")
