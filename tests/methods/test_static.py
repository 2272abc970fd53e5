"""Heads that ignore their query: exact where queries are alike, the mean of values before that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sites import SITES, make_site
from subquad.passes.calibrate.fitted import Sample
from subquad.passes.methods import dense, method_text, parse_method, static
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection, UsageError

GROUPED = next(site for site in SITES if site.name == "causal_grouped_odd")
ALL = static.StaticParameters()


def sample(
    site: AttentionSite, rng: np.random.Generator, *, spread: float, length: int = 50
) -> Sample:
    """Inputs with one query per head, give or take ``spread``; two padded slots."""
    shape = 2, site.num_heads, length, site.head_dim
    query = rng.standard_normal((1, site.num_heads, 1, site.head_dim)) * 2
    query = query + spread * rng.standard_normal(shape)
    mask = np.ones((2, length), dtype=np.bool_)
    mask[0, :2] = False
    query[0, :, :2] = 1e3  # padding must not count
    kv_heads = site.num_kv_heads
    return {
        "query": query.astype(np.float32),
        "key": rng.standard_normal((2, kv_heads, length, site.head_dim)).astype(np.float32),
        "value": rng.standard_normal((2, kv_heads, length, site.value_dim)).astype(np.float32),
        "key_mask": mask,
    }


def outputs(
    site: AttentionSite, params: static.StaticParameters, inputs: Sample, *, fitted: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The method's output and the exact one, by their float64 references."""
    positions = np.arange(inputs["query"].shape[2])[None] - (~inputs["key_mask"]).sum(1)[:, None]
    shared: dict[str, Any] = {
        **inputs,
        "query_positions": positions,
        "key_positions": positions,
    }
    tensors: dict[str, Any] = dict(static.METHOD.tensors(site, params))
    if fitted:
        tensors |= static.METHOD.calibrate(site, params, [inputs]).tensors
    variant = static.METHOD.lower(site, params)
    got = variant.reference(**shared, **tensors)
    want = dense.METHOD.lower(site, dense.DenseParameters()).reference(**shared)
    assert isinstance(want, np.ndarray)
    real = inputs["key_mask"][:, None, :, None]
    return got * real, want * real


@pytest.mark.parametrize("site", [GROUPED, SITES[0], make_site("full")])
def test_equal_queries_give_softmax(site: AttentionSite) -> None:
    got, want = outputs(site, ALL, sample(site, np.random.default_rng(0), spread=0), fitted=True)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    # The heaviest key weighs 1 / (1 + e^-3) of what it should.
    assert error < 0.05


def test_error_grows_with_the_spread_of_queries() -> None:
    errors = []
    for spread in (0.0, 0.3, 2.0):
        inputs = sample(GROUPED, np.random.default_rng(1), spread=spread)
        got, want = outputs(GROUPED, ALL, inputs, fitted=True)
        errors.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    assert errors == sorted(errors) and errors[1] < 0.3 < errors[2]


def test_before_calibration_it_is_the_running_mean() -> None:
    inputs = sample(GROUPED, np.random.default_rng(2), spread=1)
    got, _ = outputs(GROUPED, ALL, inputs, fitted=False)
    values = np.repeat(inputs["value"].astype(np.float64), 2, axis=1)
    mask = inputs["key_mask"][:, None, :, None]
    count = np.maximum(np.cumsum(np.broadcast_to(mask, values.shape), axis=2), 1)
    np.testing.assert_allclose(got, np.cumsum(values * mask, axis=2) / count * mask, atol=1e-6)


def test_heads_that_are_not_chosen_stay_exact() -> None:
    params = static.StaticParameters((0, 1, 0, 0))
    inputs = sample(GROUPED, np.random.default_rng(3), spread=1)
    got, want = outputs(GROUPED, params, inputs, fitted=True)
    np.testing.assert_allclose(got[:, [0, 2, 3]], want[:, [0, 2, 3]], rtol=1e-12)
    assert np.abs(got[:, 1] - want[:, 1]).max() > 1e-2


def test_heads_are_written_and_read() -> None:
    method, params = parse_method("static:1/0/0/1")
    assert method_text(method, params) == "static:heads=1/0/0/1"
    refused = method.supports(make_site("two"), params)
    assert isinstance(refused, Rejection) and "4 values for 2 query heads" in refused.reason
    nobody = method.supports(GROUPED, static.StaticParameters((0, 0, 0, 0)))
    assert isinstance(nobody, Rejection) and "no head" in nobody.reason
    with pytest.raises(UsageError, match="between 0 and 1"):
        parse_method("static:2")


def test_some_heads_alone() -> None:
    mixed = static.METHOD.mixed([ALL, None, ALL])
    assert mixed == static.StaticParameters((1, 0, 1))
