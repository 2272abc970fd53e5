"""What ``--budget`` of a plan may say: limits on metrics, and a metric of the user's own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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

    plain, own = _split(texts)
    reference, drop = own.get("metric"), None
    if "drop" in own:
        try:
            drop = float(own["drop"])
        except ValueError as error:
            raise UsageError(f"Budget drop={own['drop']}: not a number.") from error
        if not np.isfinite(drop) or drop < 0:
            raise UsageError(f"Budget drop={own['drop']}: must be 0 or more.")
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


def metric_value(metric: Metric, run: Runner) -> float:
    """What the user's ``metric`` returns for ``run``; NaN keeps no limit.

    Raises:
        UsageError: it raises, or returns no number.
    """
    from subquad.converter.module import USER_CODE_ERRORS, user_code_error

    try:
        value = metric(run)
    except USER_CODE_ERRORS as error:
        raise user_code_error("The metric failed", error) from error
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise UsageError(f"The metric must return a number, got {type(value).__name__}.")
    return float(value)


def metric_code(texts: Sequence[str]) -> str | None:
    """Hash of the file with the metric of a budget that was parsed: other code, other results.

    ``None`` where there is no metric or no file. What that file imports is not looked at.
    """
    module, _, _ = _split(texts)[1].get("metric", "").rpartition(":")
    if not module.endswith(".py"):
        module = getattr(sys.modules.get(module), "__file__", None) or ""
    return hashlib.sha256(Path(module).read_bytes()).hexdigest() if module else None


def _split(texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Limits as they are written, and what is said of a metric."""
    plain: list[str] = []
    own: dict[str, str] = {}
    for pair in (p.strip() for text in texts for p in text.split(",")):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name in ("metric", "drop"):
            if name in own:
                raise UsageError(f"Budget {name} is given twice; one metric can be kept.")
            own[name] = value
        elif pair:
            plain.append(pair)
    return plain, own
