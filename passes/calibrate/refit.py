"""Closed-form repair: output projections that make up for what a replacement changes.

For a replaced attention with output ``A`` per token where the exact one gives ``E``, and a
projection ``W``, the change of the weights that brings ``A (W + D)`` nearest to ``E W`` is

    D = (A^T A + r I)^-1 A^T (E - A) W

Sums run over calibration tokens, in float64; ``r`` is a share of the mean of ``A^T A``'s diagonal.
A share is taken, and the repair applied at all, only if the error on held-out tokens falls. Layers
are repaired in order, each on the activations that the layers before it really give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.passes.calibrate.engine import Engine, State
from subquad.passes.calibrate.segments import Projection
from subquad.passes.plan import Assignment
from subquad.runtime.samples import Batch

RIDGES = (1e-3, 1e-2, 1e-1)
LEAST_GAIN = 0.02
"""Share of the squared held-out error that a repair must remove."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Refit:
    """What became of one projection.

    Attributes:
        rank: of the site.
        weight: name of the initializer.
        before, after: error of the projected attention on held-out tokens, relative to the exact
            one.
        values: the new weights; ``None`` if they are left as they are.
    """

    rank: int
    weight: str
    before: float
    after: float
    values: NDArray[np.float32] | None


@dataclass
class _Sums:
    """Of one half of the inputs."""

    gram: Matrix
    cross: Matrix
    change: float = 0.0
    size: float = 0.0

    def error(self, step: Matrix) -> float:
        """Squared error left after ``step``."""
        left = self.change - 2 * float((step * self.cross).sum())
        return max(left + float((step * (self.gram @ step)).sum()), 0.0)


def refit_projections(
    engine: Engine,
    plan: Mapping[int, Assignment],
    calibration: Sequence[Batch],
    heldout: Sequence[Batch],
) -> list[Refit]:
    """Repair all replaced sites whose projection is known and used nowhere else.

    Args:
        engine: a fresh one; its weights become the repaired ones.
        plan: the replaced sites.
        calibration, heldout: inputs to fit on, and to judge by.
    """
    weights = dict(engine.weights)
    engine.weights = weights  # read when a segment is opened, which is after its repair
    found: list[Refit] = []
    count = len(calibration)

    def visit(rank: int, states: Sequence[State]) -> None:
        projection = engine.split.sites[rank].projection
        if rank not in plan or isinstance(projection, str) or projection.weight is None:
            return
        if engine.split.uses(projection.weight) != 1:
            return
        original = engine.split.weight(projection.weight, engine.folder)
        halves = [
            _sums(engine, rank, half, plan[rank], projection, original)
            for half in (states[:count], states[count:])
        ]
        refit = _fit(rank, projection.weight, original, *halves)
        if refit.values is not None:
            weights[projection.weight] = refit.values
        found.append(refit)

    engine.run([batch.feeds for batch in (*calibration, *heldout)], plan, visit=visit)
    return found


def _sums(
    engine: Engine,
    rank: int,
    states: Sequence[State],
    assignment: Assignment,
    projection: Projection,
    weight: NDArray[np.float32],
) -> _Sums:
    rows, columns = weight.shape
    sums = _Sums(np.zeros((rows, rows)), np.zeros((rows, columns)))
    matrix = weight.astype(np.float64)
    for state in states:
        real = _real_tokens(engine, rank, state)
        exact, given = (
            engine.operand(rank, state, engine.attention(rank, state, chosen).output)
            .reshape(-1, rows)[real]
            .astype(np.float64)
            for chosen in (None, assignment)
        )
        wanted = exact @ matrix
        change = wanted - given @ matrix
        sums.gram += given.T @ given
        sums.cross += given.T @ change
        sums.change += float(np.square(change).sum())
        sums.size += float(np.square(wanted).sum())
    return sums


def _real_tokens(engine: Engine, rank: int, state: State) -> NDArray[np.bool_] | slice:
    """Tokens that count: of a self-attention, those that are not padding."""
    split_site = engine.split.sites[rank]
    name = split_site.inputs.get("key_mask")
    if name is None or not split_site.site.is_self:
        return slice(None)
    return np.asarray(state[name], np.bool_).reshape(-1)


def _fit(rank: int, name: str, weight: NDArray[np.float32], fitted: _Sums, held: _Sums) -> Refit:
    before = held.error(np.zeros_like(fitted.cross))
    best, step = before * (1 - LEAST_GAIN), None
    diagonal = float(np.trace(fitted.gram)) / len(fitted.gram)
    for share in RIDGES:
        if not diagonal > 0:
            break
        ridge = share * diagonal * np.eye(len(fitted.gram))
        # Rounded to what the model will hold, so that what is judged is what ships.
        new = (weight + np.linalg.solve(fitted.gram + ridge, fitted.cross)).astype(np.float32)
        trial = new.astype(np.float64) - weight
        if held.error(trial) < best:
            best, step = held.error(trial), new
    size = max(held.size, np.finfo(np.float64).tiny)
    after = before if step is None else best
    return Refit(rank, name, float(np.sqrt(before / size)), float(np.sqrt(after / size)), step)
