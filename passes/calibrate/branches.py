"""What each branch of a hybrid attention does for the whole model.

A replacement with an exact window and a linear part may lean on one of them alone; hybrids that
were trained on outputs often ignore their linear part (https://arxiv.org/abs/2510.05901). So the
model is run with one branch of one attention switched off, all else as planned:

* **linear off**: the plain window of the same size and sinks;
* **window off**: all keys count by features, with the maps as they are.

The effect is the change of the damage (KL, or the squared relative error of the outputs), paired
position by position. It is within noise if it is below two standard errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import UNLIMITED
from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.calibrate.score import Score
from subquad.passes.methods import window
from subquad.passes.methods.base import Method, OneNode, Parameters
from subquad.passes.plan import Assignment
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection

NOISE = 2.0
"""Standard errors below which an effect is noise."""

_NEIGHBOURS = 8
"""Positions whose mean counts as one observation."""

Plan = Mapping[int, Assignment]
Run = Callable[[Plan], Score]


@dataclass(frozen=True)
class Effect:
    """Of switching one branch off.

    Attributes:
        metrics: of the held-out outputs without the branch.
        damage: rise of the mean damage; negative: the model is better without.
        noise: standard error of ``damage``; ``None``: too few positions to tell.
    """

    metrics: Mapping[str, float | None]
    damage: float
    noise: float | None

    @property
    def is_nothing(self) -> bool:
        """Whether the branch does not lower the damage beyond noise."""
        return self.damage <= NOISE * (self.noise or 0.0)


@dataclass(frozen=True)
class Branches:
    """One hybrid attention.

    Attributes:
        name: of the site.
        method: as planned.
        metrics: of the held-out outputs with both branches.
        linear_off, window_off: see the module.
        verdict: one sentence.
    """

    name: str
    method: str
    metrics: Mapping[str, float | None]
    linear_off: Effect
    window_off: Effect
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Branches:
        effects = {name: Effect(**raw[name]) for name in ("linear_off", "window_off")}
        return Branches(**{**raw, **effects})


def has_branches(assignment: Assignment) -> bool:
    """Whether the attention has a window or sinks, and a linear part besides, in all heads."""
    variant = assignment.method.lower(assignment.site, assignment.params)
    return isinstance(variant, HybridVariant) and all(
        part.linear and part.has_window for part in variant.parts
    )


def widest_window(plan: Iterable[Assignment]) -> int:
    """Keys before a query in the widest window of hybrids; 0 if there are none."""
    widest = 0
    for assignment in plan:
        variant = assignment.method.lower(assignment.site, assignment.params)
        if isinstance(variant, HybridVariant):
            widest = max([widest, *(part.window_left for part in variant.parts)])
    return widest


def linear_off(assignment: Assignment) -> Assignment:
    """The plain window of the same size."""
    variant = assignment.method.lower(assignment.site, assignment.params)
    assert isinstance(variant, HybridVariant)
    own = 1 if assignment.site.mask.is_causal else 0
    part = variant.parts[0]
    params = window.WindowParameters(part.window_left + own, part.sinks)
    return Assignment(assignment.site, window.METHOD, params)


def window_off(assignment: Assignment) -> Assignment:
    """The linear part alone; for measuring only, its name is no method's."""
    method = _WindowOff(assignment.method)
    fitted = assignment.fitted
    if fitted is not None:
        kept = {name: x for name, x in fitted.tensors.items() if name != "window_gain"}
        fitted = Fitted(kept)
    return replace(assignment, method=method, fitted=fitted)


@dataclass(frozen=True)
class _WindowOff(OneNode):
    base: Method[Any]

    @property
    def name(self) -> str:
        return f"{self.base.name} without window"

    @property
    def paper(self) -> str:
        return self.base.paper

    @property
    def parameters(self) -> type[Parameters]:
        return self.base.parameters

    def supports(self, site: AttentionSite, params: Any) -> Rejection | None:
        return self.base.supports(site, params)

    def lower(self, site: AttentionSite, params: Any) -> HybridVariant:
        variant = self.base.lower(site, params)
        assert isinstance(variant, HybridVariant)
        return replace(variant, window_left=UNLIMITED, window_right=UNLIMITED, sinks=0, mix="lse")

    def tensors(self, site: AttentionSite, params: Any) -> Mapping[str, NDArray[np.generic]]:
        tensors = self.base.tensors(site, params)
        return {name: array for name, array in tensors.items() if name != "window_gain"}


def ablate(plan: Plan, run: Run, ranks: Sequence[int] | None = None) -> dict[int, Branches]:
    """Switch each branch of each hybrid attention off, one at a time.

    Args:
        plan: rank of a site -> what computes it.
        run: runs the model with a plan on held-out inputs.
        ranks: sites to look at; default: all that have branches.
    """
    wanted = [rank for rank in (sorted(plan) if ranks is None else ranks)]
    wanted = [rank for rank in wanted if has_branches(plan[rank])]
    if not wanted:
        return {}
    both = run(plan)
    found = {}
    for rank in wanted:
        without = run({**plan, rank: linear_off(plan[rank])})
        bare = run({**plan, rank: window_off(plan[rank])})
        effects = (_effect(both, without), _effect(both, bare))
        found[rank] = Branches(
            plan[rank].site.name, plan[rank].text, both.metrics, *effects, _verdict(*effects)
        )
    return found


def _effect(both: Score, without: Score) -> Effect:
    noise = None
    if both.terms is not None and without.terms is not None:
        noise = _standard_error(without.terms - both.terms)
    return Effect(without.metrics, without.damage - both.damage, noise)


def _standard_error(differences: NDArray[np.float64]) -> float | None:
    count = len(differences) // _NEIGHBOURS
    if count < 2:
        return None
    means = differences[: count * _NEIGHBOURS].reshape(count, _NEIGHBOURS).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(count))


def _verdict(linear: Effect, bare: Effect) -> str:
    parts = []
    for effect, name in ((linear, "the linear part"), (bare, "the window")):
        noise = "" if effect.noise is None else f" ± {effect.noise:.1g}"
        change = f"without it the damage changes by {effect.damage:+.2g}{noise}"
        does = "contributes nothing beyond noise" if effect.is_nothing else "contributes"
        parts.append(f"{name} {does} ({change})")
    return "; ".join(parts)
