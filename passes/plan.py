"""Which method replaces which site: from ``--force`` texts, or later from the planner."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.methods import get_method, method_text, parse_method
from subquad.passes.methods.base import Method, Parameters
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection, UsageError

DENSE = "dense"


@dataclass(frozen=True)
class Assignment:
    """What one site shall become.

    Attributes:
        site: the raised attention.
        method, params: what computes it in the artifact.
        declined: why a method asked for was not taken, if so.
        fitted: values for the method's tensors; ``None``: as the method starts with them.
    """

    site: AttentionSite
    method: Method[Any]
    params: Parameters
    declined: Rejection | None = None
    fitted: Fitted | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """``window:size=128,sinks=4``."""
        return method_text(self.method, self.params)

    def tensors(self) -> Mapping[str, NDArray[np.generic]]:
        """Constants of the attention, by the name of the input they are."""
        start = self.method.tensors(self.site, self.params)
        if self.fitted is None:
            return start
        for name, array in self.fitted.tensors.items():
            assert name in start and array.shape == start[name].shape, name
        return {**start, **self.fitted.tensors}


@dataclass(frozen=True)
class Request:
    """One ``--force``: a method for the sites that a pattern selects."""

    method: Method[Any]
    params: Parameters
    pattern: str | None

    @staticmethod
    def parse(text: str, default_pattern: str | None = None) -> Request:
        """Read ``METHOD[:params][@SITES]``.

        Raises:
            UsageError: unknown method, bad parameter or empty pattern.
        """
        described, at, pattern = text.partition("@")
        if at and not pattern.strip():
            raise UsageError(f"{text!r}: expected site numbers, ranges or names after '@'")
        method, params = parse_method(described.strip())
        return Request(method, params, pattern.strip() or default_pattern)


def select_sites(sites: Sequence[AttentionSite], pattern: str | None) -> list[AttentionSite]:
    """Sites matched by ``"0,2-5,*layers.3*"``; all without a pattern.

    Raises:
        UsageError: a part matches no site.
    """
    if pattern is None:
        return list(sites)
    chosen: set[int] = set()
    for part in (p.strip() for p in pattern.split(",")):
        matched = _matching(sites, part)
        if not matched:
            names = ", ".join(site.name for site in sites[:3])
            raise UsageError(
                f"site pattern {part!r} matches none of the {len(sites)} sites "
                f"(numbers 0-{len(sites) - 1}, names such as {names})"
            )
        chosen |= matched
    return [site for site in sites if site.index in chosen]


def _matching(sites: Sequence[AttentionSite], part: str) -> set[int]:
    span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if span is None:
        return {site.index for site in sites if fnmatch.fnmatchcase(site.name, part)}
    first, last = int(span[1]), int(span[2] or span[1])
    if last >= len(sites):
        return set()  # a range beyond the model is a mistake, even if its start exists
    return set(range(first, last + 1))


def make_plan(sites: Sequence[AttentionSite], requests: Sequence[Request]) -> list[Assignment]:
    """One assignment per site: the last request that selects it, else exact attention.

    A method that declines a site leaves it exact, with the reason.
    """
    dense = get_method(DENSE)
    exact = dense.parameters()
    plan = {site.index: Assignment(site, dense, exact) for site in sites}
    for request in requests:
        for site in select_sites(sites, request.pattern):
            declined = declined_by(request.method, site, request.params)
            if declined is None:
                plan[site.index] = Assignment(site, request.method, request.params)
            else:
                plan[site.index] = Assignment(site, dense, exact, declined)
    return [plan[site.index] for site in sites]


def declined_by(
    method: Method[Any], site: AttentionSite, params: Any, *, decodes: bool = False
) -> Rejection | None:
    """Why a method cannot have this site: its own reason, a bias that only dense adds, or single
    steps that would not be what a whole prefill is; ``decodes``: the site will have a cache."""
    if method.name != DENSE and site.linear is not None:
        return Rejection("it is linear in the length already", where=site.name)
    if method.name != DENSE and site.score_function != "softmax":
        return Rejection(
            f"its weights are {site.score_function}s of scores, without a common denominator: only "
            "exact attention keeps that",
            where=site.name,
        )
    if method.name != DENSE and site.adds_to_scores:
        return Rejection(
            f"scores have more than a mask ({site.describe()}): only exact attention keeps it",
            where=site.name,
        )
    if (decodes or site.cache is not None) and method.piece_granularity(params) != 1:
        return Rejection(
            "the site is decoded step by step, and pieces of a sequence give this method other "
            "results than the whole",
            where=site.name,
        )
    return method.supports(site, params)
