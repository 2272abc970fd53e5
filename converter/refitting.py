"""Refitted projections for a plan, kept only if they bring the whole model nearer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.passes.calibrate.data import CalibrationData
from subquad.passes.calibrate.engine import Engine
from subquad.passes.calibrate.refit import refit_projections
from subquad.passes.calibrate.score import Score, Scorer
from subquad.passes.plan import Assignment

NO_NEARER = "it brings the outputs no nearer to the exact model on held-out inputs"


@dataclass(frozen=True)
class Refitted:
    """Weights to replace, by initializer, and what the report says of it."""

    weights: Mapping[str, NDArray[np.float32]]
    facts: Mapping[str, Any]


Accept = Callable[[Score, Engine], tuple[Score, str | None]]
"""More of the refitted model's score, and why it is not taken all the same."""


def refit_plan(
    engine: Engine,
    plan: Mapping[int, Assignment],
    data: CalibrationData,
    scorer: Scorer,
    before: Score,
    accept: Accept = lambda score, engine: (score, None),
) -> Refitted:
    """Refit the projections after replaced attentions.

    Args:
        engine: of the exact model; its sessions are closed.
        plan: the replaced sites.
        data: to fit on, and to judge by.
        scorer: of its held-out inputs, taught.
        before: of the plan as it is.
        accept: asked where the damage falls.
    """
    engine.close()  # the weights need not be there twice
    changed = engine.fresh()
    refits = refit_projections(changed, plan, data.calibration, data.heldout)
    feeds = [batch.feeds for batch in data.heldout]
    score = scorer.score(lambda finish: changed.run(feeds, plan, finish=finish))
    why: str | None = NO_NEARER
    if score.damage < before.damage:
        score, why = accept(score, changed)
    facts: dict[str, Any] = {
        "sites": [
            {
                "name": engine.split.sites[refit.rank].site.name,
                "before": refit.before,
                "after": refit.after,
                "applied": refit.values is not None,
            }
            for refit in refits
        ],
        "measured": score.to_json(),
    }
    if why is not None:
        return Refitted({}, {"applied": False, "why": why, **facts})
    weights = {refit.weight: refit.values for refit in refits if refit.values is not None}
    return Refitted(weights, {"applied": bool(weights), **facts})
