"""Shapes and records that tests of tuning share."""

from __future__ import annotations

import dataclasses
from typing import Any

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.kernel import CPU_TEMPLATES
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.space import Space
from subquad.kernels.tuning.choose import make_key
from subquad.kernels.tuning.records import Record, append_records
from subquad.kernels.tuning.workload import Workload

__all__ = [
    "KEY",
    "PLACE",
    "SMALL",
    "SPACE",
    "VARIANT",
    "WORK",
    "append_records",
    "failed",
    "record",
]

SMALL: tuple[OperatorVariant, Workload] = (
    AttentionVariant(2, 1, 4, 4, 0.5, window_right=0, has_key_mask=True),
    Workload(1, 24, 24),
)
"""One that slow kernels compute in no time."""

VARIANT = AttentionVariant(12, 12, 64, 64, 0.125, window_right=0)
WORK = Workload(1, 1024, 1024)
PLACE = CPU_TEMPLATES["Attention"]
KEY = make_key(VARIANT, WORK, X86_64_V3, PLACE)
SPACE = Space({"a": (1, 2, 4)}, {"a": 1}, lambda params: params["a"] in (1, 2, 4))


def record(a: int = 2, high: float = 0.9, **changes: Any) -> Record:
    plain = Record(KEY, (("a", a),), "ok", (high - 0.1, high - 0.05, high), 7, machine="m")
    return dataclasses.replace(plain, **changes)


def failed(a: int = 4, **changes: Any) -> Record:
    return record(a, status="failed", ratios=(), rounds=0, reason="killed", **changes)
