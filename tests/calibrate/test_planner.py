"""The search on measured sites whose true damage is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from subquad.passes.calibrate.candidates import Candidate, SiteMeasurement
from subquad.passes.calibrate.score import Figures, Score
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.planner import Choice, PlanBudget, instead, search, steps_of
from subquad.runtime.budget import Budget

NOTHING = SiteStatistics(1, (0.0,), (0.0,), {}, {})


def site(
    rank: int, sensitivity: float | None, candidates: list[tuple[float, float]], exact: float = 100
) -> SiteMeasurement:
    """``candidates``: (error, price)."""
    return SiteMeasurement(
        name=f"site.{rank}",
        index=rank,
        exact_price=exact,
        sensitivity=sensitivity,
        error_in="residual stream",
        statistics=NOTHING,
        candidates=tuple(
            Candidate(f"m{n}", {64: error}, {}, price)
            for n, (error, price) in enumerate(candidates)
        ),
        declined={},
    )


def budget(text: str) -> PlanBudget:
    return PlanBudget(Budget.parse([text]))


class Truth:
    """A model whose damage is what the prediction says, times a factor."""

    def __init__(self, sites: list[SiteMeasurement], factor: float = 1.0, error: float = 0.0):
        self.sites, self.factor, self.error = sites, factor, error
        self.runs = 0

    def damage(self, choice: Choice) -> float:
        return self.factor * sum(self.sites[r].damage(c) for r, c in choice.items())

    def price(self, choice: Choice) -> float:
        return sum(
            choice[r].price if r in choice else s.exact_price for r, s in enumerate(self.sites)
        )

    def __call__(self, choice: Choice) -> Score:
        self.runs += 1
        kl = self.damage(choice)
        return Score({"kl": kl}, {"kl": self.error if choice else 0.0}, kl)

    def optimum(self, limit: float) -> float:
        options = [[None, *s.candidates] for s in self.sites]
        best = math.inf
        for combination in itertools.product(*options):
            choice = {r: c for r, c in enumerate(combination) if c is not None}
            if self.damage(choice) <= limit:
                best = min(best, self.price(choice))
        return best


def random_sites(rng: np.random.Generator, count: int) -> list[SiteMeasurement]:
    sites = []
    for rank in range(count):
        prices = np.sort(rng.uniform(5, 120, rng.integers(0, 4)))
        errors = np.sort(rng.uniform(0.001, 0.5, len(prices)))[::-1]
        pairs = [(float(e), float(p)) for e, p in zip(errors, prices, strict=True)]
        sites.append(site(rank, float(rng.uniform(0.05, 5)), pairs))
    return sites


def test_steps_are_the_convex_hull() -> None:
    # (0.4, 20) is above the line from (0.1, 60) to (0.41, 10): never worth it.
    steps = steps_of(0, site(0, 1.0, [(0.41, 10), (0.4, 20), (0.1, 60), (0.5, 100), (0.3, 130)]))
    assert [step.candidate.price for step in steps] == [60, 10]
    assert [step.saving for step in steps] == [40, 50]
    assert steps[0].ratio < steps[1].ratio
    assert sum(step.damage for step in steps) == pytest.approx(0.41**2)


def test_what_costs_more_is_never_chosen() -> None:
    assert steps_of(0, site(0, 1.0, [(0.0, 100), (0.0, 150)])) == []


@pytest.mark.parametrize("seed", range(20))
def test_near_the_optimum_and_inside_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sites = random_sites(rng, 5)
    truth = Truth(sites, factor=float(rng.uniform(0.5, 2)))
    limit = float(rng.choice([0.001, 0.02, 0.2]))
    found = search(sites, budget(f"kl={limit}"), truth)
    assert not found.chosen.misses
    assert truth.damage(found.chosen.choice) <= limit
    # A greedy filling of a knapsack is off by at most one item.
    assert found.chosen.price <= truth.optimum(limit) + 100
    assert found.chosen.price == pytest.approx(truth.price(found.chosen.choice))
    assert truth.runs <= 3 + math.ceil(math.log2(1 + 15)) + 6


def test_everything_is_replaced_where_all_of_it_fits() -> None:
    sites = random_sites(np.random.default_rng(0), 6)
    truth = Truth(sites)
    found = search(sites, budget("kl=1000"), truth)
    assert found.chosen.price == truth.optimum(1000)
    assert truth.runs <= 3


def test_the_exact_model_is_kept_where_nothing_fits() -> None:
    sites = [site(0, 10.0, [(0.5, 10)]), site(1, 10.0, [(0.4, 10)])]
    found = search(sites, budget("kl=0.001"), Truth(sites))
    assert found.chosen.choice == {} and found.chosen.price == 200


def test_refinement_skips_a_step_that_does_not_fit() -> None:
    # The second best step is too much, the third would fit.
    sites = [site(0, 1.0, [(0.1, 50)]), site(1, 1.0, [(1.0, 1)], 1000), site(2, 1.0, [(0.1, 99)])]
    found = search(sites, budget("kl=0.03"), Truth(sites))
    assert set(found.chosen.choice) == {0, 2}


def test_one_standard_error_is_spared() -> None:
    sites = [site(0, 1.0, [(0.1, 50)])]
    assert search(sites, budget("kl=0.0101"), Truth(sites)).chosen.choice
    assert not search(sites, budget("kl=0.0101"), Truth(sites, error=0.001)).chosen.choice


def test_sites_without_sensitivity_come_first() -> None:
    sites = [site(0, None, []), site(1, 0.0, [(0.3, 50)]), site(2, 1.0, [(0.3, 50)])]
    found = search(sites, budget("kl=0.01"), Truth(sites))
    assert set(found.chosen.choice) == {1}


def test_front_has_no_dominated_plan() -> None:
    sites = random_sites(np.random.default_rng(4), 8)
    front = search(sites, budget("kl=0.05"), Truth(sites)).front
    prices = [item.price for item in front]
    damages = [item.score.damage for item in front]
    assert prices == sorted(prices) and damages == sorted(damages, reverse=True)
    assert front[-1].choice == {}


def test_a_user_s_metric_may_drop_by_its_drop() -> None:
    sites = [site(0, 1.0, [(0.1, 50)]), site(1, 1.0, [(0.5, 50)])]

    def judge(choice: Choice) -> Score:
        return Score({}, {}, 0.0, custom=90.0 - 4 * len(choice))

    found = search(sites, PlanBudget(None, drop=5.0, base=90.0), judge)
    assert set(found.chosen.choice) == {0}


def test_another_choice_is_taken_only_within_the_budget() -> None:
    sites = [site(0, 1.0, [(0.1, 50), (0.3, 20)])]
    limit = budget("kl=0.05")
    found = search(sites, limit, Truth(sites))
    (chosen,) = found.chosen.choice.values()
    assert chosen.error == 0.1
    worse = instead(found, sites, limit, Truth(sites), {0: sites[0].candidates[1]})
    assert worse.chosen == found.chosen and len(worse.judged) == len(found.judged) + 1
    exact = instead(found, sites, limit, Truth(sites), {})
    assert exact.chosen.choice == {}


class Forgetful(Truth):
    """Recall falls with the squares of the recall errors."""

    def __call__(self, choice: Choice) -> Score:
        score = super().__call__(choice)
        lost = sum((candidate.recall_error or 0.0) ** 2 for candidate in choice.values())
        recall = {"recall": 1.0 - lost}
        return Score({**score.metrics, **recall}, {**score.errors, "recall": 0.001}, score.damage)


def forgetful_sites(count: int) -> list[SiteMeasurement]:
    """The first candidate of each does almost no damage, but forgets; the second does not."""
    return [
        replace(
            found,
            candidates=tuple(
                replace(candidate, recall_error=error)
                for candidate, error in zip(found.candidates, (0.3, 0.01), strict=True)
            ),
        )
        for found in (site(rank, 1.0, [(0.001, 50), (0.1, 60)]) for rank in range(count))
    ]


def test_what_forgets_comes_late_where_recall_is_limited() -> None:
    limits = PlanBudget(Budget.parse(["kl=1", "recall=95%"]))
    sites = forgetful_sites(8)
    found = search(sites, limits, Forgetful(sites))
    assert {c.text for c in found.chosen.choice.values()} == {"m1"}
    assert found.chosen.price == 8 * 60
    assert found.chosen.harm > found.chosen.predicted
    # Without the errors, the cheapest candidates are first on the path, and nothing else is.
    blind = [
        replace(s, candidates=tuple(replace(c, recall_error=None) for c in s.candidates))
        for s in sites
    ]
    assert [s.candidate.text for s in steps_of(0, blind[0])] == ["m0"]
    assert [s.candidate.text for s in steps_of(0, sites[0])] == ["m1", "m0"]


def test_single_steps_take_what_recall_can_spare() -> None:
    sites = forgetful_sites(4)
    limits = PlanBudget(Budget.parse(["kl=1", "recall=85%"]))
    found = search(sites, limits, Forgetful(sites))
    assert sorted(c.text for c in found.chosen.choice.values()) == ["m0", "m1", "m1", "m1"]


def test_recall_must_be_kept_with_a_standard_error_to_spare() -> None:
    limits = PlanBudget(Budget.parse(["kl=1", "recall=95%"]))

    def score(recall: float | None, error: float = 0.0, kl: float = 0.0) -> Score:
        metrics = {"kl": kl, "recall": recall}
        group = Figures({"kl": kl}, {})
        return Score(metrics, {"recall": error}, kl, groups={"a": group, "b": group})

    assert limits.misses(score(0.97, 0.01)) == []
    assert "recall is 0.94, below the budget of 0.95" in limits.misses(score(0.97, 0.03))[0]
    assert limits.misses(score(None)) == ["recall was not measured"]
    assert len(limits.misses(score(None, kl=2.0))) == 3, "kl: all together, a and b"
    assert limits.rest.misses(score(None)) == []
    assert limits.load(score(0.975)) == pytest.approx(0.5)
    assert limits.load(score(0.975, 0.025)) == pytest.approx(1.0)
