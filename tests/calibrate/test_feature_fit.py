"""Fitting feature maps: the operator's own error is minimised, and the linear part learns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from sites import make_site
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.calibrate.branches import window_off
from subquad.passes.calibrate.feature_fit import MANY_ROWS, FitSettings, fit_feature_maps
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.methods import dense, parse_method
from subquad.passes.plan import Assignment
from subquad.passes.recognise.site import AttentionSite

CAUSAL = make_site("causal", heads=(4, 2), dims=(8, 6), right=0)
FULL = make_site("full", heads=(2, 2))
# All queries of the last rows are judged, so that the reference can judge the same.
SETTINGS = FitSettings(steps=60, judged=1000, hopeless=1.0)
LENGTH = 96
HELD_BACK = slice(-MANY_ROWS // 4, None)


def samples(site: AttentionSite, seed: int = 0, rows: int = MANY_ROWS) -> list[Sample]:
    """Queries and keys of few directions, so that weights are far from even and can be learned."""
    rng = np.random.default_rng(seed)
    basis = 0.6 * rng.standard_normal((3, site.head_dim))

    def vectors(heads: int, dim: int) -> NDArray[np.float32]:
        mixed = rng.standard_normal((rows, heads, LENGTH, 3)) @ basis
        return np.asarray(mixed[..., :dim], np.float32)

    mask = np.ones((rows, LENGTH), np.bool_)
    mask[:, :5] = False
    query, key = vectors(site.num_heads, site.head_dim), vectors(site.num_kv_heads, site.head_dim)
    value = rng.standard_normal((rows, site.num_kv_heads, LENGTH, site.value_dim))
    return [{"query": query, "key": key, "value": value.astype(np.float32), "key_mask": mask}]


def fit(text: str, site: AttentionSite, inputs: list[Sample]) -> tuple[HybridVariant, Fitted]:
    method, params = parse_method(text)
    variant = method.lower(site, params)
    assert isinstance(variant, HybridVariant)
    return variant, fit_feature_maps(site, variant, method.tensors(site, params), inputs, SETTINGS)


def errors(
    site: AttentionSite,
    variant: HybridVariant,
    tensors: Mapping[str, NDArray[np.generic]],
    inputs: Sample,
    rows: slice = HELD_BACK,
) -> NDArray[np.float64]:
    """Of each head, the mean over ``rows``, by the float64 references."""
    last = {name: array[rows] for name, array in inputs.items()}
    positions = np.tile(np.arange(LENGTH) - 5, (len(last["query"]), 1))
    shared = {**last, "query_positions": positions, "key_positions": positions}
    got = variant.reference(**shared, **tensors)  # type: ignore[arg-type]
    want = dense.METHOD.lower(site, dense.DenseParameters()).reference(**shared)
    square = np.square(got - want)[:, :, 5:].sum((2, 3))
    return np.asarray((square / np.square(want)[:, :, 5:].sum((2, 3))).mean(0))


@pytest.mark.parametrize("site", [CAUSAL, FULL], ids=lambda site: site.name)
@pytest.mark.parametrize("text", ["hedgehog", "lolcats:8,sinks=2", "lolcats:4,dims=12"])
def test_reported_errors_are_those_of_the_operator(text: str, site: AttentionSite) -> None:
    inputs = samples(site)
    variant, fitted = fit(text, site, inputs)
    method, params = parse_method(text)
    for tensors, reported in (
        (method.tensors(site, params), fitted.before),
        (fitted.tensors, fitted.after),
    ):
        # float32 on one side; the squares of small errors keep fewer digits.
        np.testing.assert_allclose(errors(site, variant, tensors, inputs[0]), reported, rtol=2e-3)


@pytest.mark.parametrize("text", ["hedgehog", "lolcats:8,sinks=2"])
def test_fitted_maps_are_better(text: str) -> None:
    _, fitted = fit(text, CAUSAL, samples(CAUSAL))
    assert np.mean(fitted.after) < 0.7 * np.mean(fitted.before)
    assert all(array.dtype == np.float32 for array in fitted.tensors.values())


def test_linear_part_learns_although_a_window_is_there() -> None:
    inputs = samples(CAUSAL)
    variant, fitted = fit("lolcats:8,sinks=2", CAUSAL, inputs)
    method, params = parse_method("lolcats:8,sinks=2")
    bare = window_off(Assignment(CAUSAL, method, params, fitted=fitted))
    alone = bare.method.lower(CAUSAL, params)
    assert isinstance(alone, HybridVariant) and not alone.has_window
    start = {k: v for k, v in method.tensors(CAUSAL, params).items() if k != "window_gain"}
    before = errors(CAUSAL, alone, start, inputs[0])
    after = errors(CAUSAL, alone, bare.tensors(), inputs[0])
    assert after.mean() < 0.7 * before.mean()


def test_same_inputs_same_maps_and_padding_does_not_count() -> None:
    inputs = samples(CAUSAL)
    _, first = fit("lolcats:8", CAUSAL, inputs)
    spoiled = {name: array.copy() for name, array in inputs[0].items()}
    for name in ("key", "value", "query"):
        spoiled[name][:, :, :5] = 1e4
    _, second = fit("lolcats:8", CAUSAL, samples(CAUSAL))
    assert first.digest == second.digest
    _, third = fit("lolcats:8", CAUSAL, [spoiled])
    assert third.digest == first.digest


def test_a_single_row_is_enough() -> None:
    _, fitted = fit("hedgehog", CAUSAL, samples(CAUSAL, rows=1))
    assert np.isfinite(fitted.after).all()


def test_few_rows_that_differ_are_all_fitted() -> None:
    """Maps that suit the row held back alone would be no good for the others."""
    (inputs,) = samples(CAUSAL, rows=4)
    # In the last row queries see little but themselves: there, features are of no use.
    inputs["query"][-1] = 9 * inputs["query"][-1]
    inputs["key"][-1] = np.repeat(inputs["query"][-1, ::2], 1, axis=0)
    variant, fitted = fit("lolcats:8,sinks=2", CAUSAL, [inputs])
    method, params = parse_method("lolcats:8,sinks=2")
    others = slice(0, 3)
    before = errors(CAUSAL, variant, method.tensors(CAUSAL, params), inputs, others)
    after = errors(CAUSAL, variant, fitted.tensors, inputs, others)
    print(before, after)
    assert after.mean() < 0.5 * before.mean()
