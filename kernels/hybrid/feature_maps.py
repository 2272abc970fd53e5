"""Feature maps of the linear part: float64 NumPy and ONNX side by side.

A map is applied to unscaled queries and keys. Its features must not be negative: the shared
normaliser and the logarithm taken by the ``lse`` mixing rule rely on it. One that is ``is_signed``
serves linear attention without a normaliser only. Maps with weights see
``u = x W + b`` beside ``x``; ``W`` and ``b`` come per head as one tensor
``[heads, head_dim + 1, map_dim]`` whose last row is ``b``.

Another map is one entry of ``FEATURE_MAPS`` (and one of ``FEATURE_KERNELS`` in
``kernels/templates/feature_kernels.py``, without which it runs as ONNX function only).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import Body

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FeatureMap:
    """One non-negative feature map.

    Attributes:
        name: value of the operator's ``feature_map`` attribute.
        source: paper and equation.
        features: from ``u``, ``[..., map_dim]`` (``x`` where the map has no weights), in float64.
        build_features: the same as ONNX nodes.
        features_per_dim: see ``feature_dim``.
        has_weights: whether ``W`` and ``b`` exist.
        is_signed: whether features may be negative.
    """

    name: str
    source: str
    features: Callable[[Array], Array]
    build_features: Callable[[Body, ir.Value], ir.Value]
    features_per_dim: int = 1
    has_weights: bool = False
    is_signed: bool = False

    def feature_dim(self, dims: int) -> int:
        """Number of features over ``map_dim`` or, without weights, ``head_dim``."""
        return self.features_per_dim * dims

    def apply(self, x: NDArray[np.floating], weights: NDArray[np.floating] | None = None) -> Array:
        """``[batch, heads, length, head_dim]`` to ``[batch, heads, length, features]``."""
        u: Array = np.asarray(x, dtype=np.float64)
        if self.has_weights:
            assert weights is not None, f"feature map {self.name} needs weights"
            matrix: Array = np.asarray(weights, dtype=np.float64)
            u = u @ matrix[:, :-1] + matrix[:, -1:]
        return self.features(u)

    def build(self, body: Body, x: ir.Value, weights: ir.Value | None = None) -> ir.Value:
        """The same as ONNX nodes."""
        if self.has_weights:
            assert weights is not None, f"feature map {self.name} needs weights"
            matrix = body.slice(weights, 0, -1, 1)
            bias = body.slice(weights, -1, np.iinfo(np.int64).max, 1)
            x = body("Add", body("MatMul", x, matrix), bias)
        return self.build_features(body, x)


def _elu_plus_one(x: Array) -> Array:
    return np.maximum(x, 0.0) + np.exp(np.minimum(x, 0.0))


def _build_elu_plus_one(body: Body, x: ir.Value) -> ir.Value:
    # Elu(x) + 1 would cancel: at x = -10 it keeps three digits of exp(x).
    return body("Add", body("Relu", x), body("Exp", body("Min", x, 0.0)))


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    normalised: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normalised


def _hedgehog(u: Array) -> Array:
    return _softmax(np.concatenate([u, -u], axis=-1))


def _build_hedgehog(body: Body, u: ir.Value) -> ir.Value:
    return body("Softmax", body("Concat", u, body("Neg", u), axis=-1), axis=-1)


LEAST_FEATURE = 1e-12
"""Floor of the features of ``softmax_pair``, as in the public LoLCATs code."""


def _softmax_pair(u: Array) -> Array:
    both: Array = np.concatenate([_softmax(u), _softmax(-u)], axis=-1)
    return np.maximum(both, LEAST_FEATURE)


def _build_softmax_pair(body: Body, u: ir.Value) -> ir.Value:
    halves = [body("Softmax", x, axis=-1) for x in (u, body("Neg", u))]
    return body("Max", body("Concat", *halves, axis=-1), LEAST_FEATURE)


ELU = FeatureMap(
    name="elu",
    source="Katharopoulos et al., 2020, eq. 7, https://arxiv.org/abs/2006.16236",
    features=_elu_plus_one,
    build_features=_build_elu_plus_one,
)

HEDGEHOG = FeatureMap(
    name="hedgehog",
    source=(
        "softmax([u, -u]) over all features: Zhang et al., 2024, Hedgehog, "
        "https://arxiv.org/abs/2402.04347, eq. 6, normalised as in flash-linear-attention, whose "
        "factor 2 is part of W and b here"
    ),
    features=_hedgehog,
    build_features=_build_hedgehog,
    features_per_dim=2,
    has_weights=True,
)

SOFTMAX_PAIR = FeatureMap(
    name="softmax_pair",
    source=(
        "[softmax(u), softmax(-u)]: Zhang et al., 2024, LoLCATs, https://arxiv.org/abs/2410.10254, "
        "its form of Hedgehog"
    ),
    features=_softmax_pair,
    build_features=_build_softmax_pair,
    features_per_dim=2,
    has_weights=True,
)

RELU = FeatureMap(
    name="relu",
    source="max(x, 0): Kasai et al., 2021, T2R, https://arxiv.org/abs/2103.13076, without its maps",
    features=lambda x: np.maximum(x, 0.0),
    build_features=lambda body, x: body("Relu", x),
)

IDENTITY = FeatureMap(
    name="identity",
    source="x itself: Sun et al., 2023, RetNet, https://arxiv.org/abs/2307.08621, eq. 5",
    features=lambda x: x,
    build_features=lambda body, x: x,
    is_signed=True,
)

FEATURE_MAPS: tuple[FeatureMap, ...] = (ELU, HEDGEHOG, SOFTMAX_PAIR, RELU, IDENTITY)

NONE = "none"
"""Value of ``feature_map`` that leaves the linear part empty."""


def get_feature_map(name: str) -> FeatureMap | None:
    """The map of that name; ``None`` for ``"none"``."""
    if name == NONE:
        return None
    for feature_map in FEATURE_MAPS:
        if feature_map.name == name:
            return feature_map
    known = ", ".join([NONE, *(feature_map.name for feature_map in FEATURE_MAPS)])
    raise ValueError(f"unknown feature map {name!r}; known: {known}")
