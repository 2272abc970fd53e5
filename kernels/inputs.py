"""The first inputs every attention operator shares, and readable variant names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from subquad.kernels.body import Body
from subquad.kernels.operator import TensorSpec

INPUT_NAMES = ("query", "key", "value", "key_mask", "query_positions", "key_positions")


@dataclass(frozen=True)
class Heads:
    """Static sizes of one attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim) < 1:
            raise ValueError(f"sizes must be positive, got {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def label(self) -> str:
        return f"h{self.num_heads}kv{self.num_kv_heads}d{self.head_dim}v{self.value_dim}"


@dataclass(frozen=True)
class Inputs:
    """Formal inputs of a body; ``None`` where the variant has none."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    key_mask: ir.Value | None
    query_positions: ir.Value | None
    key_positions: ir.Value | None
    extra: Mapping[str, ir.Value] = field(default_factory=dict)
    """Those of one operator only, by name."""

    @property
    def positions(self) -> tuple[ir.Value, ir.Value]:
        """Query and key positions of a variant that has them."""
        assert self.query_positions is not None and self.key_positions is not None
        return self.query_positions, self.key_positions


def input_specs(
    heads: Heads,
    *,
    key_mask: bool,
    positions: bool,
    extra: Sequence[TensorSpec | None] = (),
) -> tuple[TensorSpec | None, ...]:
    """The shared inputs in order and those of one operator after them.

    ``None`` where one is absent; absent ones at the end are left out.
    """
    specs = [
        TensorSpec("query", "float32", ("batch", heads.num_heads, "query_len", heads.head_dim)),
        TensorSpec("key", "float32", ("batch", heads.num_kv_heads, "kv_len", heads.head_dim)),
        TensorSpec("value", "float32", ("batch", heads.num_kv_heads, "kv_len", heads.value_dim)),
        TensorSpec("key_mask", "bool", ("batch", "kv_len")) if key_mask else None,
        TensorSpec("query_positions", "int64", ("batch", "query_len")) if positions else None,
        TensorSpec("key_positions", "int64", ("batch", "kv_len")) if positions else None,
        *extra,
    ]
    while specs[-1] is None:
        specs.pop()
    return tuple(specs)


def output_spec(heads: Heads) -> TensorSpec:
    """The first output of every attention operator."""
    dims = ("batch", heads.num_heads, "query_len", heads.value_dim)
    return TensorSpec("output", "float32", dims)


def declare_inputs(specs: Sequence[TensorSpec | None]) -> tuple[list[ir.Value], Inputs]:
    """Formal function inputs; an absent one keeps its place, unused."""
    formal = [
        ir.Value(name=spec.name if spec is not None else f"absent_{place}")
        for place, spec in enumerate(specs)
    ]
    given = {
        spec.name: value for spec, value in zip(specs, formal, strict=True) if spec is not None
    }
    shared = [given.pop(name, None) for name in INPUT_NAMES]
    query, key, value, key_mask, query_positions, key_positions = shared
    assert query is not None and key is not None and value is not None
    inputs = Inputs(query, key, value, key_mask, query_positions, key_positions, given)
    return formal, inputs


def offset(body: Body, inputs: Inputs) -> ir.Value:
    """Key slot of query slot 0, ``[1]`` int64: the same in every batch row."""
    query_positions, key_positions = inputs.positions
    first_query = body.slice(body.slice(query_positions, 0, 1, 0), 0, 1, 1)
    first_key = body.slice(body.slice(key_positions, 0, 1, 0), 0, 1, 1)
    return body.reshape(body("Sub", first_query, first_key), 1)


def number_label(number: float) -> str:
    """A float as part of an identifier, without loss: ``0.125`` -> ``0p125``."""
    return repr(float(number)).replace(".", "p").replace("-", "m").replace("+", "")


def limit_label(limit: int) -> str:
    """A window limit as part of an identifier; unlimited is ``inf``."""
    return "inf" if limit < 0 else str(limit)
