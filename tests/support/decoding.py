"""Pieces of a sequence through ``HybridState`` and ``HybridDecode``: what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles import Case
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.semantics import (
    HybridDecodeVariant,
    HybridStateVariant,
    decoding_of,
)
from subquad.kernels.operator import OperatorVariant, present_inputs
from subquad.runtime.errors import Rejection

Feeds = dict[str, NDArray[Any]]
Runner = Callable[[OperatorVariant, Feeds], Sequence[NDArray[Any]]]

SIZES = (4, 2, 7, 5, 0.3)
HYBRIDS = [
    HybridVariant(*SIZES, 5, 0, 3, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 5, 0, 3, -1, 0, "elu"),
    HybridVariant(*SIZES, 0, 0, 1, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 64, 0, 0, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 3, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 0, -1, 0, "elu"),
    HybridVariant(*SIZES, 5, 0, 8, 30, 0, has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 3, -1, 0, has_key_mask=True),
    HybridVariant(*SIZES, 9, 0, 2, -1, 0, "hedgehog", has_key_mask=True, map_dim=6),
    HybridVariant(*SIZES, 9, 0, 0, -1, 0, "softmax_pair", map_dim=9),
]


def operators_of(variant: HybridVariant) -> tuple[HybridStateVariant, HybridDecodeVariant]:
    found = decoding_of(variant)
    assert not isinstance(found, Rejection), found
    return found


def piece(case: Case, variant: OperatorVariant, start: int, end: int) -> Feeds:
    """Tokens ``start .. end - 1`` as the operator's new ones."""
    names = ("query", "key", "value")
    feeds: Feeds = {name: getattr(case, name)[:, :, start:end] for name in names}
    feeds["key_mask"] = case.key_mask[:, start:end]
    feeds["query_positions"] = feeds["key_positions"] = case.key_positions[:, start:end]
    feeds |= case.extra
    wanted = present_inputs(variant)
    return {name: np.ascontiguousarray(feeds[name]) for name in wanted if name in feeds}


def past(variant: HybridStateVariant | HybridDecodeVariant, state: Sequence[NDArray[Any]]) -> Feeds:
    """A state as the inputs of the next step."""
    return {f"past_{spec.name}": x for spec, x in zip(variant.state, state, strict=True)}


def decode(
    variant: HybridVariant, case: Case, cuts: Sequence[int], run: Runner
) -> tuple[NDArray[Any], Sequence[NDArray[Any]]]:
    """Outputs from ``cuts[0]`` on, in pieces between the cuts, and the last state."""
    first, step = operators_of(variant)
    state = run(first, piece(case, first, 0, cuts[0]))
    outputs = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        output, *state = run(step, piece(case, step, start, end) | past(step, state))
        outputs.append(output)
    return np.concatenate(outputs, axis=2), state
