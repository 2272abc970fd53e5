"""Attention that is named and left alone: other operators, other score functions, integers.

Nothing here is raised. A report that is silent about an attention would say that the model has
none, so each gets the reason why it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from subquad.kernels.body import MICROSOFT

_LINEAR = "is linear in the length already"
_SPARSE = "leaves most pairs of tokens out already"
_INTEGER = "computes with quantised integers; only float32 attention is raised"
_CACHED = "is one step of decoding with a cache of its own layout"
_PACKED = "holds a whole batch in one row, without padding"
_REASONS = {
    "LinearAttention": _LINEAR,
    "GatedDeltaNet": _LINEAR,
    "LongformerAttention": _SPARSE,
    "SparseAttention": _SPARSE,
    "QAttention": _INTEGER,
    "QOrderedAttention": _INTEGER,
    "QOrderedLongformerAttention": _INTEGER,
    "DecoderAttention": _CACHED,
    "DecoderMaskedSelfAttention": _CACHED,
    "DecoderMaskedMultiHeadAttention": _CACHED,
    "PagedAttention": _CACHED,
    "PackedAttention": _PACKED,
    "PackedMultiHeadAttention": _PACKED,
    "FlexAttention": "computes scores by graphs of its own",
}
_DOMAINS = ("", "ai.onnx", "ai.onnx.preview", MICROSOFT)

# What may happen to scores, element by element or along a row, between the two products.
_ON_SCORES = frozenset(
    (
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Where",
        "Cast",
        "Identity",
        "Neg",
        "Max",
        "Min",
        "Clip",
        "Dropout",
    )
)
_FUNCTIONS = frozenset(
    ("Sigmoid", "HardSigmoid", "Relu", "LeakyRelu", "Elu", "Softplus", "Tanh", "Exp", "Pow")
    + ("Sqrt", "Abs", "Reciprocal", "Gelu", "Erf", "Softsign", "Sign", "LpNormalization")
)
_MAX_STEPS = 16


def named_reason(node: ir.Node) -> str:
    """Why an attention operator is none of those that are read; "" if it is not known."""
    if node.domain not in _DOMAINS or node.op_type not in _REASONS:
        return ""
    rule = node.attributes.get("update_rule")
    what = node.op_type if rule is None else f"{node.op_type} ({rule.as_string()})"
    return f"{what} {_REASONS[node.op_type]}: it stays as it is"


def unnormalised_attention(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    """Products of two products of computed tensors without a softmax between: with the reason.

    Yields:
        The node that computes the scores, and why it is left alone.
    """
    computed = _computed_from_inputs(graph)
    for node in graph:
        if node.op_type != "MatMul" or not _multiplies(node, computed):
            continue
        functions = _functions_until_product(node.outputs[0], computed)
        if functions is None:
            continue
        names = " and ".join(functions)
        yield (
            node,
            f"attention with {names} in place of softmax: no operator of ours has that score "
            "function, so it stays as it is",
        )


def _computed_from_inputs(graph: ir.Graph) -> set[ir.Value]:
    """Values whose elements, not only sizes, come from inputs of the graph."""
    computed = {value for value in graph.inputs if value.const_value is None}
    for node in graph:
        if node.op_type in ("Shape", "Size"):
            continue
        if any(value in computed for value in node.inputs):
            computed.update(node.outputs)
    return computed


def _multiplies(node: ir.Node, computed: set[ir.Value]) -> bool:
    return all(value in computed for value in node.inputs)


def _functions_until_product(scores: ir.Value, computed: set[ir.Value]) -> list[str] | None:
    """Names of what is applied to scores until they weight values; None if they do not."""
    functions: dict[str, None] = {}
    value = scores
    for _ in range(_MAX_STEPS):
        users = list({u.node: None for u in value.uses() if u.node.op_type != "Shape"})
        if len(users) != 1:
            return None
        node = users[0]
        if node.op_type == "MatMul":
            weighs = node.inputs[0] is value and _multiplies(node, computed)
            return list(functions) if weighs and functions else None
        if node.domain not in ("", "ai.onnx") or node.op_type not in _ON_SCORES | _FUNCTIONS:
            return None
        if node.op_type in _FUNCTIONS:
            functions[node.op_type] = None
        value = node.outputs[0]
    return None


# --- integers ------------------------------------------------------------------------------

_INTEGER_PRODUCTS = ("MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat")
_QUANTISING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def quantised_reason(value: ir.Value) -> str:
    """Why scores or weights are no floats: "" if nothing near ``value`` is quantised."""
    stack, seen = [value], set[ir.Node]()
    while stack and len(seen) < _MAX_STEPS:
        node = stack.pop(0).producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in _INTEGER_PRODUCTS:
            return f"query x key is an integer product ({node.op_type}): integer attention is kept"
        if node.op_type in _QUANTISING:
            return f"the scores are quantised ({node.op_type}): integer attention is kept"
        if node.op_type in _ON_SCORES:
            stack.extend(v for v in node.inputs if v is not None)
    return ""
