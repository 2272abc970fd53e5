"""Decoding with a bounded state: references against prefill, bodies against references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoding import HYBRIDS, Feeds, decode, operators_of, past, piece
from oracles import mask_of, random_case, reference, relative_error, session
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.semantics import decoding_of, empty_state
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.errors import Rejection

every_variant = pytest.mark.parametrize("variant", HYBRIDS, ids=lambda v: v.overload)
KINDS = ("none", "left", "holes", "empty_row")

# float32 sums of <= 90 terms
TOLERANCE = 2e-6


def by_reference(variant: OperatorVariant, feeds: Feeds) -> list[NDArray[Any]]:
    return list(variant.reference(**feeds))


def by_body(variant: OperatorVariant, feeds: Feeds) -> list[NDArray[Any]]:
    outputs: list[NDArray[Any]] = session(variant).run(None, feeds)
    return outputs


@every_variant
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_reference_are_its_prefill(variant: HybridVariant, kind: str) -> None:
    rng = np.random.default_rng(1)
    mask = mask_of(kind if variant.has_key_mask else "none", 2, 80, rng)
    case = random_case(rng, variant, query_len=80, mask=mask)
    whole = reference(variant, case)
    for cuts in ([1, 2, 3, 80], [70, 71, 75, 80]):
        got, state = decode(variant, case, cuts, by_reference)
        # Both in float64.
        np.testing.assert_allclose(got, whole[:, :, cuts[0] :], rtol=1e-9, atol=1e-12)
        first, _ = operators_of(variant)
        for spec, have, want in zip(
            first.state, state, by_reference(first, piece(case, first, 0, 80)), strict=True
        ):
            np.testing.assert_allclose(have, want, rtol=1e-9, atol=1e-12, err_msg=spec.name)


@every_variant
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_equal_the_reference(variant: HybridVariant, kind: str) -> None:
    rng = np.random.default_rng(2)
    mask = mask_of(kind if variant.has_key_mask else "none", 2, 90, rng)
    case = random_case(rng, variant, query_len=90, mask=mask)
    first, step = operators_of(variant)
    for cut, length in ((1, 1), (3, 80), (70, 1)):
        feeds = piece(case, first, 0, cut)
        state = by_reference(first, feeds)
        for spec, have, want in zip(first.state, by_body(first, feeds), state, strict=True):
            assert relative_error(have, want) < TOLERANCE, spec.name
        state = [array.astype(np.float32) for array in state]
        feeds = piece(case, step, cut, cut + length) | past(step, state)
        got, wanted = by_body(step, feeds), by_reference(step, feeds)
        for spec, have, want in zip(step.outputs, got, wanted, strict=True):
            assert relative_error(have, want) < TOLERANCE, (spec.name, cut, length)
        assert not got[0][wanted[0] == 0.0].any(), "rows that see no key must be exact zeros"


@every_variant
def test_prefill_equals_decoding(variant: HybridVariant) -> None:
    """In ONNX Runtime: one piece, many steps, and a start from the empty state."""
    rng = np.random.default_rng(3)
    mask = mask_of("left" if variant.has_key_mask else "none", 2, 100, rng)
    case = random_case(rng, variant, query_len=100, mask=mask)
    whole = reference(variant, case)
    got, _ = decode(variant, case, [60, 61, 62, 70, 100], by_body)
    assert relative_error(got, whole[:, :, 60:]) < TOLERANCE
    _, step = operators_of(variant)
    output, *_ = by_body(step, piece(case, step, 0, 50) | empty_state(step, 2))
    assert relative_error(output, whole[:, :, :50]) < TOLERANCE


def test_what_has_no_bounded_state_is_declined() -> None:
    sizes = (4, 2, 7, 5, 0.3)
    both = decoding_of(HybridVariant(*sizes, 5, 5, feature_map="elu"))
    ahead = decoding_of(HybridVariant(*sizes, 5, 5, allowed_right=6))
    for found, reason in ((both, "not causal"), (ahead, "not causal")):
        assert isinstance(found, Rejection) and reason in found.reason


def test_overloads_differ() -> None:
    names = {op.overload for variant in HYBRIDS for op in operators_of(variant)[:1]}
    assert len(names) == len(HYBRIDS)
    scaled = replace(HYBRIDS[0], scale=0.25)
    assert operators_of(scaled)[0].overload not in names
