"""The first inputs every attention operator shares, and readable variant names."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from subquad.kernels.body import Body

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

    @property
    def positions(self) -> tuple[ir.Value, ir.Value]:
        """Query and key positions of a variant that has them."""
        assert self.query_positions is not None and self.key_positions is not None
        return self.query_positions, self.key_positions


def input_names(*, key_mask: bool, positions: bool) -> tuple[str, ...]:
    """Input names in order, ``""`` where absent, without absent ones at the end."""
    present = (True, True, True, key_mask, positions, positions)
    names = [name if there else "" for name, there in zip(INPUT_NAMES, present, strict=True)]
    while not names[-1]:
        names.pop()
    return tuple(names)


def declare_inputs(names: tuple[str, ...]) -> tuple[list[ir.Value], Inputs]:
    """Formal function inputs; an absent one keeps its place under its usual name, unused."""
    formal = [ir.Value(name=INPUT_NAMES[index]) for index in range(len(names))]
    padded = [value if name else None for value, name in zip(formal, names, strict=True)]
    padded += [None] * (len(INPUT_NAMES) - len(padded))
    query, key, value, key_mask, query_positions, key_positions = padded
    assert query is not None and key is not None and value is not None
    return formal, Inputs(query, key, value, key_mask, query_positions, key_positions)


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
