"""Writes an attention operator in standard operators: what all of them have in common.

A *twin* is what an operator computes, written beside it in projections, rotation, masks, softmax
and products. ``spelled_out`` and ``cached_group_query`` know the operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import numpy as np
import onnx_ir as ir

from subquad.passes.attention_nodes import NodeBuilder
from subquad.passes.recognise.affine import ONE, ZERO, Affine, OpaqueError
from subquad.passes.recognise.candidates import int_attribute
from subquad.passes.recognise.site import Form
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.tensors import show

Role: TypeAlias = Literal[
    "activation",
    "past",
    "bias",
    "seen",
    "mask",
    "real",
    "lengths",
    "nonpad",
    "last",
    "total",
    "positions",
    "table",
]
# Outputs of an operator, and what its twin has for each.
Outputs: TypeAlias = dict[ir.Value, ir.Value]
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
        real: input that marks real tokens, past ones included; others have no meaning.
        nodes: the twin, in order.
    """

    fused: ir.Node
    form: Form
    softmax: ir.Node
    scores: ir.Value
    outputs: Mapping[ir.Value, ir.Value]
    roles: Mapping[ir.Value, Role]
    last: ir.Value | None
    real: ir.Value | None
    nodes: Sequence[ir.Node]


@dataclass(frozen=True)
class Rules:
    """How one operator turns scores into weights.

    Attributes:
        scale: of the scores; 0 = the root of the head size.
        terms: added to them.
        left, right: keys seen before and after the query's own; -1 = all.
        first: slot of the first query among the keys, ``[]`` or ``[batch, 1, 1, 1]``; ``None``: 0.
        softcap: 0 = none.
        sinks: ``[heads]`` logits, or a number for all heads.
    """

    scale: float = 0.0
    terms: Sequence[ir.Value] = ()
    left: int = -1
    right: int = -1
    first: ir.Value | None = None
    softcap: float = 0.0
    sinks: ir.Value | float | None = None


@dataclass
class Inputs:
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


class Speller(NodeBuilder):
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
        self.real: ir.Value | None = None

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
        return self.op("Range", self.ints(0), self.size(value, axis), self.ints(1), dtype=_INT64)

    def mask_term(self, mask: ir.Value, key: ir.Value) -> ir.Value:
        """The mask input of the standard operator as a term of the scores."""
        is_bool = mask.dtype == _BOOL
        dims = self.interpreter.tensor(mask).shape
        missing = self.interpreter.tensor(key).shape[2] - dims[-1] if dims else ZERO
        if missing.is_constant and missing.constant > 0 and dims[-1] != ONE:
            raise OpaqueError(
                f"a mask with {dims[-1]} columns, fewer than keys: ONNX Runtime does not run it"
            )
        self.hold(**{"seen" if is_bool else "bias": [mask]})
        return self.hiding(mask) if is_bool else mask

    def hiding(self, visible: ir.Value, fill: float = _LOWEST) -> ir.Value:
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

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """``[]``: the size of an axis of ``value``."""
        size = self.op("Shape", value, dtype=_INT64, start=axis, end=axis + 1)
        return self.op("Reshape", size, self.ints(()), dtype=_INT64)

    def extended(self, past: ir.Value, new: ir.Value) -> ir.Value:
        """Keys or values of earlier calls, ``[batch, heads, past, dim]``, and those of this one."""
        return self.op("Concat", past, new, axis=2)

    def attend(
        self, query: ir.Value, key: ir.Value, value: ir.Value, heads: int, rules: Rules
    ) -> ir.Value:
        """``[batch, heads, length, dim]`` operands to ``[batch, heads, length, value_dim]``."""
        scale = rules.scale or self.width(query) ** -0.5
        product = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", product, self.scalar(scale))
        if rules.softcap:
            cap = self.scalar(rules.softcap)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        self.scores = scores
        for term in rules.terms:
            scores = self.op("Add", scores, term)
        if rules.left >= 0 or rules.right >= 0:
            scores = self.op("Where", self._band(query, key, rules), scores, self.scalar(_LOWEST))
        if rules.sinks is not None:
            scores = self._with_sinks(scores, heads, rules.sinks)
        weights = self.op("Softmax", scores, axis=-1)
        self.softmax = weights.producer()
        if rules.sinks is not None:
            weights = self.slice(weights, 0, -1, 3)
        return self.op("MatMul", weights, value)

    def _band(self, query: ir.Value, key: ir.Value, rules: Rules) -> ir.Value:
        """Which keys are near enough to a query, on the last two axes."""
        queries = self.op("Unsqueeze", self.slots(query, 2), self.ints([1]), dtype=_INT64)
        if rules.first is not None:
            queries = self.op("Add", queries, rules.first, dtype=_INT64)
        keys = self.op("Unsqueeze", self.slots(key, 2), self.ints([0]), dtype=_INT64)
        seen: ir.Value | None = None
        for low, high, limit in ((keys, queries, rules.right), (queries, keys, rules.left)):
            if limit < 0:
                continue
            if limit:
                high = self.op("Add", high, self.ints(limit), dtype=_INT64)
            side = self.op("LessOrEqual", low, high, dtype=_BOOL)
            seen = side if seen is None else self.op("And", seen, side, dtype=_BOOL)
        assert seen is not None
        return seen

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
