"""Random and local search over a parameter space: who is tried next, and who is best.

A candidate is timed in turns with the best so far and with the defaults; it becomes the best when
three quarters of its rounds beat the best's of the same round. A noisy machine slows all three, so
it crowns nobody.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from subquad.kernels.templates.space import Params, Space
from subquad.kernels.tuning.records import Status

logger = logging.getLogger(__name__)

Values = tuple[tuple[str, int], ...]
"""Parameters, sorted by name."""

GENERATION = 8
"""Candidates compiled together, at most: the compiler takes seconds to start."""

COMPILE_SHARE = 0.3
"""Of the time left, spent on compiling a generation: what is compiled must be measured too."""

PARENTS = 4
"""How many of the best are varied."""

SEARCH_ROUNDS, CONFIRM_ROUNDS = 7, 21
GIVE_UP = 1.15
"""A candidate this much slower than the best after a few rounds gets no more of them."""

CONFIRM_SHARE = 0.15
"""Of all the time, kept for comparing the winner with the defaults."""


@dataclass(frozen=True)
class Trial:
    """What came out of one candidate.

    Attributes:
        status: see ``Status``.
        reason: why not ``ok``.
        times: ``default``, ``candidate`` and, where it is not the default, ``best`` -> seconds per
            round; empty unless ``ok``.
    """

    status: Status
    reason: str = ""
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def ratios(self, other: str) -> tuple[float, float, float]:
        """Quartiles of the candidate's time over that of ``other``, paired within rounds."""
        return quartiles(self.times["candidate"], self.times.get(other, self.times["default"]))


class Bench(Protocol):
    """Compiles and times the candidates of one kernel."""

    @property
    def lanes(self) -> int:
        """Candidates timed at once."""

    @property
    def compilers(self) -> int:
        """Candidates compiled at once."""

    def prepare(self, candidates: Sequence[Params], seconds: float) -> list[str]:
        """Compile what will be measured; for each, why it cannot be, or ""."""

    def measure(
        self, candidate: Params, best: Params, default: Params, rounds: int, seconds: float
    ) -> Trial:
        """Check ``candidate`` against the reference, then time all three in turns."""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        params: the best; the defaults where nothing beats them.
        ratios: quartiles of their time over that of the defaults, from the last comparison.
        rounds: of that comparison; 0: there was none.
        trials: candidates tried, by outcome.
        reason: why nothing was found; "" = the parameters are the result of a search.
    """

    params: Values
    ratios: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rounds: int = 0
    trials: Mapping[Status, int] = field(default_factory=dict)
    reason: str = ""


Report = Callable[[Values, Trial, bool], None]
"""Takes parameters, what came out, and whether this was the last comparison."""


def search(
    space: Space,
    bench: Bench,
    *,
    trials: int,
    seconds: float,
    seed: str,
    known: Mapping[Values, float | None] | None = None,
    start: Sequence[Params] = (),
    report: Report = lambda params, trial, confirmed: None,
) -> Found:
    """Look for parameters that beat the defaults.

    Args:
        space: where to look.
        bench: what compiles and measures.
        trials: candidates to try, at most; those in ``known`` do not count.
        seconds: for everything.
        seed: of the order; equal seeds and equal outcomes give equal searches.
        known: tried before -> median time over that of the defaults, ``None`` if failed or wrong;
            not tried again unless in ``start``.
        start: parameters to begin with, such as the best of an earlier search; then come the
            ``starts`` of the space.
        report: called for every candidate.
    """
    end = time.monotonic() + seconds
    default = values_of(space.defaults)
    state = _State(bench, default, {**(known or {}), default: 1.0}, report)
    begin = time.monotonic()
    refusal = bench.prepare([space.defaults], seconds)[0]
    compiling = time.monotonic() - begin
    if refusal:
        return state.nothing(f"the defaults were not compiled: {refusal}")
    left = end - time.monotonic()
    if left <= 0:
        return state.nothing("no time was left to measure anything")
    begin = time.monotonic()
    first = bench.measure(space.defaults, space.defaults, space.defaults, 1, left)
    measuring = time.monotonic() - begin
    if first.status != "ok":
        return state.nothing(f"the defaults are {first.status}: {first.reason}")
    rng = random.Random(seed)
    queue = [params for item in start if space.fits(item) and (params := values_of(item))]
    seen = set(state.outcomes) - (set(queue) - {default})
    known_good = [values_of(item) for item in space.starts if space.fits(item)]
    search_end = end - CONFIRM_SHARE * seconds
    tried = 0
    while tried < trials:
        left = search_end - time.monotonic()
        if left <= 0 or left < compiling + measuring:
            # It would be cut off before it says anything; later shapes have more use for the time.
            break
        batch: list[Values] = []
        size = min(generation(left, compiling, bench.compilers), trials - tried)
        for params in itertools.chain(queue, known_good, _proposals(space, state.outcomes, rng)):
            if len(batch) >= size:
                break
            if params not in seen:
                seen.add(params)
                batch.append(params)
        if not batch:
            break
        tried += len(batch)
        turns = math.ceil(len(batch) / bench.compilers)
        compiling = state.measure_all(batch, search_end) / turns
    return state.confirm(end)


def generation(seconds: float, compiling: float, compilers: int = 1) -> int:
    """How many candidates to compile together with ``seconds`` left, where ``compilers`` at once
    take ``compiling`` s."""
    if compiling <= 0:
        return GENERATION
    turns = max(1, int(COMPILE_SHARE * seconds / compiling))
    return min(GENERATION, turns * compilers)


@dataclass
class _State:
    """A search so far.

    Attributes:
        default: the values that every candidate is compared with.
        outcomes: median time over that of the defaults; ``None`` = failed or wrong.
        best: the best so far.
        counts: of this search.
    """

    bench: Bench
    default: Values
    outcomes: dict[Values, float | None]
    report: Report
    best: Values = field(init=False)
    counts: dict[Status, int] = field(default_factory=lambda: {"ok": 0, "failed": 0, "wrong": 0})

    def __post_init__(self) -> None:
        self.best = self.default

    def nothing(self, reason: str) -> Found:
        return Found(self.default, trials=self.counts, reason=reason)

    def measure_all(self, batch: Sequence[Values], end: float) -> float:
        """Compile ``batch``, then measure as many at once as the bench can, until ``end``.

        Returns:
            Seconds that compiling took.
        """
        begin = time.monotonic()
        refusals = self.bench.prepare([dict(item) for item in batch], end - begin)
        compiling = time.monotonic() - begin
        good = []
        for params, refusal in zip(batch, refusals, strict=True):
            if not refusal:
                good.append(params)
            # What the end of the time cut off has not failed.
            elif time.monotonic() < end:
                self._take(params, Trial("failed", refusal), self.best)
        lanes = self.bench.lanes
        with ExitStack() as stack:
            # One at a time needs no thread, and an interrupt then ends its child at once.
            apply: Callable[..., Iterable[Trial]] = map
            if lanes > 1:
                apply = stack.enter_context(ThreadPoolExecutor(lanes)).map
            for first in range(0, len(good), lanes):
                left = end - time.monotonic()
                if left <= 0:
                    return compiling
                group, rival = good[first : first + lanes], self.best
                trials = apply(self._measure, group, itertools.repeat(left))
                for params, trial in zip(group, trials, strict=True):
                    self._take(params, trial, rival)
        return compiling

    def _measure(self, params: Values, seconds: float) -> Trial:
        return self.bench.measure(
            dict(params), dict(self.best), dict(self.default), SEARCH_ROUNDS, seconds
        )

    def _take(self, params: Values, trial: Trial, rival: Values) -> None:
        """Keep what came out of ``params``, measured beside ``rival``."""
        self.counts[trial.status] += 1
        self.report(params, trial, False)
        if trial.status != "ok":
            self.outcomes[params] = None
            return
        _, median, high = trial.ratios("default")
        self.outcomes[params] = median
        if rival == self.best:
            better = trial.ratios("best")[2] < 1
        else:
            # Measured at the same time as what is now the best: by way of the defaults.
            better = high < (self.outcomes[self.best] or 1.0)
        if better:
            logger.info("%s: %.3f of the defaults", dict(params), median)
            self.best = params

    def confirm(self, end: float) -> Found:
        """Compare the winner with the defaults once more: the luckiest of many looks too good."""
        if not self.counts["ok"]:
            return self.nothing("no candidate could be measured")
        if self.best == self.default:
            self.report(self.default, _equal(1), True)
            return Found(self.default, trials=self.counts)
        left = end - time.monotonic()
        if left <= 0:
            return self.nothing("no time was left to confirm the best")
        default = dict(self.default)
        trial = self.bench.measure(dict(self.best), default, default, CONFIRM_ROUNDS, left)
        if trial.status != "ok":
            return self.nothing(f"the best is {trial.status} when measured again: {trial.reason}")
        rounds, ratios = len(trial.times["candidate"]), trial.ratios("default")
        if ratios[2] >= 1:
            self.report(self.best, trial, False)
            self.report(self.default, _equal(rounds), True)
            return Found(self.default, rounds=rounds, trials=self.counts)
        self.report(self.best, trial, True)
        return Found(self.best, ratios, rounds, self.counts)


def _equal(rounds: int) -> Trial:
    """The defaults against themselves."""
    return Trial("ok", times={name: (1.0,) * rounds for name in ("default", "candidate")})


def _proposals(
    space: Space, outcomes: Mapping[Values, float | None], rng: random.Random
) -> Iterator[Values]:
    """Candidates in turns: varied from the best, and random; ends when hardly any new come."""
    ranked = sorted((ratio, params) for params, ratio in outcomes.items() if ratio is not None)
    parents = [params for _, params in ranked[:PARENTS]]
    for number in range(100 * GENERATION):
        made = space.sample(rng) if number % 2 else space.mutate(dict(rng.choice(parents)), rng)
        if made is not None:
            yield values_of(made)


def values_of(params: Params) -> Values:
    return tuple(sorted(params.items()))


def quartiles(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Of the ratios of pairs."""
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    if len(ratios) == 1:
        return (ratios[0],) * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
