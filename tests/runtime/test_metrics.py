from __future__ import annotations

import math

import numpy as np
import pytest

from subquad.runtime import metrics
from subquad.runtime.jsonable import json_ready
from subquad.runtime.metrics import Difference, LogitsDifference, relative_change


def test_difference_matches_the_formulas() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((7, 5))
    model = reference + 0.1 * rng.standard_normal((7, 5))
    difference = Difference()
    difference.add(reference[:3], model[:3])
    difference.add(reference[3:], model[3:])
    error = model - reference
    assert difference.relative_l2 == pytest.approx(
        np.linalg.norm(error) / np.linalg.norm(reference), rel=1e-12
    )
    cosine = (reference * model).sum(1)
    cosine /= np.linalg.norm(reference, axis=1) * np.linalg.norm(model, axis=1)
    assert difference.cosine == pytest.approx(cosine.mean(), rel=1e-12)
    assert difference.cosine_min == pytest.approx(cosine.min(), rel=1e-12)
    assert difference.max_abs == pytest.approx(np.abs(error).max(), rel=1e-12)
    assert difference.vectors == 7


def test_slices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    reference, model = rng.standard_normal((2, 9, 4))
    labels = np.array([0, 1, -1, 3, 2, -1, 0, 0, 1])
    results = []
    for size in (1 << 20, 8):
        monkeypatch.setattr(metrics, "_SLICE_ELEMENTS", size)
        logits = LogitsDifference()
        logits.add(reference, model, labels)
        results.append(logits.to_json())
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_logits_match_the_formulas() -> None:
    rng = np.random.default_rng(1)
    reference, model = rng.standard_normal((2, 6, 4))
    labels = np.array([3, -1, 0, 1, -1, 2])
    logits = LogitsDifference()
    logits.add(reference.astype(np.float32), model.astype(np.float32), labels)
    p = np.exp(reference) / np.exp(reference).sum(1, keepdims=True)
    q = np.exp(model) / np.exp(model).sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    rows = labels >= 0
    # inputs rounded to float32
    assert logits.kl_mean == pytest.approx(kl.mean(), rel=1e-5)
    assert logits.kl_max == pytest.approx(kl.max(), rel=1e-5)
    assert logits.top1 == (p.argmax(1) == q.argmax(1)).mean()
    nll_p = -np.log(p[rows, labels[rows]]).mean()
    nll_q = -np.log(q[rows, labels[rows]]).mean()
    assert logits.reference_perplexity == pytest.approx(math.exp(nll_p), rel=1e-5)
    assert logits.model_perplexity == pytest.approx(math.exp(nll_q), rel=1e-5)
    assert logits.perplexity_ratio == pytest.approx(math.exp(nll_q - nll_p), rel=1e-5)


def test_non_finite_values_never_pass() -> None:
    difference = Difference()
    difference.add(np.ones((2, 2)), np.array([[1.0, np.nan], [1.0, np.inf]]))
    assert difference.non_finite == 2
    assert difference.relative_l2 == math.inf
    assert math.isnan(difference.cosine)


def test_values_that_are_infinite_in_the_reference_are_not_compared() -> None:
    difference = Difference()
    difference.add(np.array([[1.0, -np.inf]]), np.array([[1.0, -np.inf]]))
    assert difference.relative_l2 == 0.0
    assert (difference.non_finite, difference.reference_non_finite) == (0, 1)


def test_masked_vocabulary_does_not_spoil_the_kl() -> None:
    logits = LogitsDifference()
    values = np.array([[0.0, 1.0, -np.inf]])
    logits.add(values, values, np.array([1]))
    assert logits.kl_mean == 0.0


def test_zero_against_zero_and_something() -> None:
    zero, one = Difference(), Difference()
    zero.add(np.zeros((2, 3)), np.zeros((2, 3)))
    one.add(np.zeros((2, 3)), np.ones((2, 3)))
    assert (zero.relative_l2, zero.cosine) == (0.0, 1.0)
    assert (one.relative_l2, one.cosine) == (math.inf, 0.0)


def test_relative_change_sees_every_bit() -> None:
    values = np.array([0.0, 1.0, np.nan], np.float32)
    assert relative_change(values, values.copy()) == 0.0
    assert relative_change(values[:2], np.array([-0.0, 1.0], np.float32)) > 0.0
    assert relative_change(np.array([2.0]), np.array([1.0])) == 0.5
    assert relative_change(np.array([1.0]), np.array([np.nan])) == math.inf


def test_slices_do_not_matter_to_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    before = rng.standard_normal((5, 7)).astype(np.float32)
    after = before.copy()
    after[4, 6] += 1  # in the last slice
    want = 1 / np.linalg.norm(before.astype(np.float64))
    for size in (1 << 20, 4):
        monkeypatch.setattr(metrics, "_SLICE_ELEMENTS", size)
        assert relative_change(before, before.copy()) == 0.0
        # 1 is added in float32.
        assert relative_change(before, after) == pytest.approx(want, rel=1e-6)


def test_json_has_no_nan() -> None:
    value = {"a": (math.inf, math.nan, np.float32(1.5)), "b": np.arange(2)}
    assert json_ready(value) == {"a": ["inf", "nan", 1.5], "b": [0, 1]}
