"""Build ``ai.subquad`` attention nodes and the inputs they share: key mask and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from subquad.kernels.operator import (
    DOMAIN,
    DOMAIN_VERSION,
    OperatorVariant,
    TensorSpec,
    input_names,
)
from subquad.passes.recognise.layout import Operand
from subquad.passes.recognise.mask import MaskKind
from subquad.passes.recognise.sinks import Sinks


@dataclass(frozen=True)
class SharedInputs:
    """Optional inputs of a node; None where the variant does not use them."""

    key_mask: ir.Value | None = None
    query_positions: ir.Value | None = None
    key_positions: ir.Value | None = None
    score_bias: ir.Value | None = None
    slopes: ir.Value | None = None
    sink_logits: ir.Value | None = None
    log_decay: ir.Value | None = None


class NodeBuilder:
    """Records nodes in order; the caller inserts ``nodes`` into a graph."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()

    @property
    def nodes(self) -> Sequence[ir.Node]:
        return self._tape.nodes

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        dtype: ir.DataType = ir.DataType.FLOAT,
        **attributes: int | float | Sequence[int],
    ) -> ir.Value:
        """One standard operator with one output of ``dtype``."""
        output = ir.Value(type=ir.TensorType(dtype))
        return self._tape.op(op_type, list(inputs), attributes, output=output)

    def ints(self, values: int | Sequence[int] | Sequence[Sequence[int]]) -> ir.Value:
        """An int64 constant of rank 0, 1 or 2."""
        array = np.array(values, dtype=np.int64)
        tensor = ir.tensor(array)
        output = ir.Value(
            type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(array.shape), const_value=tensor
        )
        return self._tape.op("Constant", [], {"value": tensor}, output=output)

    def key_mask(self, padding: ir.Value) -> ir.Value:
        """``[batch, kv_len]`` bool from a 0/1 input of any dtype."""
        if padding.dtype == ir.DataType.BOOL:
            return padding
        return self.op("Cast", padding, dtype=ir.DataType.BOOL, to=int(ir.DataType.BOOL))

    def score_bias(
        self, terms: Sequence[tuple[ir.Value, MaskKind, int]], *, score_axes: int
    ) -> ir.Value:
        """The sum of terms as one tensor of four axes: ``(value, how it acts, its rank)`` each.

        Scores of three axes have one head, which a bias lacks as well.
        """
        total: ir.Value | None = None
        for value, kind, rank in terms:
            term = value
            if kind != "additive":
                zero, hidden = (
                    self.op("Constant", value_float=number) for number in (0.0, float("-inf"))
                )
                chosen = (zero, hidden) if kind == "visible" else (hidden, zero)
                term = self.op("Where", value, *chosen)
            missing = list(range(4 - rank))
            if score_axes == 3 and rank == 3:
                missing = [1]
            if missing:
                term = self.op("Unsqueeze", term, self.ints(missing))
            total = term if total is None else self.op("Add", total, term)
        assert total is not None
        return total

    def floats(self, values: Sequence[float]) -> ir.Value:
        """A float32 constant of rank 1."""
        tensor = ir.tensor(np.array(values, dtype=np.float32))
        output = ir.Value(
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([len(values)]),
            const_value=tensor,
        )
        return self._tape.op("Constant", [], {"value": tensor}, output=output)

    def sink_logits(self, sinks: Sinks, value: ir.Value | None, num_heads: int) -> ir.Value:
        """``[num_heads]`` from the tensor that holds the logits."""
        if value is None:
            return self.floats([sinks.number] * num_heads)
        flat = self.op("Reshape", value, self.ints([-1]))
        return self.op("Gather", flat, self.ints(sinks.indices), axis=0)

    def broadcast(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """One batch row repeated for each of ``like``."""
        batch = self.op("Shape", like, dtype=ir.DataType.INT64, start=0, end=1)
        shape = self.op("Concat", batch, self.ints([1, 1, 1]), dtype=ir.DataType.INT64, axis=0)
        return self.op("Expand", value, shape)

    def operands(
        self,
        operands: Sequence[Operand],
        values: Sequence[ir.Value],
        broadcast: Sequence[bool],
    ) -> list[ir.Value]:
        """Query, key and value in the operator's layout, with one batch size."""
        moved = [self.operand(o, v) for o, v in zip(operands, values, strict=True)]
        whole = next((v for v, one in zip(moved, broadcast, strict=True) if not one), moved[0])
        return [
            self.broadcast(v, whole) if one else v for v, one in zip(moved, broadcast, strict=True)
        ]

    def positions(
        self,
        query: ir.Value,
        key: ir.Value,
        key_mask: ir.Value | None,
        alignment: Literal["start", "end"],
        *,
        counted_by_mask: bool = False,
    ) -> tuple[ir.Value, ir.Value]:
        """Real-token positions of queries and keys, ``[batch, length]`` int64.

        With ``counted_by_mask`` the number of keys is that of the columns of ``key_mask``.

        Position 0 is the first real slot of a batch row, so sinks and windows are cut on tokens
        and a row padded in front gives the results of the same row without padding.
        """
        int64 = ir.DataType.INT64
        if counted_by_mask and key_mask is not None:
            kv_len = self.op("Shape", key_mask, dtype=int64, start=1, end=2)
        else:
            kv_len = self.op("Shape", key, dtype=int64, start=2, end=3)
        query_len = self.op("Shape", query, dtype=int64, start=2, end=3)
        if key_mask is not None:
            as_int = self.op("Cast", key_mask, dtype=ir.DataType.INT32, to=int(ir.DataType.INT32))
            first = self.op("ArgMax", as_int, dtype=int64, axis=1, keepdims=1)
        else:
            batch = self.op("Shape", key, dtype=int64, start=0, end=1)
            column = self.op("Concat", batch, self.ints([1]), dtype=int64, axis=0)
            first = self.op("Expand", self.ints([[0]]), column, dtype=int64)
        offset = self.op("Sub", kv_len, query_len, dtype=int64)
        start = offset if alignment == "end" else self.ints([0])
        end = self.op("Add", start, query_len, dtype=int64)
        key_slots = self._range(self.ints([0]), kv_len)
        query_slots = self._range(start, end)
        return (
            self.op("Sub", query_slots, first, dtype=int64),
            self.op("Sub", key_slots, first, dtype=int64),
        )

    def _range(self, start: ir.Value, end: ir.Value) -> ir.Value:
        int64 = ir.DataType.INT64
        scalar = self.ints(())  # the empty shape
        low = self.op("Reshape", start, scalar, dtype=int64)
        high = self.op("Reshape", end, scalar, dtype=int64)
        return self.op("Range", low, high, self.ints(1), dtype=int64)

    def operand(self, operand: Operand, value: ir.Value) -> ir.Value:
        """``value`` brought to ``[batch, heads, length, dim]`` as ``operand`` says."""
        if operand.heads:
            split = self.op("Reshape", value, self.ints([0, 0, operand.heads, -1]))
            return self.op("Transpose", split, perm=[0, 2, 1, 3])
        if operand.perm is not None:
            return self.op("Transpose", value, perm=list(operand.perm))
        return value

    def attention(
        self,
        variant: OperatorVariant,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        shared: SharedInputs,
        name: str,
    ) -> ir.Value:
        """An attention node; output ``[batch, num_heads, query_len, value_dim]``."""
        return self.operator(variant, query, key, value, shared, {}, name)[0]

    def operator(
        self,
        variant: OperatorVariant,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        shared: SharedInputs,
        extra: Mapping[str, ir.Value],
        name: str,
    ) -> Sequence[ir.Value]:
        """A node of any operator; its outputs as the variant has them.

        Args:
            extra: inputs that only this operator has, by name.
        """
        inputs = variant_inputs(variant, query, key, value, shared, extra)
        return self._tape.op_multi_out(
            variant.op_type,
            inputs,
            {attribute.name: attribute for attribute in variant.attributes().values()},
            domain=DOMAIN,
            overload=variant.overload,
            version=DOMAIN_VERSION,
            name=name,
            outputs=[_untied(spec) for spec in variant.outputs],
        )

    def packed(self, output: ir.Value) -> ir.Value:
        """``[batch, heads, length, dim]`` to ``[batch, length, heads * dim]``."""
        moved = self.op("Transpose", output, perm=[0, 2, 1, 3])
        return self.op("Reshape", moved, self.ints([0, 0, -1]))


def _untied(spec: TensorSpec) -> ir.Value:
    """A value of the type of ``spec``, of any shape."""
    return ir.Value(type=ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype))))


def variant_inputs(
    variant: OperatorVariant,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    shared: SharedInputs,
    extra: Mapping[str, ir.Value] | None = None,
) -> list[ir.Value | None]:
    """The inputs of a node of this variant, in the operator's order."""
    available: dict[str, ir.Value | None] = {
        "query": query,
        "key": key,
        "value": value,
        "key_mask": shared.key_mask,
        "query_positions": shared.query_positions,
        "key_positions": shared.key_positions,
        "score_bias": shared.score_bias,
        "slopes": shared.slopes,
        "sink_logits": shared.sink_logits,
        "log_decay": shared.log_decay,
        "": None,
        **(extra or {}),
    }
    names = input_names(variant)
    missing = [name for name in names if name and available.get(name) is None]
    assert not missing, f"{variant.overload} needs {missing}"
    return [available[name] for name in names]


def needs_positions(variant: OperatorVariant) -> bool:
    return "query_positions" in input_names(variant)


def register_variant(model: ir.Model, variant: OperatorVariant) -> None:
    """Add the function of ``variant`` to ``model`` unless it is there."""
    identifier = (DOMAIN, variant.op_type, variant.overload)
    if identifier in model.functions:
        return
    function = variant.build_function()
    model.functions[function.identifier()] = function
    model.opset_imports.setdefault(DOMAIN, DOMAIN_VERSION)
    for domain, version in function.opset_imports.items():
        if domain:
            model.opset_imports.setdefault(domain, version)
