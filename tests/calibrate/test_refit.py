from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from exact_folder import VOCABULARY, ExactFolder
from subquad.passes.calibrate.engine import Engine
from subquad.passes.calibrate.measure import assignment_of
from subquad.passes.calibrate.refit import _fit, _Sums, refit_projections
from subquad.passes.plan import Assignment
from subquad.runtime.samples import Batch


def batches(seed: int, rows: int = 24, length: int = 60) -> list[Batch]:
    rng = np.random.default_rng(seed)
    mask = np.ones((rows, length), np.int64)
    mask[0, 40:] = 0
    ids = rng.integers(0, VOCABULARY, (rows, length))
    return [Batch(length, "right", {"input_ids": ids, "attention_mask": mask})]


def sums(given: NDArray[Any], change: NDArray[Any]) -> _Sums:
    return _Sums(given.T @ given, given.T @ change, float((change**2).sum()), 1.0)


def test_held_out_error_is_that_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    given, change = rng.normal(size=(200, 6)), rng.normal(size=(200, 4))
    step = rng.normal(size=(6, 4))
    want = float(((change - given @ step) ** 2).sum())
    assert sums(given, change).error(step) == pytest.approx(want)


def test_a_linear_change_is_undone() -> None:
    """The replacement scales what it gives; new weights can take that back completely."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(6, 4)).astype(np.float32)
    exact = rng.normal(size=(400, 6))
    given = exact @ np.diag([0.5, 2.0, 1.0, 0.7, 1.5, 0.9])
    change = (exact - given) @ weight
    halves = [sums(given[i::2], change[i::2]) for i in range(2)]
    refit = _fit(0, "w", weight, *halves)
    assert refit.values is not None
    # The smallest ridge is a thousandth.
    assert refit.after < 0.01 * refit.before


def test_noise_is_left_alone() -> None:
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(30, 4)).astype(np.float32)
    given, change = rng.normal(size=(80, 30)), rng.normal(size=(80, 4))
    refit = _fit(0, "w", weight, sums(given[::2], change[::2]), sums(given[1::2], change[1::2]))
    assert refit.values is None and refit.after == refit.before


def test_repair_brings_the_model_nearer(exact: ExactFolder) -> None:
    plan: dict[int, Assignment] = {0: assignment_of(exact.sites[0], "elu")}
    calibration, heldout, fresh = batches(1), batches(2), batches(3)
    plain = Engine(exact.split(), exact.path, threads=1)
    repaired = plain.fresh()
    (refit,) = refit_projections(repaired, plan, calibration, heldout)
    assert refit.values is not None and refit.after < 0.8 * refit.before
    assert not plain.weights

    def logits(engine: Engine, used: dict[int, Assignment]) -> NDArray[Any]:
        kept: list[NDArray[Any]] = []
        feeds = [batch.feeds for batch in fresh]
        engine.run(feeds, used, finish=lambda number, out: kept.append(out["logits"]))
        return kept[0]

    want, before = logits(plain, {}), logits(plain, plan)
    after = logits(repaired, plan)
    assert np.linalg.norm(after - want) < 0.95 * np.linalg.norm(before - want)


def test_layers_are_repaired_in_order(exact: ExactFolder) -> None:
    texts = {0: "elu", 1: "window:size=16,sinks=0", 2: "elu"}
    plan = {rank: assignment_of(exact.sites[rank], text) for rank, text in texts.items()}
    engine = Engine(exact.split(), exact.path, threads=1)
    found = refit_projections(engine, plan, batches(1), batches(2))
    assert [refit.rank for refit in found] == [0, 1, 2]
    assert all(refit.after <= refit.before for refit in found)
    alone = refit_projections(engine.fresh(), {2: plan[2]}, batches(1), batches(2))
    assert alone[0].before != found[2].before, "the layers before it matter"


def test_exact_sites_are_not_touched(exact: ExactFolder) -> None:
    engine = Engine(exact.split(), exact.path, threads=1)
    plan = {1: assignment_of(exact.sites[1], "elu")}
    (refit,) = refit_projections(engine, plan, batches(1), batches(2))
    assert refit.rank == 1 and set(engine.weights) <= {refit.weight}
