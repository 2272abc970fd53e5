"""Switching branches of hybrids off on held-out inputs, and fitting methods that were forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from subquad.passes.calibrate.branches import Plan, Run
from subquad.passes.calibrate.engine import Engine, State
from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.calibrate.score import Score, Scorer
from subquad.passes.plan import Assignment
from subquad.runtime.manifest import Manifest
from subquad.runtime.samples import Batch

if TYPE_CHECKING:
    from subquad.converter.conversion_report import Progress

BRANCH_TOKENS = 8192
"""Held-out tokens, of the greatest length, on which branches are switched off."""


FIT_TOKENS = 65536
"""Calibration tokens of each length that methods are fitted to; they take samples of queries."""


def branch_runner(
    manifest: Manifest, exact: Engine, engine: Engine, heldout: Sequence[Batch]
) -> Run:
    """Runs plans on some of the held-out inputs.

    Args:
        manifest: of the exact model.
        exact: runs it.
        engine: runs plans, maybe with other weights.
        heldout: as of the plan.
    """
    longest = max(batch.length for batch in heldout)
    batches = [batch for batch in heldout if batch.length == longest]
    rows = len(next(iter(batches[0].feeds.values())))
    batches = batches[: max(1, BRANCH_TOKENS // max(1, rows * longest))]
    scorer = Scorer(manifest, batches)
    feeds = [batch.feeds for batch in batches]

    def run(plan: Plan) -> Score:
        if not scorer.is_taught:
            scorer.teach(lambda finish: exact.run(feeds, {}, finish=finish))
        return scorer.score(lambda finish: engine.run(feeds, plan, finish=finish))

    return run


def with_fits(
    engine: Engine,
    plan: Sequence[Assignment],
    calibration: Sequence[Batch],
    progress: Progress | None = None,
) -> list[Assignment]:
    """``plan`` with fitted tensors where methods learn and have none yet.

    Args:
        engine: of the exact model, whose activations are fitted to.
        plan: one assignment per site.
        calibration: inputs, of which some are used, see ``FIT_TOKENS``.
        progress: called with a message and the share done.
    """
    calibration = spread(calibration)
    learning = {a.site.name: a for a in plan if a.method.learns and a.fitted is None}
    if not learning:
        return list(plan)
    fits: dict[str, Fitted | None] = {}

    def visit(rank: int, states: Sequence[State]) -> None:
        split_site = engine.split.sites[rank]
        assignment = learning.get(split_site.site.name)
        if assignment is None:
            return
        samples = [
            {role: state[name] for role, name in split_site.inputs.items()} for state in states
        ]
        site = assignment.site
        fits[site.name] = assignment.method.calibrate(site, assignment.params, samples)
        if progress is not None:
            progress(f"fitted {site.name}", len(fits) / len(learning))

    engine.run([batch.feeds for batch in calibration], {}, visit=visit)
    return [replace(a, fitted=fits.get(a.site.name, a.fitted)) for a in plan]


def spread(calibration: Sequence[Batch]) -> list[Batch]:
    """Every n-th batch of each length, so that the activations of all fit into memory."""
    chosen: list[Batch] = []
    for length in sorted({batch.length for batch in calibration}):
        batches = [batch for batch in calibration if batch.length == length]
        tokens = sum(batch.rows * max(1, length) for batch in batches)
        chosen += batches[:: -(-tokens // FIT_TOKENS)]
    return chosen
