"""What every candidate of every attention would cost in accuracy, measured on activations.

The exact model runs once over the calibration inputs, layer by layer. At each attention

* the heads' statistics are taken, and every method names its candidates from them;
* each candidate computes the attention; its error is the relative change of the residual stream
  after the output projection (heads whose projection is small are cheap to replace), on the kind
  of document where it is largest; and, where recall is limited, at the tokens of rows that ask for
  what stands far before;
* one candidate is followed to the end of the model on short inputs. Damage grows with the square
  of a small error, so this one run tells how much damage an error here does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.operator import UNLIMITED
from subquad.passes.calibrate.branches import has_branches, linear_off
from subquad.passes.calibrate.candidates import Candidate, SiteMeasurement
from subquad.passes.calibrate.engine import Engine, State, site_variants
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.calibrate.score import Scorer
from subquad.passes.calibrate.statistics import SiteStatistics, StatisticsCollector
from subquad.passes.methods import METHODS, get_method, method_text, parse_method, window
from subquad.passes.methods.base import Method, Wanted
from subquad.passes.plan import DENSE, Assignment, declined_by
from subquad.passes.prices import Prices, Shape
from subquad.passes.recognise.site import AttentionSite, MaskPredicate
from subquad.runtime.errors import Rejection, UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.samples import Batch

NEGLIGIBLE = 1e-4
"""Relative error at which a method's more expensive candidates are not tried any more."""

PARTIAL_ERRORS = (0.01, 0.03, 0.1)
"""Relative errors up to which heads are replaced alone, the least ones first."""

SMALLEST_DAMAGE = 1e-9
"""Below it a damage is rounding; the sensitivity is then taken from the worst candidate."""


_TINY = 1e-300


@dataclass(frozen=True)
class RecallSample:
    """A row that asks for what stands far before.

    Attributes:
        feeds: of one row.
        positions: of the tokens whose outputs predict answers.
    """

    feeds: Mapping[str, NDArray[Any]]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """What is measured.

    Attributes:
        manifest: of the exact model.
        lengths: the user's.
        batch: rows at which prices are taken.
        prices: see there.
        strict_causal: only methods that are causal to the token.
        methods: names of the methods to try; empty = all.
        decodes: only methods that serve single steps behind a cache.
    """

    manifest: Manifest
    lengths: tuple[int, ...]
    batch: int
    prices: Prices
    strict_causal: bool = False
    methods: tuple[str, ...] = ()
    decodes: bool = False


def measure_sites(
    engine: Engine,
    question: Question,
    calibration: Sequence[Batch],
    probes: Sequence[Batch],
    *,
    recall: Sequence[RecallSample] = (),
    known: Mapping[int, SiteMeasurement],
    done: Callable[[int, SiteMeasurement], None],
) -> None:
    """Measure all sites that are not ``known``.

    Args:
        engine: of the exact model.
        question: what to measure.
        calibration: at the user's lengths.
        probes: short inputs, followed to the end of the model.
        recall: rows of which only the answers count.
        known: rank -> measured before.
        done: called with each new measurement.
    """
    scorer = Scorer(question.manifest, probes)
    if len(known) < len(engine.split.sites):
        scorer.teach(lambda finish: engine.run([b.feeds for b in probes], {}, finish=finish))

    def visit(rank: int, states: Sequence[State]) -> None:
        if rank in known:
            return
        measuring = _Site(engine, question, rank, calibration, probes, recall, scorer)
        done(rank, measuring.run(states))

    # Sites beyond the last unknown one need no run.
    if len(known) < len(engine.split.sites):
        rows = [batch.feeds for batch in (*calibration, *probes)]
        engine.run([*rows, *(row.feeds for row in recall)], {}, visit=visit)


@dataclass(frozen=True)
class HeadCosts:
    """What each query head contributes, ``[heads]``.

    Attributes:
        errors: squared, relative to the residual stream, as if only this head changed.
        work: blocks that its selector keeps; ``None`` without one.
    """

    errors: NDArray[np.float64]
    work: NDArray[np.float64] | None

    def plus(self, errors: NDArray[np.float64], work: NDArray[np.float64] | None) -> HeadCosts:
        if self.work is not None:
            work = self.work if work is None else self.work + work
        return HeadCosts(self.errors + errors, work)


@dataclass(frozen=True)
class _Exact:
    """What the exact attention gives: heads, their projection, and the stream with it."""

    output: NDArray[np.float32]
    projected: NDArray[Any]
    stream: NDArray[Any] | None

    @cached_property
    def size(self) -> float:
        """Squared norm of what errors are relative to."""
        return _square(self.projected if self.stream is None else self.stream)


def mix_levels(errors: NDArray[np.float64], work: NDArray[np.float64], limit: float) -> list[int]:
    """A level for every head: errors add up to at most ``limit`` at little work.

    Args:
        errors, work: ``[levels, heads]``.
        limit: on the sum of errors; if no mix keeps it, the most exact one.
    """
    heads = np.arange(errors.shape[1])
    levels = np.argmin(work, axis=0)
    while errors[levels, heads].sum() > limit:
        gain = errors[levels, heads] - errors
        extra = work - work[levels, heads]
        # What lowers the error without more work comes first.
        ratio = np.where(gain > 0, gain / np.maximum(extra, 1e-9), -np.inf)
        level, head = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        if not ratio[level, head] > 0:
            break
        levels[head] = level
    return [int(level) for level in levels]


class _Site:
    """Measures one site."""

    def __init__(
        self,
        engine: Engine,
        question: Question,
        rank: int,
        calibration: Sequence[Batch],
        probes: Sequence[Batch],
        recall: Sequence[RecallSample],
        scorer: Scorer,
    ) -> None:
        self._engine = engine
        self._question = question
        self._rank = rank
        self._split_site = engine.split.sites[rank]
        self._site = self._split_site.site
        self._calibration = calibration
        self._probes = probes
        self._recall = recall
        self._asking: list[tuple[State, _Exact]] = []
        self._scorer = scorer
        self._weight = self._projection_weight()

    def _projection_weight(self) -> NDArray[np.float32] | None:
        """Weights of the projection, rows by head; ``None`` if it has none of that form."""
        projection = self._split_site.projection
        if isinstance(projection, str) or projection.weight is None:
            return None
        weight = self._engine.split.weight(projection.weight, self._engine.folder)
        rows = self._site.num_heads * self._site.value_dim
        return weight if weight.ndim == 2 and len(weight) == rows else None

    def run(self, states: Sequence[State]) -> SiteMeasurement:
        count, followed = len(self._calibration), len(self._probes)
        measured, probes = states[:count], states[count : count + followed]
        statistics = self._statistics(measured)
        exact = [self._exact(state) for state in measured]
        self._asking = [(state, self._exact(state)) for state in states[count + followed :]]
        candidates: list[Candidate] = []
        declined: dict[str, str] = {}
        for method in METHODS:
            wanted = not self._question.methods or method.name in self._question.methods
            if method.name == DENSE or not wanted:
                continue
            found = self._method(method, statistics, measured, exact)
            if isinstance(found, Rejection):
                declined[method.name] = found.reason
            else:
                candidates += found
        candidates += self._plain_windows(candidates, measured, exact)
        whole = any(item.stream is not None for item in exact)
        known = not isinstance(self._split_site.projection, str)
        where = "residual stream" if whole else "projection" if known else "heads"
        return SiteMeasurement(
            name=self._site.name,
            index=self._site.index,
            exact_price=self._exact_price(),
            sensitivity=self._sensitivity(candidates, probes),
            error_in=where,
            statistics=statistics,
            candidates=tuple(candidates),
            declined=declined,
        )

    def _exact(self, state: State) -> _Exact:
        output = self._engine.attention(self._rank, state, None).output
        return _Exact(output, *self._engine.project(self._rank, state, output))

    def _statistics(self, states: Sequence[State]) -> SiteStatistics:
        collector = StatisticsCollector(self._site)
        for state in states:
            collector.add(self._inputs(state))
        return collector.result()

    def _inputs(self, state: State) -> Sample:
        return {role: state[name] for role, name in self._split_site.inputs.items()}

    def _exact_price(self) -> float:
        exact = get_method(DENSE)
        price = self._price(Assignment(self._site, exact, exact.parameters()), {})
        if isinstance(price, Rejection):
            raise UsageError(
                f"Attention {self._site.name} has no price as it is: {price.reason}. "
                "Use --minimize flops, or other --lengths."
            )
        return price

    def _method(
        self,
        method: Method[Any],
        statistics: SiteStatistics,
        states: Sequence[State],
        exact: Sequence[_Exact],
    ) -> list[Candidate] | Rejection:
        """The ladder of one method, cheapest first, until the error is negligible."""
        ladder = method.candidates(
            self._site,
            statistics,
            Wanted(self._question.lengths, self._question.strict_causal),
        )
        if isinstance(ladder, Rejection):
            return ladder
        found: list[Candidate] = []
        tried: list[tuple[Any, HeadCosts]] = []
        refusal = Rejection("has no candidate at these lengths")
        for params in ladder:
            text = method_text(method, params)
            granularity = method.causal_granularity(params)
            refused = declined_by(method, self._site, params, decodes=self._question.decodes)
            if self._question.strict_causal and granularity != 1:
                refused = Rejection(f"causal only in blocks of {granularity} tokens")
            if refused is not None:
                refusal = refused
                continue
            assignment = Assignment(self._site, method, params)
            made = self._candidate(text, assignment, states, exact)
            if isinstance(made, Rejection):
                refusal = made
                continue
            candidate, heads = made
            found.append(candidate)
            tried.append((params, heads))
            if max(candidate.error, candidate.recall_error or 0.0) < NEGLIGIBLE:
                break
        found += self._mixes(method, tried, states, exact)
        found += self._some_heads(method, tried, states, exact)
        return found or refusal

    def _some_heads(
        self,
        method: Method[Any],
        tried: Sequence[tuple[Any, HeadCosts]],
        states: Sequence[State],
        exact: Sequence[_Exact],
    ) -> list[Candidate]:
        """Candidates that replace only the heads of small error, where a method can do that."""
        found: list[Candidate] = []
        if not tried:
            return found
        params, heads = tried[-1]
        order = np.argsort(heads.errors, kind="stable")
        sums = np.cumsum(heads.errors[order])
        counts = {int((sums <= limit**2).sum()) for limit in PARTIAL_ERRORS}
        for count in sorted(counts - {0, len(order)}):
            chosen = {int(head) for head in order[:count]}
            some = method.mixed([params if h in chosen else None for h in range(len(order))])
            if some is None:
                break
            found += self._mixed(method, some, states, exact)
        return found

    def _mixed(
        self,
        method: Method[Any],
        params: Any,
        states: Sequence[State],
        exact: Sequence[_Exact],
    ) -> list[Candidate]:
        """The candidate with these parameters, one of its own for every head, or none."""
        assignment = Assignment(self._site, method, params)
        made = self._candidate(method_text(method, params), assignment, states, exact)
        return [] if isinstance(made, Rejection) else [made[0]]

    def _plain_windows(
        self,
        candidates: Sequence[Candidate],
        states: Sequence[State],
        exact: Sequence[_Exact],
    ) -> list[Candidate]:
        """For every hybrid, the window that is left without its linear part."""
        if self._question.methods and window.METHOD.name not in self._question.methods:
            return []
        known = {candidate.text for candidate in candidates}
        found = []
        for candidate in candidates:
            hybrid = assignment_of(self._site, candidate.text)
            if not has_branches(hybrid) or linear_off(hybrid).text in known:
                continue
            plain = linear_off(hybrid)
            known.add(plain.text)
            made = self._candidate(plain.text, plain, states, exact)
            if not isinstance(made, Rejection):
                found.append(made[0])
        return found

    def _mixes(
        self,
        method: Method[Any],
        tried: Sequence[tuple[Any, HeadCosts]],
        states: Sequence[State],
        exact: Sequence[_Exact],
    ) -> list[Candidate]:
        """Candidates in which every head has its own of the parameters tried.

        Between two of them, the mix has the geometric mean of their errors at the least work.
        """
        tried = [(params, heads) for params, heads in tried if heads.work is not None]
        if len(tried) < 2:
            return []
        errors = np.stack([heads.errors for _, heads in tried])
        work = np.stack([heads.work for _, heads in tried if heads.work is not None])
        totals = errors.sum(axis=1)
        found = []
        for low, high in pairwise(totals):
            levels = mix_levels(errors, work, math.sqrt(low * high))
            params = method.mixed([tried[level][0] for level in levels])
            if params is None or len(set(levels)) == 1:
                continue
            found += self._mixed(method, params, states, exact)
        return found

    def _candidate(
        self,
        text: str,
        assignment: Assignment,
        states: Sequence[State],
        exact: Sequence[_Exact],
    ) -> tuple[Candidate, HeadCosts] | Rejection:
        price = self._price(assignment, {})
        if isinstance(price, Rejection):
            return price
        selects = any(hasattr(variant, "block") for variant in site_variants(assignment))
        if not selects and price >= self._exact_price():
            return Rejection(f"{text} costs as much as the exact attention at these lengths")
        fitted = assignment.method.calibrate(
            self._site, assignment.params, [self._inputs(state) for state in states]
        )
        assignment = replace(assignment, fitted=fitted)
        squares: dict[tuple[int, str], list[float]] = {}
        densities: dict[int, list[float]] = {}
        heads = HeadCosts(np.zeros(self._site.num_heads), None)
        for batch, state, known in zip(self._calibration, states, exact, strict=True):
            result = self._engine.attention(self._rank, state, assignment)
            moved, _ = self._engine.project(self._rank, state, result.output)
            sums = squares.setdefault((batch.length, batch.group), [0.0, 0.0])
            sums[0] += _square(moved - known.projected)
            sums[1] += known.size
            work = None
            if result.kept is not None:
                share = self._density(assignment, state, int(result.kept.sum()))
                densities.setdefault(batch.length, []).append(share)
                work = result.kept.astype(np.float64)
            change = self._head_errors(result.output - known.output)
            heads = heads.plus(change / max(known.size, _TINY), work)
        recall_error, of_heads = self._recall_errors(assignment)
        heads = heads.plus(of_heads, None)
        means = {length: float(np.mean(shares)) for length, shares in densities.items()}
        price = self._price(assignment, means)
        if isinstance(price, Rejection):
            return price
        errors: dict[int, float] = {}
        for (length, _), (change_sum, base_sum) in squares.items():
            error = math.sqrt(change_sum / base_sum) if base_sum else 0.0
            errors[length] = max(errors.get(length, 0.0), error)
        return Candidate(text, errors, means, price, recall_error, fitted), heads

    def _recall_errors(self, assignment: Assignment) -> tuple[float | None, NDArray[np.float64]]:
        """As on other inputs, but of the tokens that predict answers; worst row, and by head."""
        errors: list[float] = []
        heads = np.zeros(self._site.num_heads)
        for sample, (state, known) in zip(self._recall, self._asking, strict=True):
            result = self._engine.attention(self._rank, state, assignment)
            at = list(sample.positions)
            output = known.output.copy()
            output[:, :, at] = result.output[:, :, at]
            moved, _ = self._engine.project(self._rank, state, output)
            # As large as so many tokens are on average; not every layout tells them apart.
            base = known.size * len(at) / output.shape[2]
            errors.append(math.sqrt(_square(moved - known.projected) / max(base, _TINY)))
            heads += self._head_errors(output - known.output) / max(base, _TINY)
        return max(errors, default=None), heads

    def _head_errors(self, change: NDArray[np.float32]) -> NDArray[np.float64]:
        """Squared change of the projected output by each head alone, ``[heads]``.

        Where the projection is not known, of the head's own output.
        """
        by_head = change.swapaxes(0, 1).reshape(change.shape[1], -1, change.shape[3])
        if self._weight is None:
            return np.array([_square(part) for part in by_head])
        parts = self._weight.reshape(len(by_head), change.shape[3], -1)
        # Through the Gram matrix of a head's weights: few columns instead of the model's width.
        return np.array(
            [
                float(((part.T @ part) * (weight @ weight.T)).sum())
                for part, weight in zip(by_head, parts, strict=True)
            ]
        )

    def _price(self, assignment: Assignment, densities: Mapping[int, float]) -> float | Rejection:
        question = self._question
        return site_price(assignment, question.lengths, question.batch, question.prices, densities)

    def _density(self, assignment: Assignment, state: State, kept: int) -> float:
        query, key = (state[self._split_site.inputs[role]] for role in ("query", "key"))
        block = int(next(v.block for v in site_variants(assignment) if hasattr(v, "block")))
        visible = visible_blocks(self._site.mask, query.shape[2], key.shape[2], block)
        return float(kept / max(1, query.shape[0] * query.shape[1] * visible))

    def _sensitivity(
        self, candidates: Sequence[Candidate], probes: Sequence[State]
    ) -> float | None:
        """Damage per squared error, from the candidate of middle error."""
        # Errors of linear attention are often too large to grow with their square.
        plain = [item for item in candidates if item.fitted is None]
        ordered = sorted(plain or candidates, key=lambda item: item.error)
        if not ordered:
            return None
        for chosen in (ordered[len(ordered) // 2], ordered[-1]):
            damage, error = self._follow(chosen, probes)
            if damage > SMALLEST_DAMAGE and error > 0:
                break
        return damage / error**2 if error > 0 else 0.0

    def _follow(self, candidate: Candidate, probes: Sequence[State]) -> tuple[float, float]:
        assignment = assignment_of(self._site, candidate.text, candidate.fitted)
        changed, error, base = [], 0.0, 0.0
        for state in probes:
            exact = self._engine.attention(self._rank, state, None).output
            output = self._engine.attention(self._rank, state, assignment).output
            changed.append(output)
            before, stream = self._engine.project(self._rank, state, exact)
            after, _ = self._engine.project(self._rank, state, output)
            error += _square(after - before)
            base += _square(before if stream is None else stream)
        score = self._scorer.score(
            lambda finish: self._engine.run_from(self._rank, probes, changed, {}, finish=finish)
        )
        return score.damage, math.sqrt(error / base) if base else 0.0


def site_price(
    assignment: Assignment,
    lengths: Sequence[int],
    batch: int,
    prices: Prices,
    densities: Mapping[int, float],
) -> float | Rejection:
    """Sum over lengths; a length without a density takes that of the nearest one."""
    total = 0.0
    for length in lengths:
        nearest = min(densities, key=lambda n: abs(n - length), default=None)
        density = 1.0 if nearest is None else densities[nearest]
        price = prices.price(site_variants(assignment), Shape(batch, length, density))
        if isinstance(price, Rejection):
            return price
        total += price
    return total


def assignment_of(site: AttentionSite, text: str, fitted: Fitted | None = None) -> Assignment:
    """``text`` applied to ``site``."""
    method, params = parse_method(text)
    return Assignment(site, method, params, fitted=fitted)


def visible_blocks(mask: MaskPredicate, query_len: int, kv_len: int, block: int) -> int:
    """Pairs of a query block and a key block of which some query sees some key."""
    offset = kv_len - query_len if mask.alignment == "end" else 0
    first = np.arange(0, query_len, block) + offset
    last = np.minimum(first + block, query_len + offset) - 1
    low = np.zeros_like(first)
    if mask.window_left != UNLIMITED:
        low = np.maximum(first - mask.window_left, 0) // block
    high = np.full_like(first, (kv_len - 1) // block)
    if mask.window_right != UNLIMITED:
        high = np.minimum(last + mask.window_right, kv_len - 1) // block
    return int(np.maximum(high - low + 1, 0).sum())


def _square(values: NDArray[Any]) -> float:
    flat = np.ravel(values)
    return float(np.dot(flat, flat))
