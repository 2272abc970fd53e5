"""Attention that is named and left alone: other operators, other score functions, integers.

Only sigmoids of scores are raised, which are found here and read in ``sigmoid``. A report
that is silent about an attention would say that the model has none, so each other one gets the
reason why it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
_RULES = {
    "delta": ", by the delta rule, which HybridAttention has not",
    "gated_delta": ", by the delta rule, which HybridAttention has not",
}
"""What keeps an update rule of ``LinearAttention`` from being ``HybridAttention``."""
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
    name = "" if rule is None else rule.as_string()
    if node.op_type == "LinearAttention":
        name = name or "gated_delta"
        if name in ("linear", "gated"):
            return ""  # read by ``linear``
    what = f"{node.op_type} ({name})" if name else node.op_type
    return f"{what} {_REASONS[node.op_type]}{_RULES.get(name, '')}: it stays as it is"


@dataclass(frozen=True)
class Unnormalised:
    """Products of products of computed tensors without a softmax between.

    Attributes:
        scores: computes the scores.
        functions: what is applied to them, in order.
    """

    scores: ir.Node
    functions: tuple[ir.Node, ...]

    @property
    def sigmoid(self) -> ir.Node | None:
        """The only function, if it is a sigmoid: read by ``sigmoid.py``."""
        alone = len(self.functions) == 1 and self.functions[0].op_type == "Sigmoid"
        return self.functions[0] if alone else None

    @property
    def reason(self) -> str:
        """Why it is left alone."""
        names = " and ".join(dict.fromkeys(node.op_type for node in self.functions))
        return (
            f"attention with {names} in place of softmax: no operator of ours has that score "
            "function, so it stays as it is"
        )


def unnormalised_attention(graph: ir.Graph) -> Iterator[Unnormalised]:
    """Attention without a softmax, in order."""
    computed = computed_from_inputs(graph)
    for node in graph:
        if node.op_type != "MatMul" or not _multiplies(node, computed):
            continue
        functions = _functions_until_product(node.outputs[0], computed)
        if functions is not None:
            yield Unnormalised(node, tuple(functions))


def computed_from_inputs(graph: ir.Graph) -> set[ir.Value]:
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


def _functions_until_product(scores: ir.Value, computed: set[ir.Value]) -> list[ir.Node] | None:
    """What is applied to scores until they weight values; None if they do not."""
    functions: list[ir.Node] = []
    value = scores
    for _ in range(_MAX_STEPS):
        users = list({u.node: None for u in value.uses() if u.node.op_type != "Shape"})
        total = _division_by_sum(users)
        if total is not None:
            functions.append(total)
            users.remove(total)
        if len(users) != 1:
            return None
        node = users[0]
        if node.op_type == "MatMul":
            weighs = node.inputs[0] is value and _multiplies(node, computed)
            known = any(function.op_type in _FUNCTIONS for function in functions)
            return functions if weighs and known else None
        if node.domain not in ("", "ai.onnx") or node.op_type not in _ON_SCORES | _FUNCTIONS:
            return None
        if node.op_type in _FUNCTIONS:
            functions.append(node)
        value = node.outputs[0]
    return None


def _division_by_sum(users: list[ir.Node]) -> ir.Node | None:
    """The sum, where ``users`` are a sum over keys and the quotient with it."""
    sums = [node for node in users if node.op_type == "ReduceSum"]
    if len(users) != 2 or len(sums) != 1:
        return None
    readers = {use.node for use in sums[0].outputs[0].uses()}
    others = {node for node in users if node is not sums[0]}
    return sums[0] if readers == others and all(n.op_type == "Div" for n in others) else None


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
