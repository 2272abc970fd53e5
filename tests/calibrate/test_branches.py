"""Switching branches of hybrids off: what is compared, and what becomes of an idle branch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sites import make_site
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.calibrate.branches import Plan, ablate, has_branches, linear_off, window_off
from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.calibrate.score import Score
from subquad.passes.methods import parse_method
from subquad.passes.plan import Assignment
from subquad.passes.recognise.site import AttentionSite

CAUSAL = make_site("causal", heads=(4, 2), right=0)
FULL = make_site("full")


def assigned(text: str, site: AttentionSite = CAUSAL) -> Assignment:
    return Assignment(site, *parse_method(text))


@pytest.mark.parametrize("site", [CAUSAL, FULL], ids=lambda site: site.name)
def test_linear_off_is_the_plain_window_of_the_same_size(site: AttentionSite) -> None:
    hybrid = assigned("lolcats:size=16,sinks=3", site)
    plain = linear_off(hybrid)
    assert plain.text == "window:size=16,sinks=3"
    whole, part = (a.method.lower(site, a.params) for a in (hybrid, plain))
    assert isinstance(whole, HybridVariant) and isinstance(part, HybridVariant)
    assert dataclasses.replace(whole, feature_map="none", mix="lse", map_dim=0) == part


def test_window_off_keeps_the_maps() -> None:
    hybrid = assigned("lolcats:size=16,sinks=3")
    start = hybrid.tensors()
    fitted = Fitted({name: np.asarray(x + 1, np.float32) for name, x in start.items()})
    bare = window_off(dataclasses.replace(hybrid, fitted=fitted))
    variant = bare.method.lower(CAUSAL, bare.params)
    assert isinstance(variant, HybridVariant)
    assert not variant.has_window and not variant.sinks and variant.map_dim
    tensors = bare.tensors()
    assert set(tensors) == {"query_map", "key_map"}
    assert np.array_equal(tensors["key_map"], fitted.tensors["key_map"])


@pytest.mark.parametrize(
    "text", ["window:16", "hedgehog", "elu", "dense", "block_sparse", "static"]
)
def test_others_have_no_branches(text: str) -> None:
    assert not has_branches(assigned(text))
    assert ablate({0: assigned(text)}, lambda plan: pytest.fail("nothing to run")) == {}


def scored(damage: float, spread: float = 0.01) -> Score:
    terms = damage + spread * np.random.default_rng(0).standard_normal(800)
    terms += damage - terms.mean()
    return Score({"kl": damage}, {}, damage, terms=terms)


@pytest.mark.parametrize(
    ("without", "idle"), [(0.30, False), (0.2, True), (0.19, True), (0.2001, True)]
)
def test_effects_are_told_from_noise(without: float, idle: bool) -> None:
    """The noise of a pair that moves independently by 0.01 is about 0.0005."""
    rng = np.random.default_rng(1)

    def run(plan: Plan) -> Score:
        text = plan[3].text
        if text.startswith("lolcats without window"):
            return scored(0.9)
        if text.startswith("lolcats"):
            return scored(0.2)
        moved = scored(without)
        assert moved.terms is not None
        shaken = 0.01 * rng.standard_normal(800)
        return dataclasses.replace(moved, terms=moved.terms + shaken - shaken.mean())

    found = ablate({3: assigned("lolcats:8"), 4: assigned("window:8")}, run)
    assert list(found) == [3]
    seen = found[3]
    assert seen.linear_off.damage == pytest.approx(without - 0.2)
    assert seen.linear_off.noise == pytest.approx(0.01 / np.sqrt(800), rel=0.2)
    assert seen.linear_off.is_nothing is idle
    assert not seen.window_off.is_nothing and "the window contributes" in seen.verdict
    assert ("the linear part contributes nothing" in seen.verdict) is idle
    assert type(seen).from_json(seen.to_json()) == seen
