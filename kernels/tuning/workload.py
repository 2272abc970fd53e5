"""What a kernel is timed on: a variant and the sizes that its compiled form leaves open."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.example_inputs import Sizes, example_inputs
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.errors import UsageError

Feeds = dict[str, NDArray[Any]]

DENSITY = 0.3
"""Share of the key blocks in the lists of block-sparse operators."""

_SIZES = {"batch": 1, "length": 1024, "queries": 0}


@dataclass(frozen=True)
class Workload:
    """Sizes of one call.

    Attributes:
        batch: rows.
        kv_len: keys per row.
        query_len: queries per row, the last of the slots.
    """

    batch: int
    kv_len: int
    query_len: int

    def __post_init__(self) -> None:
        if not (self.batch >= 1 and 1 <= self.query_len <= self.kv_len):
            raise ValueError(
                f"a workload needs batch >= 1 and 1 <= query_len <= kv_len, got {self}"
            )

    def feeds(self, variant: OperatorVariant, seed: int, *, padding: int = 0) -> Feeds:
        """Random inputs of ``variant``.

        Args:
            variant: one that ``example_inputs`` knows.
            seed: of the numbers.
            padding: slots in front of every second row that hold no token.

        Raises:
            ValueError: as ``example_inputs``.
        """
        sizes = Sizes(self.batch, self.query_len, self.kv_len, density=DENSITY)
        feeds = example_inputs(variant, sizes, seed)
        start = np.where(np.arange(self.batch) % 2 == 1, padding, 0)[:, None]
        for name in ("query_positions", "key_positions"):
            if name in feeds:
                feeds[name] = feeds[name] - start
        if "key_mask" in feeds:
            feeds["key_mask"] = np.arange(self.kv_len)[None] >= start
        return feeds


def missing_inputs(variant: OperatorVariant) -> str:
    """Why no workload can make up the inputs of ``variant``; "" if it can."""
    try:
        Workload(1, 1, 1).feeds(variant, 0)
    except ValueError as error:
        return str(error)
    return ""


def parse_shape(text: str, operators: Mapping[str, type[Any]]) -> tuple[OperatorVariant, Workload]:
    """A variant and its workload from ``Operator:name=value,…``.

    Names are the fields of the operator's variants, and ``batch`` (1), ``length`` (1024) and
    ``queries`` (those of ``length``). A flag may stand without value. Left out, ``num_kv_heads``
    is ``num_heads``, ``value_dim`` is ``head_dim`` and ``scale`` is ``head_dim ** -0.5``.

    Args:
        text: e.g. ``Attention:num_heads=12,head_dim=64,window_right=0,length=4096``.
        operators: operator -> class of its variants.

    Raises:
        UsageError: unknown operator or name, or a value that does not fit.
    """
    op_type, _, rest = text.partition(":")
    cls = operators.get(op_type)
    if cls is None:
        known = ", ".join(operators)
        raise UsageError(f"--shapes {text!r}: unknown operator {op_type!r}; known: {known}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    sizes = dict(_SIZES)
    for item in filter(None, (part.strip() for part in rest.split(","))):
        name, equals, value = item.partition("=")
        if name not in fields and name not in sizes:
            known = ", ".join((*fields, *sizes))
            raise UsageError(f"--shapes {text!r}: unknown name {name!r}; known: {known}.")
        kind = fields.get(name, int)
        try:
            read = _read(value, kind) if equals else _flag(kind)
        except ValueError as error:
            raise UsageError(f"--shapes {text!r}: {name}: {error}.") from error
        if name in sizes:
            sizes[name] = read
        else:
            given[name] = read
    try:
        variant = cls(**(_defaults(given, fields) | given))
        length = sizes["length"]
        return variant, Workload(sizes["batch"], length, sizes["queries"] or length)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--shapes {text!r}: {error}.") from error


def _defaults(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "num_heads" in given:
        found["num_kv_heads"] = given["num_heads"]
    if "head_dim" in given:
        found |= {"value_dim": given["head_dim"], "scale": 1 / math.sqrt(given["head_dim"])}
    return {name: value for name, value in found.items() if name in fields}


def _read(text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        options = [item for item in typing.get_args(kind) if item is not type(None)]
        return None if text == "none" else _read(text, options[0])
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"expected true or false, got {text!r}")
        return text.lower() in ("true", "1")
    if kind is int:
        return int(text)
    if kind is float:
        return float(text)
    if kind is str or typing.get_origin(kind) is typing.Literal:
        return text
    raise ValueError("it cannot be given on the command line")


def _flag(kind: Any) -> bool:
    if kind is not bool:
        raise ValueError("it needs a value")
    return True
