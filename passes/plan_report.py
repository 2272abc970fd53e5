"""A search's result as a plan file: what each site becomes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subquad.passes.calibrate.branches import Branches
from subquad.passes.calibrate.candidates import Candidate, SiteMeasurement
from subquad.passes.calibrate.measure import assignment_of, site_price
from subquad.passes.calibrate.score import Figures
from subquad.passes.plan import DENSE
from subquad.passes.plan_file import PlanFile, SitePlan
from subquad.passes.planner import Judged, SearchResult, steps_of
from subquad.passes.prices import Prices, cheapest_length
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection
from subquad.runtime.manifest import Manifest

CROSSOVER_LENGTHS = tuple(2**k for k in range(6, 18))


def plan_file(
    manifest: Manifest,
    measured: list[SiteMeasurement],
    found: SearchResult,
    prices: Prices,
    facts: Mapping[str, Any],
    branches: Mapping[int, Branches] | None = None,
) -> PlanFile:
    """The plan with everything that explains it; no timings.

    Args:
        manifest: of the exact model.
        measured, found: candidates, and the search among them.
        prices: that were used.
        facts: further entries.
        branches: rank of a site -> what was seen of the hybrid chosen there, be it kept or not.
    """
    sites = {record.site["name"]: record.site for record in manifest.sites}
    entries = []
    for rank, site in enumerate(measured):
        chosen = found.chosen.choice.get(rank)
        raised = AttentionSite.from_json(sites[site.name])
        price = site.exact_price if chosen is None else chosen.price
        entry: dict[str, Any] = {
            "exact_price": site.exact_price,
            "price": price,
            "sensitivity": _rounded(site.sensitivity),
            "error_in": site.error_in,
            "candidates": [_candidate(site, candidate) for candidate in site.candidates],
            "declined": dict(site.declined),
        }
        if chosen is not None:
            assignment = assignment_of(raised, chosen.text)
            granularity = assignment.method.causal_granularity(assignment.params)
            entry["causal_granularity"] = granularity
            entry["crossover_length"] = _crossover(raised, chosen, prices)
        why = _why(rank, site, chosen)
        seen = (branches or {}).get(rank)
        if seen is not None:
            entry["branches"] = seen.to_json()
            kept = chosen is not None and seen.method == chosen.text
            why += f"; {seen.verdict}" if kept else f"; instead of {seen.method}: {seen.verdict}"
        entries.append(
            SitePlan(
                name=site.name,
                method=DENSE if chosen is None else chosen.text,
                why=why,
                facts=entry,
                fitted=None if chosen is None else chosen.fitted,
            )
        )
    best = found.chosen
    return PlanFile(
        source={"name": manifest.source["name"], "hash": manifest.source["hash"]},
        sites=tuple(entries),
        facts={
            **facts,
            "prices": {"unit": prices.unit, "source": prices.source},
            "exact_price": found.exact_price,
            "price": best.price,
            "saving": _saving(best, found),
            "predicted_damage": _rounded(best.predicted),
            "measured": _score(best),
            "front": [_point(item, found) for item in found.front],
            "runs": len(found.judged),
        },
    )


def _why(rank: int, site: SiteMeasurement, chosen: Candidate | None) -> str:
    if chosen is not None:
        saved = 1 - chosen.price / site.exact_price
        return (
            f"saves {saved:.0%} at a relative error of {chosen.error:.2g} in the "
            f"{site.error_in}; predicted damage {site.damage(chosen):.2g}{_recalled(chosen)}"
        )
    steps = steps_of(rank, site)
    if steps:
        first = steps[0]
        return (
            f"kept exact: {first.candidate.text} would save "
            f"{first.saving / site.exact_price:.0%} at a predicted damage of {first.damage:.2g}, "
            "and the budget goes further elsewhere"
        )
    if site.candidates:
        return "kept exact: no candidate is cheaper than the exact attention at these lengths"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in site.declined.items())
    return f"kept exact: no candidate. {reasons}"


def _recalled(chosen: Candidate) -> str:
    error = chosen.recall_error
    return "" if error is None else f"; relative error where recall is asked for {error:.2g}"


def _candidate(site: SiteMeasurement, candidate: Candidate) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "method": candidate.text,
        "errors": {str(n): _rounded(error) for n, error in candidate.errors.items()},
        "price": _rounded(candidate.price),
        "predicted_damage": _rounded(site.damage(candidate)),
    }
    if candidate.recall_error is not None:
        entry["recall_error"] = _rounded(candidate.recall_error)
    if candidate.fitted is not None:
        entry["fitted"] = {
            name: [_rounded(x) for x in getattr(candidate.fitted, name)]
            for name in ("before", "after")
        }
    if candidate.densities:
        entry["densities"] = {str(n): _rounded(x) for n, x in candidate.densities.items()}
    return entry


def _crossover(site: AttentionSite, chosen: Candidate, prices: Prices) -> int | None:
    """Least length from which the choice is cheaper than the exact attention."""
    assignment, exact = assignment_of(site, chosen.text), assignment_of(site, DENSE)

    def price(length: int) -> float:
        found = site_price(assignment, [length], 1, prices, chosen.densities)
        return float("inf") if isinstance(found, Rejection) else found

    def exact_price(length: int) -> float:
        found = site_price(exact, [length], 1, prices, {})
        return 0.0 if isinstance(found, Rejection) else found

    return cheapest_length(price, exact_price, CROSSOVER_LENGTHS)


def _saving(judged: Judged, found: SearchResult) -> float | None:
    return _rounded(1 - judged.price / found.exact_price) if found.exact_price else None


def _score(judged: Judged) -> dict[str, Any]:
    score = judged.score
    entry = _figures(score)
    if score.groups:
        entry["groups"] = {name: _figures(figures) for name, figures in score.groups.items()}
    if score.custom is not None:
        entry["custom"] = _rounded(score.custom)
    if score.share < 1:
        entry["share_of_inputs"] = _rounded(score.share)
    return entry


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "metrics": {k: _rounded(v) for k, v in figures.metrics.items() if v is not None},
        "standard_errors": {k: _rounded(v) for k, v in figures.errors.items()},
    }


def _point(judged: Judged, found: SearchResult) -> dict[str, Any]:
    return {
        "price": judged.price,
        "saving": _saving(judged, found),
        "measured": _score(judged),
        "predicted_damage": _rounded(judged.predicted),
        "keeps_budget": not judged.misses,
        "replaced": len(judged.choice),
    }


def _rounded(value: float | None) -> float | None:
    """To what is known of it: the last digits of a float32 sum are noise."""
    return None if value is None else float(f"{value:.5g}")
