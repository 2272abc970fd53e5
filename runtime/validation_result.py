"""What a validation found, and the sentences that say why it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from subquad.runtime.budget import EXACT_LIMIT
from subquad.runtime.jsonable import json_ready
from subquad.runtime.metamorphic import MetamorphicResult, Violation
from subquad.runtime.site_comparison import SiteResult

Verdict = Literal["pass", "fail", "measured"]


@dataclass(frozen=True)
class CaseResult:
    """One point of the lattice.

    Attributes:
        length, padding, rows: what ran.
        outputs: output name -> ``Difference.to_json``.
        logits: ``LogitsDifference.to_json`` where the model has logits.
    """

    length: int
    padding: str
    rows: int
    outputs: dict[str, dict[str, Any]]
    logits: dict[str, Any] | None


@dataclass(frozen=True)
class ValidationResult:
    """Everything that was compared.

    Attributes:
        verdict: ``pass``, ``fail``, or ``measured`` (approximate, and no budget to hold it to).
        reasons: why it failed, or what else a reader must know first.
        exact: whether all attentions are exact, so that the outputs must agree.
        synthetic: whether inputs were made up.
        data: one sentence about the inputs.
        budget: limits asked for.
        measured: the figures that budgets refer to.
        cases, sites, skipped: details; ``skipped`` has what could not run, with the reason.
        first_diverging: first site in graph order above ``site_tolerance``.
        metamorphic: ``None`` if it was switched off.
        notes: further remarks.
    """

    artifact: str
    verdict: Verdict
    reasons: tuple[str, ...]
    exact: bool
    synthetic: bool
    data: str
    budget: dict[str, float]
    measured: dict[str, float | None]
    cases: tuple[CaseResult, ...]
    sites: tuple[SiteResult, ...]
    site_tolerance: float
    first_diverging: SiteResult | None
    metamorphic: MetamorphicResult | None
    skipped: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    execution: dict[str, Any]
    seed: int
    seconds: float
    peak_rss_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(self)
        return result


def exact_violations(measured: Mapping[str, float | None]) -> list[str]:
    """The sentence for exact attentions that do not agree."""
    value = measured["rel"]
    if value is None or value <= EXACT_LIMIT:
        return []
    return [
        f"every attention is exact, so outputs may differ by fp32 rounding only (relative L2 up "
        f"to {EXACT_LIMIT:g}), but differ by {value:.3g}"
    ]


def unexpected_divergence(
    sites: Sequence[SiteResult], diverging: Sequence[SiteResult]
) -> list[str]:
    """An exact site that diverges although nothing before it is approximate."""
    for site in sorted(sites, key=lambda item: item.index):
        if site.method != "dense":
            return []
        if site in diverging:
            return [
                f"site {site.name} is exact and follows exact sites only, but differs from the "
                f"reference by {site.relative_l2:.3g} (length {site.length}, padding "
                f"{site.padding})"
            ]
    return []


def leak_sentences(violations: Sequence[Violation]) -> list[str]:
    """The first violation of each relation, in words."""
    sentences: dict[str, str] = {}
    for violation in violations:
        what = {
            "padding": "tokens under padding",
            "future": f"tokens from slot {violation.cut} on",
            "batch": "other rows of the batch",
            "pieces": "",
        }[violation.relation]
        where = f"(length {violation.length}, padding {violation.padding}, relative change "
        if violation.relation == "pieces":
            sentences.setdefault(
                violation.relation,
                f"a sequence in pieces gives another output {violation.output} than as a whole "
                f"{where}{violation.change:.3g})",
            )
            continue
        site = f"; the first attention that reacts is {violation.site}" if violation.site else ""
        sentences.setdefault(
            violation.relation,
            f"{what} change output {violation.output} where it may not see them {where}"
            f"{violation.change:.3g}){site}",
        )
    return list(sentences.values())
