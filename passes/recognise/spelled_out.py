"""com.microsoft attention operators, written beside themselves in standard operators.

ONNX Runtime's transformer optimizer writes ``Attention`` (projections included),
``MultiHeadAttention`` and ``GroupQueryAttention``. Each gets a *twin*: projections, rotation,
masks, softmax and products as standard operators, which are then read and proved like any other
attention. A twin is used only if ONNX Runtime computes the same from it as from the operator, on
random inputs whose scores are spread wide. What is not raised keeps its operator.

Left alone, with the reason: caches (``past``), Megatron's masks, packed batches, quantised caches.
GroupQueryAttention gives no meaning to query rows behind ``seqlens_k``; they are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import numpy as np
import onnx_ir as ir

from subquad.kernels.body import MICROSOFT
from subquad.passes.attention_nodes import NodeBuilder
from subquad.passes.recognise.affine import Affine, OpaqueError
from subquad.passes.recognise.candidates import int_attribute
from subquad.passes.recognise.site import Form
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.tensors import show

Role: TypeAlias = Literal[
    "activation", "bias", "lengths", "limits", "mask", "last", "total", "positions", "table"
]
_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL
# The first with a RotaryEmbedding.
_ROTARY_OPSET = 23
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Twin:
    """An operator and its twin.

    Attributes:
        fused: the operator.
        form: what reports call it.
        softmax: of the twin.
        scores: of the twin, scaled, before masks.
        outputs: outputs of the operator that are used, and what the twin has for each.
        roles: what the inputs of the operator that are no constants hold.
        last: ``seqlens_k``, beyond which rows have no meaning.
        nodes: the twin, in order.
    """

    fused: ir.Node
    form: Form
    softmax: ir.Node
    scores: ir.Value
    outputs: Mapping[ir.Value, ir.Value]
    roles: Mapping[ir.Value, Role]
    last: ir.Value | None
    nodes: Sequence[ir.Node]


def twin_of(node: ir.Node, interpreter: Interpreter, opset: int) -> Twin:
    """The twin of a com.microsoft operator, in ``opset``; its nodes are in no graph yet.

    Raises:
        OpaqueError: it is another operator, or does more than attention.
    """
    read = _READERS.get(node.op_type) if node.domain == MICROSOFT else None
    if read is None:
        raise OpaqueError(f"com.microsoft {node.op_type} is not read yet")
    speller = _Speller(node, interpreter, opset)
    outputs = read(speller)
    used = [o for o in node.outputs if o.uses() or o.is_graph_output()]
    missing = [o.name for o in used if o not in outputs]
    if missing:
        raise OpaqueError(f"further outputs of {node.op_type} are used: {missing[0]}")
    assert speller.softmax is not None and speller.scores is not None
    return Twin(
        fused=node,
        form=_FORMS[node.op_type],
        softmax=speller.softmax,
        scores=speller.scores,
        outputs={o: outputs[o] for o in used},
        roles=speller.roles,
        last=speller.last,
        nodes=list(speller.nodes),
    )


@dataclass(frozen=True)
class _Rules:
    """How one operator turns scores into weights.

    Attributes:
        scale: of the scores; 0 = the root of the head size.
        terms: added to them.
        is_causal: whether later keys are hidden; ``window`` keys at most are seen, 0 = all.
        softcap: 0 = none.
        sinks: ``[heads]`` logits, or a number for all heads.
    """

    scale: float = 0.0
    terms: Sequence[ir.Value] = ()
    is_causal: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: ir.Value | float | None = None


@dataclass
class _Inputs:
    """The inputs of a node by name; those asked for are known."""

    node: ir.Node
    names: Sequence[str]
    asked: set[str] = field(default_factory=set)

    def __call__(self, name: str) -> ir.Value | None:
        self.asked.add(name)
        place = self.names.index(name)
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    def needed(self, name: str) -> ir.Value:
        value = self(name)
        if value is None:
            raise OpaqueError(f"{self.node.op_type} without {name}")
        return value

    def check_all_read(self) -> None:
        for place, value in enumerate(self.node.inputs):
            name = self.names[place] if place < len(self.names) else f"input {place}"
            if value is None or name in self.asked:
                continue
            what = "a cache" if name.startswith("past") else name
            raise OpaqueError(f"{self.node.op_type} with {what} is not read yet")


class _Speller(NodeBuilder):
    """Writes the twin of one node."""

    def __init__(self, node: ir.Node, interpreter: Interpreter, opset: int) -> None:
        super().__init__()
        self.node = node
        self.opset = opset
        self.interpreter = interpreter
        self.roles: dict[ir.Value, Role] = {}
        self.softmax: ir.Node | None = None
        self.scores: ir.Value | None = None
        self.last: ir.Value | None = None

    def hold(self, **inputs: Sequence[ir.Value | None]) -> None:
        """Remember, by role, what inputs are fed with that are no constants."""
        for role, values in inputs.items():
            for value in values:
                if value is not None and (value.const_value is None or value.is_graph_input()):
                    self.roles[value] = cast("Role", role)

    def rank(self, value: ir.Value) -> int:
        return len(self.interpreter.tensor(value).shape)

    def width(self, value: ir.Value, axis: int = -1) -> int:
        """A fixed dimension."""
        dim = self.interpreter.tensor(value).shape[axis]
        if not dim.is_constant:
            raise OpaqueError(f"{value.name!r}: a size must be a fixed integer, got {dim}")
        return int(dim.constant)

    def length(self, value: ir.Value) -> Affine:
        """The number of tokens in an operand of three or four axes."""
        shape = self.interpreter.tensor(value).shape
        return shape[2 if len(shape) == 4 else 1]

    def number(self, name: str, default: float = 0.0) -> float:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    def scalar(self, number: float) -> ir.Value:
        """A float32 constant without axes."""
        return self.op("Squeeze", self.floats([number]))

    def slice(self, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        return self.op("Slice", value, *(self.ints([x]) for x in (start, end, axis)))

    def split_heads(self, value: ir.Value, heads: int) -> ir.Value:
        """``[batch, length, heads * dim]`` as ``[batch, heads, length, dim]``."""
        split = self.op("Reshape", value, self.ints([0, 0, heads, -1]))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def slots(self, value: ir.Value, axis: int) -> ir.Value:
        """``[size]``: the numbers of an axis of ``value``."""
        size = self.op("Shape", value, dtype=_INT64, start=axis, end=axis + 1)
        end = self.op("Reshape", size, self.ints(()), dtype=_INT64)
        return self.op("Range", self.ints(0), end, self.ints(1), dtype=_INT64)

    def hiding(self, visible: ir.Value, fill: float) -> ir.Value:
        """Zero where visible, else ``fill``."""
        zero, hidden = self.scalar(0.0), self.scalar(fill)
        return self.op("Where", visible, zero, hidden)

    def padding(self, mask: ir.Value, fill: float, key: ir.Value) -> ir.Value:
        """A mask input of the operator as a term of the scores."""
        dims = self.interpreter.tensor(mask).shape
        if len(dims) in (2, 3):  # of keys, or of queries and keys
            self.hold(mask=[mask])
            zero = self.op("CastLike", self.ints(0), mask, dtype=mask.dtype or _INT64)
            real = self.op("Greater", mask, zero, dtype=_BOOL)
            axes = self.ints([1, 2] if len(dims) == 2 else [1])
            return self.hiding(self.op("Unsqueeze", real, axes, dtype=_BOOL), fill)
        batch = self.interpreter.tensor(key).shape[0]
        if len(dims) == 1 and dims[0] == batch:
            self.hold(lengths=[mask])
            lengths = self.op("Cast", mask, dtype=_INT64, to=int(_INT64))
            column = self.op("Unsqueeze", lengths, self.ints([1]), dtype=_INT64)
            real = self.op("Less", self.slots(key, 2), column, dtype=_BOOL)
            return self.hiding(self.op("Unsqueeze", real, self.ints([1, 2]), dtype=_BOOL), fill)
        raise OpaqueError(f"{self.node.op_type} with a mask of shape {show(dims)} is not read yet")

    def attend(
        self, query: ir.Value, key: ir.Value, value: ir.Value, heads: int, rules: _Rules
    ) -> ir.Value:
        """``[batch, heads, length, dim]`` operands to ``[batch, length, heads * dim]``."""
        scale = rules.scale or self.width(query) ** -0.5
        product = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", product, self.scalar(scale))
        if rules.softcap:
            cap = self.scalar(rules.softcap)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        self.scores = scores
        for term in rules.terms:
            scores = self.op("Add", scores, term)
        if rules.is_causal:
            queries = self.op("Unsqueeze", self.slots(query, 2), self.ints([1]), dtype=_INT64)
            keys = self.op("Unsqueeze", self.slots(key, 2), self.ints([0]), dtype=_INT64)
            seen = self.op("LessOrEqual", keys, queries, dtype=_BOOL)
            if rules.window:
                distance = self.op("Sub", queries, keys, dtype=_INT64)
                near = self.op("Less", distance, self.ints(rules.window), dtype=_BOOL)
                seen = self.op("And", seen, near, dtype=_BOOL)
            scores = self.op("Where", seen, scores, self.scalar(_LOWEST))
        if rules.sinks is not None:
            scores = self._with_sinks(scores, heads, rules.sinks)
        weights = self.op("Softmax", scores, axis=-1)
        self.softmax = weights.producer()
        if rules.sinks is not None:
            weights = self.slice(weights, 0, -1, 3)
        return self.packed(self.op("MatMul", weights, value))

    def _with_sinks(self, scores: ir.Value, heads: int, sinks: ir.Value | float) -> ir.Value:
        if not isinstance(sinks, ir.Value):
            sinks = self.floats([sinks] * heads)
        column = self.op("Reshape", sinks, self.ints([1, heads, 1, 1]))
        sizes = self.op("Shape", scores, dtype=_INT64, start=0, end=3)
        shape = self.op("Concat", sizes, self.ints([1]), dtype=_INT64, axis=0)
        return self.op("Concat", scores, self.op("Expand", column, shape), axis=3)

    def repeated(self, value: ir.Value, heads: int, kv_heads: int) -> ir.Value:
        """Key or value heads as often as query heads need them."""
        if heads == kv_heads:
            return value
        group = heads // kv_heads
        return self.op("Gather", value, self.ints([h // group for h in range(heads)]), axis=1)

    def rotated(
        self, value: ir.Value, cos: ir.Value, sin: ir.Value, positions: ir.Value
    ) -> ir.Value:
        if self.opset < _ROTARY_OPSET:
            raise OpaqueError(f"rotation needs opset {_ROTARY_OPSET}, the model has {self.opset}")
        rotary = 2 * self.width(cos)
        return self.op(
            "RotaryEmbedding",
            *(value, cos, sin, positions),
            interleaved=int_attribute(self.node, "rotary_interleaved"),
            rotary_embedding_dim=0 if rotary == self.width(value) else rotary,
        )


# --- the operators -------------------------------------------------------------------------


def _read_attention(s: _Speller) -> dict[ir.Value, ir.Value]:
    """Input and packed weights of all three projections."""
    names = ("input", "weights", "bias", "mask_index", "past", "attention_bias")
    inputs = _Inputs(s.node, (*names, "past_sequence_length"))
    x, weights, bias = inputs.needed("input"), inputs.needed("weights"), inputs("bias")
    mask, extra = inputs("mask_index"), inputs("attention_bias")
    inputs.check_all_read()
    if int_attribute(s.node, "do_rotary"):
        raise OpaqueError("com.microsoft Attention with do_rotary is not read yet")
    heads = int_attribute(s.node, "num_heads")
    given = s.node.attributes.get("qkv_hidden_sizes")
    sizes = list(given.as_ints()) if given is not None else [s.width(weights) // 3] * 3
    projected = s.op("MatMul", x, weights)
    if bias is not None:
        projected = s.op("Add", projected, bias)
    starts = (0, sizes[0], sizes[0] + sizes[1])
    query, key, value = (
        s.split_heads(s.slice(projected, start, start + size, 2), heads)
        for start, size in zip(starts, sizes, strict=True)
    )
    s.hold(activation=[x], table=[weights, bias], bias=[extra])
    terms = [] if extra is None else [extra]
    if mask is not None:
        terms.append(s.padding(mask, s.number("mask_filter_value", -10000.0), key))
    rules = _Rules(s.number("scale"), terms, bool(int_attribute(s.node, "unidirectional")))
    output = s.attend(query, key, value, heads, rules)
    return {s.node.outputs[0]: output}


def _read_multi_head(s: _Speller) -> dict[ir.Value, ir.Value]:
    """Separate projections, with a bias of all three, padding and what is added to scores."""
    names = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key")
    inputs = _Inputs(s.node, (*names, "past_value", "past_sequence_length", "cache_indirection"))
    query, key, value = inputs.needed("query"), inputs("key"), inputs("value")
    bias, mask, extra = (inputs(name) for name in names[3:6])
    inputs.check_all_read()
    s.hold(activation=[query, key, value], table=[bias], bias=[extra])
    if key is None or value is None:
        raise OpaqueError("MultiHeadAttention of packed operands is run on GPUs only")
    heads = int_attribute(s.node, "num_heads")
    parts, start = [query, key, value], 0
    if bias is not None:
        for number, part in enumerate(parts):
            if s.rank(part) != 3:
                raise OpaqueError("MultiHeadAttention with a bias on keys of four axes")
            width = s.width(part)
            parts[number] = s.op("Add", part, s.slice(bias, start, start + width, 0))
            start += width
    q, k, v = (part if s.rank(part) == 4 else s.split_heads(part, heads) for part in parts)
    terms = [] if extra is None else [extra]
    if mask is not None:
        terms.append(s.padding(mask, s.number("mask_filter_value", -10000.0), k))
    is_causal = bool(int_attribute(s.node, "unidirectional"))
    if is_causal and s.length(query) != s.length(key):
        raise OpaqueError("MultiHeadAttention that is causal over keys of another length")
    rules = _Rules(s.number("scale"), terms, is_causal)
    outputs = {s.node.outputs[0]: s.attend(q, k, v, heads, rules)}
    return outputs | dict(zip(s.node.outputs[1:3], (k, v), strict=False))


def _read_group_query(s: _Speller) -> dict[ir.Value, ir.Value]:
    """Causal, fewer key heads, rotation inside; without a cache."""
    names = ("query", "key", "value", "past_key", "past_value", "seqlens_k")
    more = ("total_sequence_length", "cos_cache", "sin_cache", "position_ids", "attention_bias")
    inputs = _Inputs(s.node, (*names, *more, "head_sink", "k_scale", "v_scale"))
    query, key, value = inputs.needed("query"), inputs("key"), inputs("value")
    s.last = inputs("seqlens_k")
    total, cos, sin, positions, extra = (inputs(name) for name in more)
    sinks: ir.Value | float | None = inputs("head_sink")
    inputs.check_all_read()
    heads, kv_heads = (int_attribute(s.node, name) for name in ("num_heads", "kv_num_heads"))
    s.hold(
        activation=[query, key, value],
        table=[cos, sin, inputs("head_sink")],
        last=[s.last],
        total=[total],
        positions=[positions],
        bias=[extra],
    )
    if key is None or value is None:
        dim = s.width(query) // (heads + 2 * kv_heads)
        ends = (heads * dim, (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim)
        whole = query
        query, key, value = (
            s.slice(whole, start, end, 2) for start, end in zip((0, *ends), ends, strict=False)
        )
    q = s.split_heads(query, heads)
    k, v = s.split_heads(key, kv_heads), s.split_heads(value, kv_heads)
    if int_attribute(s.node, "do_rotary"):
        if cos is None or sin is None:
            raise OpaqueError("GroupQueryAttention with do_rotary and without its tables")
        places = _positions(s, q) if positions is None else positions
        q, k = (s.rotated(operand, cos, sin, places) for operand in (q, k))
    if int_attribute(s.node, "smooth_softmax") and sinks is None:
        sinks = 0.0
    rules = _Rules(
        s.number("scale"),
        () if extra is None else (extra,),
        is_causal=bool(int_attribute(s.node, "causal", 1)),
        window=max(int_attribute(s.node, "local_window_size", -1), 0),
        softcap=s.number("softcap"),
        sinks=sinks,
    )
    wide_key, wide_value = (s.repeated(operand, heads, kv_heads) for operand in (k, v))
    outputs = {s.node.outputs[0]: s.attend(q, wide_key, wide_value, heads, rules)}
    return outputs | dict(zip(s.node.outputs[1:3], (k, v), strict=False))


def _positions(s: _Speller, query: ir.Value) -> ir.Value:
    """``[batch, length]``: 0, 1, 2, ..."""
    row = s.op("Unsqueeze", s.slots(query, 2), s.ints([0]), dtype=_INT64)
    batch = s.op("Shape", query, dtype=_INT64, start=0, end=1)
    shape = s.op("Concat", batch, s.ints([1]), dtype=_INT64, axis=0)
    return s.op("Expand", row, shape, dtype=_INT64)


_READERS: dict[str, Callable[[_Speller], dict[ir.Value, ir.Value]]] = {
    "Attention": _read_attention,
    "MultiHeadAttention": _read_multi_head,
    "GroupQueryAttention": _read_group_query,
}
_FORMS: dict[str, Form] = {
    "Attention": "com.microsoft Attention",
    "MultiHeadAttention": "MultiHeadAttention",
    "GroupQueryAttention": "GroupQueryAttention",
}
