"""Which shapes share tuning records, and how far apart two shapes are.

A bucket holds what a template's speed depends on, made from the fields of the variant and the
workload, so that a new operator needs no code here, and a new field with a default leaves old
records valid:

* kind, of fields that differ from their defaults: names (feature map, mixing rule), flags, and of
  every limit or count whether it is there (``window_right = 0`` and ``-1`` are kinds of their own);
* sizes: ``head_dim`` and ``value_dim`` as they are; ``group`` (query heads per key/value head),
  limits and counts, ``length`` (keys), ``queries`` and ``tasks`` (batch rows times query heads) as
  the next power of two.

The scale is no part of it: it is one factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subquad.kernels.tuning.workload import Workload

Kind = str | bool | None

_HEADS = ("num_heads", "num_kv_heads", "head_dim", "value_dim")
_IGNORED = ("scale",)

WEIGHTS: Mapping[str, float] = {
    "head_dim": 2.0,
    "value_dim": 2.0,
    "group": 1.0,
    "length": 0.5,
    "queries": 0.5,
    "tasks": 0.25,
}
"""Price of a factor of two in a size; other sizes cost ``OTHER_SIZE``."""

OTHER_SIZE = 0.5
OTHER_FLAG = 2.0
"""Price of a name, flag, limit or count that one has and the other lacks."""


@dataclass(frozen=True)
class Bucket:
    """Shapes that share records.

    Attributes:
        operator: op_type.
        kind: field -> name or flag.
        sizes: field -> size or power of two.
    """

    operator: str
    kind: tuple[tuple[str, Kind], ...]
    sizes: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {"operator": self.operator, "kind": dict(self.kind), "sizes": dict(self.sizes)}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Bucket:
        """Raises KeyError, TypeError or ValueError: not what ``to_json`` gave."""
        operator, kind, sizes = raw["operator"], raw["kind"], raw["sizes"]
        if not isinstance(operator, str):
            raise TypeError(f"operator must be a string, got {operator!r}")
        for name, value in kind.items():
            if not isinstance(value, str | bool | None):
                raise TypeError(f"kind.{name} must be a string, a flag or null, got {value!r}")
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"sizes.{name} must be a positive integer, got {value!r}")
        return Bucket(operator, tuple(sorted(kind.items())), tuple(sorted(sizes.items())))

    def describe(self) -> str:
        """``Attention window_right=0 head_dim=64 …`` in one line."""
        parts = [self.operator]
        parts += [f"{name}={value}" for name, value in self.kind]
        parts += [f"{name}={value}" for name, value in self.sizes]
        return " ".join(parts)


def bucket_of(variant: Any, workload: Workload) -> Bucket:
    """The bucket of ``variant``, a dataclass with ``heads``, on ``workload``."""
    heads = variant.heads
    kind: dict[str, Kind] = {}
    sizes = {
        "head_dim": heads.head_dim,
        "value_dim": heads.value_dim,
        "group": power_of_two(heads.group),
        "length": power_of_two(workload.kv_len),
        "queries": power_of_two(workload.query_len),
        "tasks": power_of_two(workload.batch * heads.num_heads),
    }
    for field in dataclasses.fields(variant):
        if field.name in _HEADS or field.name in _IGNORED:
            continue
        value = getattr(variant, field.name)
        if value == field.default:
            continue
        if isinstance(value, str | bool | None):
            kind[field.name] = value
        elif isinstance(value, int) and value > 0:
            kind[field.name] = "set"
            sizes[field.name] = power_of_two(value)
        elif isinstance(value, int):
            kind[field.name] = "zero" if value == 0 else "unset"
        elif isinstance(value, float):
            kind[field.name] = value != 0.0
        else:
            # Choices per head: what they are matters, not which head has which.
            kind[field.name] = ",".join(sorted({str(item) for item in value}))
    return Bucket(variant.op_type, tuple(sorted(kind.items())), tuple(sorted(sizes.items())))


def distance(one: Bucket, other: Bucket) -> float | None:
    """How unlike two buckets are; ``None`` if parameters of one say nothing about the other.

    The operator must agree, and names (feature map, …) that both have. Every name, flag, limit or
    count that only one of them has costs ``OTHER_FLAG``, every size its weight times the distance
    in powers of two.
    """
    if one.operator != other.operator:
        return None
    kinds, other_kinds = dict(one.kind), dict(other.kind)
    total = 0.0
    for name in kinds.keys() | other_kinds.keys():
        mine, theirs = kinds.get(name), other_kinds.get(name)
        if mine == theirs:
            continue
        if not (_is_flag(mine) or _is_flag(theirs)):
            return None
        total += OTHER_FLAG
    sizes, other_sizes = dict(one.sizes), dict(other.sizes)
    for name in sizes.keys() & other_sizes.keys():
        ratio = abs(math.log2(sizes[name] / other_sizes[name]))
        total += WEIGHTS.get(name, OTHER_SIZE) * ratio
    return total


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def _is_flag(value: Kind) -> bool:
    return value is None or isinstance(value, bool) or value in ("set", "zero", "unset")
