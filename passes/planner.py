"""Choose a method for every attention: the cheapest plan that the budget allows.

1. Per site, only candidates on the lower convex hull of (price, predicted damage) can be part of
   a plan that minimises ``price + lambda * damage``. Ordered by damage per saving, the edges of
   all hulls form one path from the exact model to the cheapest one.
2. The last point of the path that keeps the budget is found by interpolation and bisection. Every
   point is judged by a run of the whole replaced model on held-out inputs, not by predictions.
   Where recall is limited, damage has a second part: the error where it is asked for.
3. From there, edges that the path had further on are tried one by one, and kept where the budget
   still holds.

A limit counts as kept if it is kept with one standard error to spare, where one is known, on all
held-out inputs together and on every kind of document. The run of a plan that clearly misses one of
them is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from subquad.passes.calibrate.candidates import Candidate, SiteMeasurement
from subquad.passes.calibrate.score import Figures, Score
from subquad.runtime.budget import AT_LEAST, Budget

REFINEMENTS = 6
"""Runs of the last step."""

SPARE = 1.0
"""Standard errors with which a limit must be kept."""

CLEARLY = 2.0
"""Standard errors beyond a limit at which a plan is not run to the end."""

Choice = Mapping[int, Candidate]
"""Rank of a site -> its replacement; the others stay exact."""

Judge = Callable[[Choice], Score]


@dataclass(frozen=True)
class PlanBudget:
    """What a plan must keep, on the worst kind of document.

    Attributes:
        limits: on the metrics of ``runtime/budget.py``.
        drop: how far the user's metric may fall below its value for the exact model.
        base: that value.
    """

    limits: Budget | None
    drop: float | None = None
    base: float | None = None

    def misses(self, score: Score) -> list[str]:
        """One sentence for each limit that is not kept."""
        sentences: list[str] = []
        if self.limits is not None:
            for name, figures in _parts(score).items():
                where = f" on {name}" if name else ""
                asked = figures.metrics.get("recall") is not None
                limits = self.limits if asked else self.limits.without("recall")
                found = limits.violations(figures.shifted(SPARE))
                sentences += [f"{sentence}{where}" for sentence in found]
        if self.drop is not None:
            assert self.base is not None
            value = score.custom
            if value is None or not value >= self.base - self.drop:
                sentences.append(
                    f"the metric is {value}, more than {self.drop:g} below {self.base:g}"
                )
        if not sentences and self.recall is not None and score.metrics.get("recall") is None:
            sentences.append("recall was not measured")
        return sentences

    @property
    def recall(self) -> float | None:
        """The limit on recall, which is judged on all kinds of documents together."""
        return None if self.limits is None else self.limits.limits.get("recall")

    @property
    def rest(self) -> PlanBudget:
        """Without recall, which is measured only where all else is kept."""
        return self if self.limits is None else replace(self, limits=self.limits.without("recall"))

    def is_hopeless(self, score: Score) -> bool:
        """Whether a limit is missed by more than chance explains, on some of the inputs.

        Only limits on what has a standard error count: ``kl`` and ``ppl``.
        """
        for figures in score.groups.values() or [score]:
            low = figures.shifted(-CLEARLY)
            for name, limit in (self.limits.limits if self.limits is not None else {}).items():
                value = low.get(name)
                # Written so that NaN misses the limit; an error of 0 is one that is not known.
                if value is not None and figures.errors.get(name) and not value <= limit:
                    return True
        return False

    def load(self, score: Score) -> float:
        """How much of the budget is used: 1 = all of it; of several limits, the tightest."""
        loads = [0.0]
        for figures in _parts(score).values():
            careful = figures.shifted(SPARE)
            for name, limit in (self.limits.limits if self.limits is not None else {}).items():
                value = careful.get(name)
                if value is None:
                    continue
                if name in AT_LEAST:
                    value, limit = 1.0 - value, 1.0 - limit
                loads.append(value / limit if limit > 0 else math.inf)
        if self.drop is not None and self.base is not None and score.custom is not None:
            fall = self.base - score.custom
            loads.append(fall / self.drop if self.drop > 0 else math.inf)
        return max(loads)


def _parts(score: Score) -> dict[str, Figures]:
    """Where limits must hold: all together, and every kind of document."""
    return {"": score, **score.groups}


@dataclass(frozen=True)
class Step:
    """An edge of one site's hull: from one candidate to the next cheaper one.

    Attributes:
        rank: of the site.
        candidate: the cheaper one.
        saving: of price.
        damage: that it does besides; see ``SiteMeasurement.harm``.
    """

    rank: int
    candidate: Candidate
    saving: float
    damage: float

    @property
    def ratio(self) -> float:
        return self.damage / self.saving


@dataclass(frozen=True)
class Judged:
    """One plan that was run.

    Attributes:
        choice: what it replaces.
        price: sum over all sites.
        predicted: sum of predicted damages.
        harm: the same with what recall suffers; equal where it is not limited.
        score: of the run.
        misses: limits it does not keep.
    """

    choice: Choice
    price: float
    predicted: float
    harm: float
    score: Score
    misses: tuple[str, ...]


@dataclass(frozen=True)
class SearchResult:
    """The plan, and what else was run.

    Attributes:
        chosen: the cheapest plan that keeps the budget; the exact model if no other does.
        judged: all plans in the order of their runs.
        exact_price: of the exact model.
    """

    chosen: Judged
    judged: tuple[Judged, ...]
    exact_price: float

    @property
    def front(self) -> tuple[Judged, ...]:
        """Plans of which none is both cheaper and less damaging, cheapest first."""
        found: list[Judged] = []
        for item in sorted(self.judged, key=lambda j: (j.price, j.score.damage)):
            if not found or item.score.damage < found[-1].score.damage:
                found.append(item)
        return tuple(found)


def search(
    sites: Sequence[SiteMeasurement],
    budget: PlanBudget,
    judge: Judge,
    *,
    refinements: int = REFINEMENTS,
) -> SearchResult:
    """Find the plan; ``judge`` runs one.

    Args:
        sites: with all candidates.
        budget: what to keep.
        judge: runs a plan.
        refinements: runs of the last step.
    """
    run = _Search(sites, budget, judge)
    run.refine(run.bisect(path_of(sites)), refinements)
    return run.result()


def path_of(sites: Sequence[SiteMeasurement]) -> list[Step]:
    """Edges of all hulls by damage per saving."""
    steps = [step for rank, site in enumerate(sites) for step in steps_of(rank, site)]
    # Stable: steps of one site stay in their order, for their ratios rise.
    return sorted(steps, key=lambda step: step.ratio)


def steps_of(rank: int, site: SiteMeasurement) -> list[Step]:
    """The hull of one site, from the exact attention to its cheapest candidate."""
    points = sorted(
        (site.harm(candidate), candidate.price, number)
        for number, candidate in enumerate(site.candidates)
        if candidate.price < site.exact_price
    )
    steps: list[Step] = []
    damage, price = 0.0, site.exact_price
    while True:
        # The next corner of the hull: the least damage per saving; of equals, the cheapest.
        ahead = [(max(d - damage, 0.0) / (price - p), p, d, n) for d, p, n in points if p < price]
        if not ahead:
            return steps
        _, next_price, next_damage, number = min(ahead)
        steps.append(
            Step(
                rank,
                site.candidates[number],
                price - next_price,
                max(next_damage - damage, 0.0),
            )
        )
        damage, price = max(next_damage, damage), next_price


def instead(
    found: SearchResult,
    sites: Sequence[SiteMeasurement],
    budget: PlanBudget,
    judge: Judge,
    choice: Choice,
) -> SearchResult:
    """``found`` with ``choice`` as the plan, if that keeps the budget; it is run in any case."""
    judged = judge_choice(sites, budget, judge, choice)
    chosen = found.chosen if judged.misses else judged
    return replace(found, chosen=chosen, judged=(*found.judged, judged))


def judge_choice(
    sites: Sequence[SiteMeasurement], budget: PlanBudget, judge: Judge, choice: Choice
) -> Judged:
    """Run one plan."""
    score = judge(choice)
    prices = [
        choice[rank].price if rank in choice else site.exact_price
        for rank, site in enumerate(sites)
    ]
    predicted = sum(site.damage(choice.get(rank)) for rank, site in enumerate(sites))
    harm = sum(site.harm(choice.get(rank)) for rank, site in enumerate(sites))
    return Judged(dict(choice), sum(prices), predicted, harm, score, tuple(budget.misses(score)))


class _Search:
    def __init__(self, sites: Sequence[SiteMeasurement], budget: PlanBudget, judge: Judge) -> None:
        self._sites = sites
        self._budget = budget
        self._judge = judge
        self._judged: list[Judged] = []
        self.best = self._run({})

    def bisect(self, path: Sequence[Step]) -> list[Step]:
        """Longest prefix of the path that keeps the budget; what the path has beyond the next step.

        It becomes the best plan if it is cheaper than that.
        """
        low, high = 0, len(path)
        if self.best.misses:
            return []
        guess = self._first_guess(path)
        runs = 0
        while low < high:
            # Every third run halves the rest, however bad the guesses are.
            middle = (low + high + 1) // 2 if runs % 3 == 2 else min(max(guess, low + 1), high)
            judged = self._run(_prefix(path, middle))
            runs += 1
            if judged.misses:
                high = middle - 1
            else:
                low = middle
                if judged.price < self.best.price:
                    self.best = judged
            guess = self._guess(path, judged)
        return list(path[low + 1 :])

    def refine(self, steps: Sequence[Step], tries: int) -> None:
        """Single steps beyond the best plan; a site whose step failed is left as it is."""
        closed: set[int] = set()
        for step in steps:
            if tries == 0:
                return
            current = self.best.choice.get(step.rank)
            dearer = current is None or step.candidate.price < current.price
            if step.rank in closed or not dearer:
                continue
            tries -= 1
            judged = self._run({**self.best.choice, step.rank: step.candidate})
            if judged.misses:
                closed.add(step.rank)
            else:
                self.best = judged

    def _first_guess(self, path: Sequence[Step]) -> int:
        limits = self._budget.limits.limits if self._budget.limits is not None else {}
        if "kl" in limits:
            return _reach(path, limits["kl"])
        # Seen on decoders: perplexity rises by a third of the KL, or less.
        return _reach(path, 3.0 * limits["ppl"]) if "ppl" in limits else len(path) // 2

    def _guess(self, path: Sequence[Step], judged: Judged) -> int:
        """Where the budget would be used up if it were used in proportion to predicted damage."""
        load = self._budget.load(judged.score)
        if not load > 0:
            return len(path)
        return _reach(path, judged.harm / load)

    def result(self) -> SearchResult:
        exact = sum(site.exact_price for site in self._sites)
        return SearchResult(self.best, tuple(self._judged), exact)

    def _run(self, choice: Choice) -> Judged:
        for known in self._judged:
            if known.choice == choice:
                return known
        judged = judge_choice(self._sites, self._budget, self._judge, choice)
        self._judged.append(judged)
        return judged


def _prefix(path: Sequence[Step], count: int) -> dict[int, Candidate]:
    choice: dict[int, Candidate] = {}
    for step in path[:count]:
        choice[step.rank] = step.candidate
    return choice


def _reach(path: Sequence[Step], damage: float) -> int:
    """Steps of the path that are predicted to do at most this damage together."""
    total = 0.0
    for count, step in enumerate(path):
        total += step.damage
        if not total <= damage:
            return count
    return len(path)
