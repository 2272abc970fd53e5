"""What every operator of the domain ``ai.subquad`` provides.

All attention operators share their first six inputs:

| # | name | shape, dtype | |
|---|---|---|---|
| 0 | query | ``[batch, num_heads, query_len, head_dim]`` float32 | |
| 1 | key | ``[batch, num_kv_heads, kv_len, head_dim]`` float32 | |
| 2 | value | ``[batch, num_kv_heads, kv_len, value_dim]`` float32 | |
| 3 | key_mask | ``[batch, kv_len]`` bool, true = real token | optional |
| 4 | query_positions | ``[batch, query_len]`` int64 | optional |
| 5 | key_positions | ``[batch, kv_len]`` int64 | optional |

Positions are real-token positions: slot minus first real slot (plus past length for queries), so
padding slots in front have negative ones. They rise by one per slot. A query sees a key iff the
key is real and ``-window_right <= query_position - key_position <= window_left`` (a limit of -1
means unlimited; ``window_right = 0`` is causal). A query that sees no key yields exact zeros.
Query head ``h`` reads key/value head ``h // (num_heads // num_kv_heads)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import onnx_ir as ir

DOMAIN = "ai.subquad"
DOMAIN_VERSION = 1
OPSET = 24

UNLIMITED = -1
"""Value of ``window_left`` / ``window_right`` that puts no limit on that side."""

HIDING_BIAS = -1e30
"""A bias of this or less hides its key as the mask does; absorbs any score below 1e22."""


DType = Literal["float32", "bool", "int32", "int64"]
"""Element types that inputs and outputs may have."""


@dataclass(frozen=True)
class Blocks:
    """The number of blocks of ``size`` that cover a dimension: ``ceil(dim / size)``."""

    dim: str
    size: int


Dim = str | int | Blocks
"""A symbol such as ``query_len``, a static size, or a number of blocks."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a variant.

    Attributes:
        name: part of the operator's contract: the same input of every variant has one name.
        dtype: of its elements.
        dims: equal symbols have equal sizes; none is 0 at run time.
    """

    name: str
    dtype: DType
    dims: tuple[Dim, ...]


class OperatorVariant(Protocol):
    """One operator with all static choices fixed: it has one function body and one overload.

    A body can branch neither on list attributes nor on absent inputs, hence a function per
    variant. Implementations are frozen dataclasses.
    """

    @property
    def op_type(self) -> str:
        """Operator name inside ``ai.subquad``."""

    @property
    def overload(self) -> str:
        """Unique, readable, deterministic name of this variant (ONNX function overload)."""

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        """The inputs in order, ``None`` for an optional one that is absent, which is never last.

        An input keeps its place, dtype and rank in all variants of an operator.
        """

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs in order; their symbols occur in ``inputs``. The first is the attention.

        Outputs at one place have one dtype in all variants of an operator.
        """

    def attributes(self) -> Mapping[str, ir.Attr]:
        """Attributes a node of this variant carries (read by kernels; bodies have them baked)."""

    def build_function(self) -> ir.Function:
        """The model-local ONNX function (opset 24 and allow-listed com.microsoft ops)."""

    @property
    def reference(self) -> Callable[..., Any]:
        """The operator by its formula, in float64.

        Takes the inputs by name, those of ``kernels/operator.py`` also in order; returns the
        output as an array, or a tuple where the variant has several.
        """


def input_names(variant: OperatorVariant) -> tuple[str, ...]:
    """Names of the inputs in order, ``""`` for those that are absent."""
    return tuple(spec.name if spec is not None else "" for spec in variant.inputs)


def present_inputs(variant: OperatorVariant) -> tuple[str, ...]:
    """Names of the inputs that the variant has, in order: what a kernel takes."""
    return tuple(spec.name for spec in variant.inputs if spec is not None)


def node_attributes(variant: Any, *names: str) -> dict[str, ir.Attr]:
    """Attributes of a node of ``variant``: its overload as ``variant``, and the fields named.

    By the declared type of a field: a float, an integer, integers (of tuples, one after the
    other), or a text.
    """
    types = {field.name: str(field.type) for field in fields(variant)}
    attributes = [ir.AttrString("variant", variant.overload)]
    for name in names:
        value, kind = getattr(variant, name), types[name]
        if kind == "float":
            attributes.append(ir.AttrFloat32(name, value))
        elif kind == "int":
            attributes.append(ir.AttrInt64(name, value))
        elif kind.startswith("tuple"):
            attributes.append(ir.AttrInt64s(name, [number for part in value for number in part]))
        else:
            attributes.append(ir.AttrString(name, value))
    return {attribute.name: attribute for attribute in attributes}
