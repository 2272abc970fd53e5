"""What ``--budget`` of a plan may say: limits on metrics, and a metric of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.budget import Budget
from subquad.runtime.errors import UsageError

Runner = Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]
Metric = Callable[[Runner], float]
"""A user's metric: runs the model as often as it likes and returns a score, higher is better."""


def parse_budget(
    texts: Sequence[str],
) -> tuple[Budget | None, Metric | None, float | None]:
    """Limits, the user's metric and its largest drop.

    Raises:
        UsageError: no limit, an unknown one, or a metric without a drop.
    """
    from subquad.converter.module import load_object

    plain: list[str] = []
    reference: str | None = None
    drop: float | None = None
    for pair in (p.strip() for text in texts for p in text.split(",")):
        name, _, value = pair.partition("=")
        if name.strip() == "metric":
            reference = value.strip()
        elif name.strip() == "drop":
            try:
                drop = float(value)
            except ValueError as error:
                raise UsageError(f"Budget drop={value}: not a number.") from error
            if not np.isfinite(drop) or drop < 0:
                raise UsageError(f"Budget drop={value}: must be 0 or more.")
        elif pair:
            plain.append(pair)
    if (reference is None) != (drop is None):
        raise UsageError("A metric needs both: metric=module:function,drop=0.5.")
    limits = Budget.parse(plain)
    if limits is None and reference is None:
        raise UsageError("A plan needs a budget, such as ppl=1% or kl=0.02.")
    if reference is None:
        return limits, None, None
    metric = load_object(reference)
    if not callable(metric):
        raise UsageError(f"Budget metric={reference}: {type(metric).__name__} cannot be called.")
    return limits, metric, drop
