"""How much attention a block of queries pays to a block of keys, estimated at block level.

An estimator names one vector that stands for a block of queries; keys stand as their mean. Score of
a pair is ``cap(scale * q . k) + log(n)`` with ``n`` the real keys of the block: the softmax over
such scores is the mass that blocks of equal keys would get.

Each is one entry of ``ESTIMATORS``: float64 NumPy and ONNX side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import Body


@dataclass(frozen=True)
class Estimator:
    """One way to represent a block of queries.

    Attributes:
        name: value of the operator's ``estimator`` attribute.
        source: paper.
        reads_later_queries: whether a query's list depends on queries after it.
        represent: float64 queries ``[..., blocks, block, dim]`` and whether each is real
            ``[..., blocks, block]`` -> ``[..., blocks, dim]``; anything where none is real.
        build: the same as ONNX nodes, of ``[batch, heads, blocks, block, dim]`` and
            ``[batch, 1, blocks, block]``.
    """

    name: str
    source: str
    reads_later_queries: bool
    represent: Callable[[NDArray[np.float64], NDArray[np.bool_]], NDArray[np.float64]]
    build: Callable[[Body, ir.Value, ir.Value], ir.Value]


def mean_of_real(rows: NDArray[np.float64], real: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean over the last axis but one."""
    total = np.where(real[..., None], rows, 0.0).sum(axis=-2)
    return np.asarray(total / np.maximum(real.sum(axis=-1), 1)[..., None])


def build_mean_of_real(body: Body, rows: ir.Value, real: ir.Value) -> ir.Value:
    # Where, not a product: what stands in padding may be infinite.
    kept = body("Where", body.unsqueeze(real, 4), rows, 0.0)
    count = body("ReduceSum", body.as_float(real), [-1], keepdims=1)
    total = body("ReduceSum", kept, [3], keepdims=0)
    return body("Div", total, body("Max", count, 1.0))


def _previous_mean(rows: NDArray[np.float64], real: NDArray[np.bool_]) -> NDArray[np.float64]:
    mean, present = mean_of_real(rows, real), np.asarray(real.any(axis=-1))
    first = np.argmax(real, axis=-1)[..., None, None]
    own = np.take_along_axis(rows, np.broadcast_to(first, (*rows.shape[:-2], 1, 1)), axis=-2)
    chosen = np.where(present[..., None], own[..., 0, :], 0.0)
    before = present[..., :-1, None]
    chosen[..., 1:, :] = np.where(before, mean[..., :-1, :], chosen[..., 1:, :])
    return chosen


def _build_previous_mean(body: Body, rows: ir.Value, real: ir.Value) -> ir.Value:
    mean = build_mean_of_real(body, rows, real)
    as_int = body("Cast", real, to=6)
    # At most one term of the sum is not zero, so it is exact.
    seen = body("CumSum", as_int, body.scalar(3, np.int64))
    first = body("And", real, body("Equal", seen, np.array([1], np.int32)))
    own = body("ReduceSum", body("Where", body.unsqueeze(first, 4), rows, 0.0), [3], keepdims=0)
    present = body("ReduceMax", as_int, [-1], keepdims=1)
    blocks = body.dim(mean, 2)

    def shifted(values: ir.Value) -> ir.Value:
        return body.slice(body.pad(values, 2, 4, before=1), 0, blocks, 2)

    before = shifted(mean)
    has_before = body("Cast", shifted(present), to=9)
    return body("Where", has_before, before, own)


POOLED = Estimator(
    name="pooled",
    source="mean-pooled queries and keys, as in NABLA, https://arxiv.org/abs/2507.13546",
    reads_later_queries=True,
    represent=mean_of_real,
    build=build_mean_of_real,
)

CAUSAL = Estimator(
    name="causal",
    source="as pooled, by the queries of the block before",
    reads_later_queries=False,
    represent=_previous_mean,
    build=_build_previous_mean,
)
"""Neighbouring blocks look at the same places. Where the block before holds no real query, the
first real one of the block itself stands for it."""

ESTIMATORS: tuple[Estimator, ...] = (POOLED, CAUSAL)


def get_estimator(name: str) -> Estimator:
    """The estimator of that name."""
    for estimator in ESTIMATORS:
        if estimator.name == name:
            return estimator
    known = ", ".join(estimator.name for estimator in ESTIMATORS)
    raise ValueError(f"unknown estimator {name!r}; known: {known}")
