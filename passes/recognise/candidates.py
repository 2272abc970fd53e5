"""Find attention-like subgraphs and read their parts; nothing is proved here.

Two spellings are read: the standard ``Attention`` operator, and softmax between two matrix
products. A candidate only says where query, key, value, masks, scale and softcap are; ``mask``
and ``probe`` prove what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx_ir as ir

from subquad.passes.recognise.expressions import Affine, OpaqueError
from subquad.passes.recognise.mask import HIDDEN_BELOW
from subquad.passes.recognise.symbolic import Interpreter
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class Operand:
    """A value read in layout ``[batch, heads, length, dim]``.

    Attributes:
        value: the value in the source graph.
        perm: transposition that gives the layout, or None.
        heads: for a packed ``[batch, length, heads * dim]`` value, the number of heads, else 0.
    """

    value: ir.Value
    perm: tuple[int, int, int, int] | None = None
    heads: int = 0

    def shape(self, interpreter: Interpreter) -> tuple[Affine, ...]:
        """``(batch, heads, length, dim)`` as affine terms.

        Raises:
            OpaqueError: the rank is not the expected one.
        """
        dims = interpreter.tensor(self.value).shape
        if self.heads:
            if len(dims) != 3 or not dims[2].is_constant:
                raise OpaqueError(f"{self.value.name!r} is not [batch, length, heads * dim]")
            width = int(dims[2].constant) // self.heads
            return dims[0], Affine((), self.heads), dims[1], Affine((), width)
        if len(dims) != 4:
            raise OpaqueError(f"{self.value.name!r} has rank {len(dims)}, expected 4")
        return tuple(dims[p] for p in self.perm) if self.perm else dims


MaskKind: TypeAlias = Literal["visible", "hidden", "additive"]
Mask: TypeAlias = tuple[ir.Value, MaskKind]


@dataclass(frozen=True)
class Sizes:
    """The static sizes of an attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Candidate:
    """An attention-like subgraph, as read.

    Attributes:
        form: the spelling.
        anchor: the Attention or Softmax node.
        query, key, value: operands; ``key`` and ``value`` before any repetition for GQA.
        masks: values and how they act: ``visible`` / ``hidden`` (boolean) or ``additive``.
        scale, softcap: as in ``AttentionSite``.
        is_causal: the operator itself is causal.
        sizes: static sizes, checked to be consistent.
        output: the value to replace; packed ``[batch, length, heads * dim]`` if ``query.heads``.
    """

    form: Literal["Attention", "decomposed"]
    anchor: ir.Node
    query: Operand
    key: Operand
    value: Operand
    masks: tuple[Mask, ...]
    scale: float
    softcap: float
    is_causal: bool
    sizes: Sizes
    output: ir.Value


def find_candidates(model: ir.Model) -> list[Candidate | Rejection]:
    """Every ``Attention`` and every ``Softmax`` of the main graph, read or rejected, in order."""
    interpreter = Interpreter()
    found: list[Candidate | Rejection] = []
    for node in model.graph:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type not in ("Attention", "Softmax"):
            continue
        read = _read_attention if node.op_type == "Attention" else _read_softmax
        try:
            found.append(read(node, interpreter))
        except OpaqueError as error:
            found.append(Rejection(str(error), where=node.name or str(node.outputs[0].name)))
    return found


# --- the Attention operator ----------------------------------------------------------------


def _read_attention(node: ir.Node, interpreter: Interpreter) -> Candidate:
    inputs = list(node.inputs) + [None] * (7 - len(node.inputs))
    query, key, value, mask, past_key, past_value, nonpad = inputs[:7]
    if query is None or key is None or value is None:
        raise OpaqueError("Attention without query, key or value")
    if past_key is not None or past_value is not None:
        raise OpaqueError("Attention with past key/value inputs: cached decoding is not raised yet")
    if nonpad is not None:
        raise OpaqueError("Attention with nonpad_kv_seqlen is not raised yet")
    used = [o.name for o in node.outputs[1:] if o.uses() or o.is_graph_output()]
    if used:
        raise OpaqueError(f"further outputs of Attention are used: {', '.join(map(str, used))}")
    heads, kv_heads = _int(node, "q_num_heads"), _int(node, "kv_num_heads")
    query_operand = Operand(query, heads=heads)
    key_operand = _before_repetition(Operand(key, heads=kv_heads), interpreter)
    value_operand = _before_repetition(Operand(value, heads=kv_heads), interpreter)
    scale = node.attributes.get("scale")
    head_dim = query_operand.shape(interpreter)[3]
    if scale is None and not head_dim.is_constant:
        raise OpaqueError(f"head_dim must be a fixed integer, got {head_dim}")
    softcap = node.attributes.get("softcap")
    masks: tuple[Mask, ...] = ()
    if mask is not None:
        masks = ((mask, "visible" if mask.dtype == ir.DataType.BOOL else "additive"),)
    return Candidate(
        form="Attention",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=masks,
        scale=float(head_dim.constant) ** -0.5 if scale is None else scale.as_float(),
        softcap=0.0 if softcap is None else softcap.as_float(),
        is_causal=bool(_int(node, "is_causal")),
        sizes=_sizes(query_operand, key_operand, value_operand, interpreter),
        output=node.outputs[0],
    )


def _int(node: ir.Node, name: str, default: int = 0) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


# --- softmax between two products ----------------------------------------------------------

# Operators that may stand between the score product and the softmax.
_TRANSPARENT = ("Cast", "Identity", "Add", "Where", "Mul", "Div", "Tanh")


def _read_softmax(node: ir.Node, interpreter: Interpreter) -> Candidate:
    scores = _input(node, 0)
    rank = len(interpreter.tensor(scores).shape)
    axis = _int(node, "axis", -1)
    if axis not in (-1, rank - 1):
        raise OpaqueError(f"softmax over axis {axis}, not over keys")
    masks, value = _peel_masks(scores, interpreter)
    softcap, value = _peel_softcap(value, interpreter)
    scale, value = _peel_scale(value, interpreter)
    _require_only_use(value)
    product = value.producer()
    if product is None or product.op_type != "MatMul":
        what = "a graph input or constant" if product is None else f"operator {product.op_type}"
        raise OpaqueError(f"expected query x key before scale, softcap and masks, found {what}")
    query_scale, query = _peel_scale(_input(product, 0), interpreter)
    key_scale, key = _peel_scale(_input(product, 1), interpreter)
    output = _output_product(node)
    query_operand = Operand(query)
    key_operand = _before_repetition(_untransposed(key), interpreter)
    value_operand = _before_repetition(Operand(_input(output, 1)), interpreter)
    return Candidate(
        form="decomposed",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=tuple(masks),
        scale=scale * query_scale * key_scale,
        softcap=softcap,
        is_causal=False,
        sizes=_sizes(query_operand, key_operand, value_operand, interpreter),
        output=output.outputs[0],
    )


def _input(node: ir.Node, position: int) -> ir.Value:
    value = node.inputs[position]
    assert value is not None
    return value


def _require_only_use(value: ir.Value) -> None:
    if len(value.uses()) != 1 or value.is_graph_output():
        raise OpaqueError(f"the intermediate value {value.name!r} is used elsewhere too")


def _through_casts(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "Identity"):
        value = _input(node, 0)
        node = value.producer()
    return value


def _carries_scores(value: ir.Value) -> bool:
    """Whether ``value`` comes from a matrix product through operators that scores pass."""
    stack, seen = [value], set()
    while stack:
        current = stack.pop()
        node = current.producer()
        if node is None or current in seen:
            continue
        seen.add(current)
        if node.op_type == "MatMul":
            return True
        if node.op_type in _TRANSPARENT:
            stack.extend(v for v in node.inputs if v is not None)
    return False


def _peel_masks(value: ir.Value, interpreter: Interpreter) -> tuple[list[Mask], ir.Value]:
    """Masks added to, or selecting, the scores; nearest the softmax first."""
    masks: list[Mask] = []
    while True:
        value = _through_casts(value)
        node = value.producer()
        if node is None or node.op_type not in ("Add", "Where"):
            return masks, value
        _require_only_use(value)
        if node.op_type == "Add":
            left, right = _input(node, 0), _input(node, 1)
            carrying = [_carries_scores(left), _carries_scores(right)]
            if carrying == [True, True]:
                raise OpaqueError("two computed terms are added: a score bias, not a mask")
            if carrying == [False, False]:
                raise OpaqueError("no matrix product before the softmax")
            value, mask = (left, right) if carrying[0] else (right, left)
            masks.append((mask, "additive"))
            continue
        condition, chosen, other = (_input(node, i) for i in range(3))
        value, fill = (chosen, other) if _carries_scores(chosen) else (other, chosen)
        constant = _scalar(fill, interpreter)
        if constant is None or constant > HIDDEN_BELOW:
            raise OpaqueError(f"masked scores are set to {constant}, not to a large negative value")
        masks.append((condition, "visible" if value is chosen else "hidden"))


def _peel_softcap(value: ir.Value, interpreter: Interpreter) -> tuple[float, ir.Value]:
    """``cap * tanh(x / cap)`` -> cap and x; 0 and the value itself without one."""
    node = value.producer()
    if node is None or node.op_type != "Mul":
        return 0.0, value
    for position in (0, 1):
        tanh = _input(node, position).producer()
        cap = _scalar(_input(node, 1 - position), interpreter)
        if tanh is None or tanh.op_type != "Tanh" or cap is None:
            continue
        factor, inner = _peel_scale(_input(tanh, 0), interpreter)
        for used in (value, tanh.outputs[0], _input(tanh, 0)):
            _require_only_use(used)
        # tanh(factor * x) with factor = scale / cap: the rest of the factor is the scale.
        scaled = _scale_of_softcap(factor, cap)
        if scaled != 1.0:
            raise OpaqueError(f"tanh softcap of {cap:g} with inner factor {factor:g}")
        return cap, inner
    return 0.0, value


def _scale_of_softcap(factor: float, cap: float) -> float:
    scale = factor * cap
    return 1.0 if abs(scale - 1.0) < 1e-5 else scale


def _peel_scale(value: ir.Value, interpreter: Interpreter) -> tuple[float, ir.Value]:
    """Factors and divisors that are one-element constants -> their product and the rest."""
    scale = 1.0
    while True:
        value = _through_casts(value)
        node = value.producer()
        if node is None or node.op_type not in ("Mul", "Div"):
            return scale, value
        left, right = _input(node, 0), _input(node, 1)
        factor = _scalar(right, interpreter)
        if factor is not None:
            scale, value = scale * (1 / factor if node.op_type == "Div" else factor), left
            continue
        factor = _scalar(left, interpreter) if node.op_type == "Mul" else None
        if factor is None:
            return scale, value
        scale, value = scale * factor, right


def _scalar(value: ir.Value, interpreter: Interpreter) -> float | None:
    """The value of a one-element constant, also when the graph computes it from fixed sizes."""
    tensor = interpreter.tensor(value)
    if any(dim != Affine((), 1) for dim in tensor.shape):
        return None
    try:
        term = tensor.scalar()
    except OpaqueError:
        return None  # computed from activations: not a scale
    if not isinstance(term, Affine) or not term.is_constant or term.constant == 0:
        return None
    return float(term.constant)


def _output_product(softmax: ir.Node) -> ir.Node:
    """The product of attention weights and values; only casts and NaN guards may stand between."""
    weights = softmax.outputs[0]
    while True:
        users = list(dict.fromkeys(use.node for use in weights.uses()))
        if weights.is_graph_output() or not users:
            raise OpaqueError("the attention weights are an output of the graph, or unused")
        guard = next((n for n in users if n.op_type == "Where"), None)
        if guard is not None and len(users) == 2 and guard.inputs[2] is weights:
            condition = _input(guard, 0).producer()
            if condition in users and condition is not None and condition.op_type == "IsNaN":
                weights = guard.outputs[0]
                continue
        if len(users) != 1:
            raise OpaqueError("the attention weights are used elsewhere too")
        node = users[0]
        if node.op_type in ("Cast", "Identity", "Dropout"):
            weights = node.outputs[0]
            continue
        if node.op_type == "MatMul" and node.inputs[0] is weights:
            return node
        raise OpaqueError(f"the attention weights go into {node.op_type}, not into a value product")


# --- layouts -------------------------------------------------------------------------------


def _sizes(query: Operand, key: Operand, value: Operand, interpreter: Interpreter) -> Sizes:
    shapes = [operand.shape(interpreter) for operand in (query, key, value)]
    for what, shape in zip(("query", "key", "value"), shapes, strict=True):
        for axis, dim in ((1, shape[1]), (3, shape[3])):
            if not dim.is_constant:
                name = "head count" if axis == 1 else "head dimension"
                raise OpaqueError(
                    f"{what}: the {name} must be a fixed integer, got {dim}; "
                    "re-export with a static head count and dimension"
                )
    (_, heads, _, head_dim), (_, kv_heads, _, key_dim), (_, value_heads, _, value_dim) = (
        [int(dim.constant) if dim.is_constant else 0 for dim in shape] for shape in shapes
    )
    if key_dim != head_dim or value_heads != kv_heads or heads % max(kv_heads, 1):
        raise OpaqueError(
            f"query has {heads} heads of {head_dim}, key {kv_heads} of {key_dim}, "
            f"value {value_heads}: not an attention"
        )
    return Sizes(heads, kv_heads, head_dim, value_dim)


def _untransposed(transposed_key: ir.Value) -> Operand:
    """Key in ``[batch, heads, length, dim]`` from the second factor of the score product."""
    node = transposed_key.producer()
    if node is not None and node.op_type == "Transpose" and "perm" in node.attributes:
        perm = tuple(node.attributes["perm"].as_ints())
        if len(perm) == 4:
            swapped = (perm[0], perm[1], perm[3], perm[2])
            return Operand(_input(node, 0), None if swapped == (0, 1, 2, 3) else swapped)
    return Operand(transposed_key, (0, 1, 3, 2))


def _before_repetition(operand: Operand, interpreter: Interpreter) -> Operand:
    """Skip the repetition of key/value heads for grouped queries.

    Accepts ``[B, G, N, D] -> Unsqueeze(2) -> Expand -> Reshape [B, G * repeats, N, D]``, where
    head ``g * repeats + r`` of the result is head ``g``.
    """
    if operand.perm is not None or operand.heads:
        return operand
    reshape = operand.value.producer()
    expand = None if reshape is None else _producer(reshape, "Reshape")
    unsqueeze = None if expand is None else _producer(expand, "Expand")
    if reshape is None or expand is None or unsqueeze is None or unsqueeze.op_type != "Unsqueeze":
        return operand
    source = interpreter.tensor(_input(unsqueeze, 0)).shape
    wide = interpreter.tensor(expand.outputs[0]).shape
    final = interpreter.tensor(reshape.outputs[0]).shape
    between = interpreter.tensor(unsqueeze.outputs[0]).shape
    if len(source) != 4 or len(wide) != 5 or len(final) != 4:
        return operand
    if between != (*source[:2], Affine((), 1), *source[2:]):
        return operand
    # Batch and length may carry different names on both sides; Expand cannot change them.
    fixed = (source[1], source[3], wide[1], wide[2], wide[4], final[1], final[3])
    if not all(dim.is_constant for dim in fixed) or (wide[1], wide[4]) != (source[1], source[3]):
        return operand
    if final[1].constant != source[1].constant * wide[2].constant or final[3] != source[3]:
        return operand
    return Operand(_input(unsqueeze, 0))


def _producer(node: ir.Node, op_type: str) -> ir.Node | None:
    """Producer of the first input of ``node``, if ``node`` is an ``op_type``."""
    return _input(node, 0).producer() if node.op_type == op_type else None
