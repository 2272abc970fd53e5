"""What is read of an attention, and attention that is one operator; nothing is proved here.

The standard ``Attention`` operator and com.microsoft ``MultiHeadAttention`` are read here, softmax
between two matrix products in ``decomposed``. A candidate only says where query, key, value, masks,
scale and softcap are; ``mask`` and ``probe`` prove what they mean.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from subquad.kernels.attention.semantics import ScoreFunction
from subquad.passes.recognise.affine import ONE, Affine, OpaqueError
from subquad.passes.recognise.alibi import Alibi
from subquad.passes.recognise.bias import Bias
from subquad.passes.recognise.layout import Operand, before_repetition
from subquad.passes.recognise.mask import Mask, ScoreShape
from subquad.passes.recognise.sinks import Sinks
from subquad.passes.recognise.site import Form, LinearForm
from subquad.passes.recognise.symbolic import Interpreter


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
        anchor: the Attention, Softmax or Sigmoid node.
        query, key, value: operands; ``key`` and ``value`` before any repetition for GQA.
        masks: values and how they act: ``visible`` / ``hidden`` (boolean), ``additive``, or
            ``factor`` on the weights.
        mask_axes: axes of the scores, to which masks are broadcast.
        scale, softcap: as in ``AttentionSite``.
        is_causal: the operator itself is causal.
        sizes: static sizes, checked to be consistent.
        output: the value to replace; packed ``[batch, length, heads * dim]`` if ``query.heads``.
        biases: terms of the masks that turned out to be none.
        alibi: one of them that is linear in the distance.
        sinks: one more logit in the softmax.
        score_function, score_offset: as in ``AttentionVariant``.
        linear: weights are products of features; ``None``: they are not.
        features_of_source: query and key are features that the source computed, never negative.
        output_perm: where the axes ``[batch, heads, length, dim]`` are in ``output``; ``None``: in
            that order.
    """

    form: Form
    anchor: ir.Node
    query: Operand
    key: Operand
    value: Operand
    masks: tuple[Mask, ...]
    mask_axes: int
    scale: float
    softcap: float
    is_causal: bool
    sizes: Sizes
    output: ir.Value
    biases: tuple[Bias, ...] = ()
    alibi: Alibi | None = None
    sinks: Sinks | None = None
    score_function: ScoreFunction = "softmax"
    score_offset: float = 0.0
    linear: LinearForm | None = None
    features_of_source: bool = False
    output_perm: tuple[int, ...] | None = None

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        return self.query, self.key, self.value

    def score_shape(self, interpreter: Interpreter) -> ScoreShape:
        query, key = self.query.shape(interpreter), self.key.shape(interpreter)
        heads = query[1] if self.mask_axes == 4 else None
        return ScoreShape(self.batch(interpreter), heads, query[2], key[2])

    def batch(self, interpreter: Interpreter) -> Affine:
        """The batch size: of an operand that is not broadcast, if there is one."""
        sizes = [operand.shape(interpreter)[0] for operand in self.operands]
        return next((size for size in sizes if size != ONE), ONE)

    def broadcast(self, interpreter: Interpreter) -> tuple[bool, bool, bool]:
        """Which operands have one batch row that stands for all."""
        batch = self.batch(interpreter)
        rows = (operand.shape(interpreter)[0] for operand in self.operands)
        query, key, value = (size == ONE and size != batch for size in rows)
        return query, key, value


def node_label(node: ir.Node) -> str:
    """How reports call a node of the source."""
    return node.name or str(node.outputs[0].name)


def node_input(node: ir.Node, number: int) -> ir.Value:
    """An input that must be there."""
    value = node.inputs[number]
    if value is None:
        raise OpaqueError(f"input {number} of {node.op_type} {node_label(node)!r} is absent")
    return value


def check_further_outputs(node: ir.Node, known: Collection[ir.Value] = ()) -> None:
    """Attention operators have outputs beside the attention, which must not be used.

    Args:
        node: the operator.
        known: outputs that have a meaning.
    """
    used = [o for o in node.outputs[1:] if o not in known and (o.uses() or o.is_graph_output())]
    if not used:
        return
    if used[0] in node.outputs[3:]:
        raise OpaqueError(
            f"the scores or weights are an output of {node.op_type} too ({used[0].name}): every "
            "pair of tokens is computed anyway, so nothing is won"
        )
    names = ", ".join(str(output.name) for output in used)
    raise OpaqueError(f"further outputs of {node.op_type} are used: {names}")


def int_attribute(node: ir.Node, name: str, default: int = 0) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def check_operands(candidate: Candidate, interpreter: Interpreter) -> None:
    """What replacing needs to know: element types, and batch rows that correspond."""
    operands, batch = candidate.operands, candidate.batch(interpreter)
    shapes = [operand.shape(interpreter) for operand in operands]
    for what, operand, shape in zip(("query", "key", "value"), operands, shapes, strict=True):
        check_type(what, operand.value, interpreter)
        mismatch = shape[0] - batch
        if shape[0] != ONE and mismatch.is_constant and mismatch != Affine():
            raise OpaqueError(f"{what} has batch size {shape[0]}, others {batch}")
        _check_openable(what, operand.value, interpreter)
    lengths = shapes[1][2] - shapes[2][2]
    if lengths.is_constant and lengths != Affine():
        raise OpaqueError(f"key has length {shapes[1][2]}, value {shapes[2][2]}")


def check_type(what: str, value: ir.Value, interpreter: Interpreter) -> None:
    """Operands must be float32, as the raised node computes."""
    dtype = interpreter.tensor(value).dtype
    if dtype is None:
        raise OpaqueError(f"{what} {value.name!r} has no known type: infer shapes first")
    if dtype != ir.DataType.FLOAT:
        raise OpaqueError(
            f"{what} is {dtype.name}: only float32 attention is raised; convert the file to float32"
        )


def _check_openable(what: str, value: ir.Value, interpreter: Interpreter) -> None:
    """ONNX Runtime (1.32) moves int8 quantisation behind the transpositions that follow it.

    From opset 21 on it then gives the zero point a wrong type, and the model does not open.
    """
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return
    if interpreter.tensor(node.inputs[0]).dtype == ir.DataType.INT8:
        raise OpaqueError(
            f"{what} comes straight from int8 quantisation, which ONNX Runtime cannot move; "
            "quantise activations to uint8"
        )


# --- the Attention operator ----------------------------------------------------------------


def read_attention(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """The standard Attention operator without cache and window of its own."""
    inputs = list(node.inputs) + [None] * (7 - len(node.inputs))
    query, key, value, mask = inputs[:4]
    if query is None or key is None or value is None:
        raise OpaqueError("Attention without query, key or value")
    check_further_outputs(node)
    packed = len(interpreter.tensor(query).shape) == 3
    heads, kv_heads = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
    if packed and not (heads and kv_heads):
        raise OpaqueError("Attention of three axes without q_num_heads and kv_num_heads")
    query_operand = Operand(query, heads=heads if packed else 0)
    key_operand = before_repetition(Operand(key, heads=kv_heads if packed else 0), interpreter)
    value_operand = before_repetition(Operand(value, heads=kv_heads if packed else 0), interpreter)
    scale = node.attributes.get("scale")
    head_dim = query_operand.shape(interpreter)[3]
    if scale is None and not head_dim.is_constant:
        raise OpaqueError(f"head_dim must be a fixed integer, got {head_dim}")
    softcap = node.attributes.get("softcap")
    masks: tuple[Mask, ...] = ()
    if mask is not None:
        is_bool = interpreter.tensor(mask).dtype == ir.DataType.BOOL
        masks = ((mask, "visible" if is_bool else "additive"),)
    return Candidate(
        form="Attention",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=masks,
        mask_axes=4,
        scale=float(head_dim.constant) ** -0.5 if scale is None else scale.as_float(),
        softcap=0.0 if softcap is None else softcap.as_float(),
        is_causal=bool(int_attribute(node, "is_causal")),
        sizes=checked_sizes(query_operand, key_operand, value_operand, interpreter),
        output=node.outputs[0],
    )


def read_multi_head(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """com.microsoft MultiHeadAttention of separate packed operands; its relatives are declined."""
    if node.op_type != "MultiHeadAttention":
        raise OpaqueError(f"com.microsoft {node.op_type} is not read yet")
    names = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")
    inputs = dict(zip(names, node.inputs, strict=False))
    query, key, value = (inputs.get(name) for name in names[:3])
    if query is None or key is None or value is None:
        raise OpaqueError("MultiHeadAttention of packed query, key and value is not read yet")
    more = [name for name in ("bias", "key_padding_mask") if inputs.get(name) is not None]
    if more or any(v is not None for v in node.inputs[6:]):
        raise OpaqueError(
            f"MultiHeadAttention with {' and '.join(more) or 'a cache'} is not read yet"
        )
    check_further_outputs(node)
    heads = int_attribute(node, "num_heads")
    query_operand, key_operand, value_operand = (
        Operand(v, heads=heads) for v in (query, key, value)
    )
    head_dim = query_operand.shape(interpreter)[3]
    scale = node.attributes.get("scale")
    given = 0.0 if scale is None else scale.as_float()
    bias = inputs.get("attention_bias")
    return Candidate(
        form="MultiHeadAttention",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=() if bias is None else ((bias, "additive"),),
        mask_axes=4,
        scale=given or float(head_dim.constant) ** -0.5,
        softcap=0.0,
        is_causal=bool(int_attribute(node, "unidirectional")),
        sizes=checked_sizes(query_operand, key_operand, value_operand, interpreter),
        output=node.outputs[0],
    )


# --- sizes ---------------------------------------------------------------------------------


def checked_sizes(query: Operand, key: Operand, value: Operand, interpreter: Interpreter) -> Sizes:
    """Head counts and dimensions.

    Raises:
        OpaqueError: one is dynamic, or they do not fit.
    """
    shapes = [operand.shape(interpreter) for operand in (query, key, value)]
    for what, shape in zip(("query", "key", "value"), shapes, strict=True):
        for axis, dim in ((1, shape[1]), (3, shape[3])):
            if not dim.is_constant:
                name = "head count" if axis == 1 else "head dimension"
                raise OpaqueError(
                    f"{what}: the {name} must be a fixed integer, got {dim}; "
                    "re-export with a static head count and dimension"
                )
    (heads, head_dim), (kv_heads, key_dim), (value_heads, value_dim) = (
        (int(shape[1].constant), int(shape[3].constant)) for shape in shapes
    )
    if key_dim != head_dim or value_heads != kv_heads or heads % max(kv_heads, 1):
        raise OpaqueError(
            f"query has {heads} heads of {head_dim}, key {kv_heads} of {key_dim}, "
            f"value {value_heads}: not an attention"
        )
    return Sizes(heads, kv_heads, head_dim, value_dim)
