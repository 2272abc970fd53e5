"""Feature maps of the linear part: float64 NumPy and ONNX side by side.

A map is applied to unscaled queries and keys. Its features must not be negative: the shared
normaliser and the logarithm taken by the ``lse`` mixing rule rely on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import Body


@dataclass(frozen=True)
class FeatureMap:
    """One non-negative feature map.

    Attributes:
        name: value of the operator's ``feature_map`` attribute.
        source: paper and equation.
        apply: ``[..., head_dim]`` -> ``[..., feature_dim]`` in float64.
        build: the same as ONNX nodes.
        feature_dim: number of features for a head_dim.
        weight_names: per-head weight inputs appended after the six common ones; none so far.
            TODO: pass them to ``apply`` and ``build`` with the first map that has any (Hedgehog).
    """

    name: str
    source: str
    apply: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    build: Callable[[Body, ir.Value], ir.Value]
    feature_dim: Callable[[int], int]
    weight_names: tuple[str, ...] = ()


def _elu_plus_one(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(x, 0.0) + np.exp(np.minimum(x, 0.0))


def _build_elu_plus_one(body: Body, x: ir.Value) -> ir.Value:
    # Elu(x) + 1 would cancel: at x = -10 it keeps three digits of exp(x).
    return body("Add", body("Relu", x), body("Exp", body("Min", x, 0.0)))


ELU = FeatureMap(
    name="elu",
    source="Katharopoulos et al., 2020, eq. 7, https://arxiv.org/abs/2006.16236",
    apply=_elu_plus_one,
    build=_build_elu_plus_one,
    feature_dim=lambda head_dim: head_dim,
)

FEATURE_MAPS: tuple[FeatureMap, ...] = (ELU,)

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
