"""``ai.subquad::HybridAttention``: an exact key set plus a linear remainder, one normaliser.

With E the exact keys of a query and R all other keys it may see,

    out = (sum_E e^(s-m) v + e^(-m) sum_R phi(q).phi(k) v)
        / (sum_E e^(s-m)   + e^(-m) sum_R phi(q).phi(k)),      s = scale * q.k

``m`` cancels and only keeps the terms finite (Zhang et al., 2024, "LoLCATs",
https://arxiv.org/abs/2410.10254, eq. 6, with a mixing that is consistent in log-sum-exp: it equals
softmax where phi(q).phi(k) = e^s). Either set may be empty. E is the window and the sinks, both
inside what the site allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.band import MASKED, Band, VirtualKey, banded_attention
from subquad.kernels.body import Body
from subquad.kernels.hybrid.feature_maps import NONE, get_feature_map
from subquad.kernels.hybrid.linear import Side, linear_sums
from subquad.kernels.hybrid.reference import hybrid_attention
from subquad.kernels.inputs import (
    Heads,
    Inputs,
    declare_inputs,
    input_specs,
    limit_label,
    number_label,
    output_spec,
)
from subquad.kernels.operator import UNLIMITED, TensorSpec
from subquad.kernels.visibility import allowed_keys, in_band

TINY = 1e-30
"""Least denominator of a purely linear row; reached only where nothing is visible."""


@dataclass(frozen=True)
class HybridVariant:
    """Hybrid attention with all static choices fixed.

    Attributes:
        scale: multiplies query . key of exact keys; feature maps see unscaled vectors.
        window_left, window_right: the exact window in positions, the query itself not counted;
            both -1: no window.
        sinks: positions ``0 .. sinks-1`` are exact for every query that may see them.
        allowed_left, allowed_right: the site's own band; -1 = unlimited. With a linear part the
            left is unlimited and the right is unlimited or 0.
        feature_map: ``"none"`` leaves the linear part empty.
        mix: how the two parts share a normaliser; only ``"lse"``, the formula above.
        has_key_mask: whether input 3 is present.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    sinks: int = 0
    allowed_left: int = UNLIMITED
    allowed_right: int = UNLIMITED
    feature_map: str = NONE
    mix: Literal["lse"] = "lse"
    has_key_mask: bool = False

    def __post_init__(self) -> None:
        _ = self.heads
        linear = get_feature_map(self.feature_map) is not None
        limits = (self.window_left, self.window_right, self.allowed_left, self.allowed_right)
        if min(limits) < UNLIMITED or self.sinks < 0:
            raise ValueError(f"limits must be -1 or more and sinks 0 or more, got {self}")
        if (self.window_left == UNLIMITED) != (self.window_right == UNLIMITED):
            raise ValueError(f"an exact window needs both limits, got {self}")
        if _wider(self.window_left, self.allowed_left) or _wider(
            self.window_right, self.allowed_right
        ):
            raise ValueError(f"the exact window must lie inside the allowed band, got {self}")
        if linear and (self.allowed_left != UNLIMITED or self.allowed_right > 0):
            raise ValueError(f"a linear part cannot forget keys by distance, got {self}")
        if not linear and not self.has_window and not self.sinks:
            raise ValueError(f"neither an exact nor a linear part, got {self}")
        if self.mix != "lse":
            raise ValueError(f"unknown mixing rule {self.mix!r}; known: lse")

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def is_causal(self) -> bool:
        return self.allowed_right == 0

    @property
    def has_window(self) -> bool:
        return self.window_left != UNLIMITED

    @property
    def has_positions(self) -> bool:
        banded = self.allowed_left != UNLIMITED or self.allowed_right != UNLIMITED
        return banded or self.has_window or self.sinks > 0

    @property
    def op_type(self) -> str:
        return "HybridAttention"

    @property
    def overload(self) -> str:
        parts = [self.heads.label, f"s{number_label(self.scale)}"]
        if self.has_window:
            parts.append(f"w{self.window_left}_{self.window_right}")
        if self.sinks:
            parts.append(f"sinks{self.sinks}")
        parts.append(f"l{limit_label(self.allowed_left)}r{limit_label(self.allowed_right)}")
        parts.append(self.feature_map)
        if self.feature_map != NONE:
            parts.append(self.mix)
        if self.has_key_mask:
            parts.append("mask")
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        return input_specs(self.heads, key_mask=self.has_key_mask, positions=self.has_positions)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (output_spec(self.heads),)

    def attributes(self) -> Mapping[str, ir.Attr]:
        attributes = [
            ir.AttrString("variant", self.overload),
            ir.AttrInt64("num_heads", self.num_heads),
            ir.AttrInt64("num_kv_heads", self.num_kv_heads),
            ir.AttrFloat32("scale", self.scale),
            ir.AttrInt64("window_left", self.window_left),
            ir.AttrInt64("window_right", self.window_right),
            ir.AttrInt64("sinks", self.sinks),
            ir.AttrInt64("allowed_left", self.allowed_left),
            ir.AttrInt64("allowed_right", self.allowed_right),
            ir.AttrString("feature_map", self.feature_map),
            ir.AttrString("mix", self.mix),
        ]
        return {attribute.name: attribute for attribute in attributes}

    def build_function(self) -> ir.Function:
        body = Body()
        formal, inputs = declare_inputs(self.inputs)
        linear = self._linear_part(body, inputs)
        if not self.has_window and not self.sinks:
            assert linear is not None
            numerator, denominator = linear
            output = body("Div", numerator, body("Max", denominator, TINY))
        else:
            virtual = None if linear is None else _as_virtual_key(body, *linear)
            band = Band(
                self.window_left,
                self.window_right,
                self.sinks,
                self.allowed_left,
                self.allowed_right,
            )
            output = banded_attention(body, band, self.heads, inputs, self.scale, virtual=virtual)
        return body.function(self.op_type, self.overload, formal, [output], self.attributes())

    def _linear_part(self, body: Body, inputs: Inputs) -> tuple[ir.Value, ir.Value] | None:
        feature_map = get_feature_map(self.feature_map)
        if feature_map is None:
            return None
        query_features = feature_map.build(body, inputs.query)
        key_features = feature_map.build(body, inputs.key)
        counted = self._counted_keys(body, inputs)
        if counted is not None:
            key_features = body("Mul", key_features, counted)
        return linear_sums(body, self._sides(), self.heads, inputs, query_features, key_features)

    def _sides(self) -> tuple[Side, ...]:
        if self.is_causal:
            return (Side("past", self.window_left + 1),)
        if self.has_window:
            return (Side("past", self.window_left + 1), Side("future", self.window_right + 1))
        return ()

    def _counted_keys(self, body: Body, inputs: Inputs) -> ir.Value | None:
        """1 for real keys that are no sinks, ``[batch, 1, kv_len, 1]``; ``None``: all."""
        counted = inputs.key_mask
        if self.sinks:
            _, key_positions = inputs.positions
            no_sink = body("Not", body.between(key_positions, 0, self.sinks - 1))
            counted = no_sink if counted is None else body("And", counted, no_sink)
        return None if counted is None else body.unsqueeze(body.as_float(counted), 1, 3)

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        value: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        query_positions: NDArray[np.int64] | None = None,
        key_positions: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        shape = (query.shape[0], query.shape[2], key.shape[2])
        allowed = allowed_keys(
            shape, self.allowed_left, self.allowed_right, key_mask, query_positions, key_positions
        )
        exact = np.zeros(shape, dtype=np.bool_)
        if self.has_window:
            assert query_positions is not None and key_positions is not None
            exact |= in_band(query_positions, key_positions, self.window_left, self.window_right)
        if self.sinks:
            assert key_positions is not None
            exact |= ((key_positions >= 0) & (key_positions < self.sinks))[:, None, :]
        q = np.asarray(query, dtype=np.float64)
        k = np.asarray(key, dtype=np.float64)
        feature_map = get_feature_map(self.feature_map)
        return hybrid_attention(
            q,
            k,
            np.asarray(value, dtype=np.float64),
            None if feature_map is None else feature_map.apply(q),
            None if feature_map is None else feature_map.apply(k),
            allowed & exact,
            allowed & ~exact,
            self.scale,
        )


def _wider(window: int, allowed: int) -> bool:
    return allowed != UNLIMITED and window > allowed


def _as_virtual_key(body: Body, numerator: ir.Value, denominator: ir.Value) -> VirtualKey:
    """Normalised linear part and the logarithm of its normaliser."""
    safe = body("Max", denominator, TINY)
    score = body("Where", body("Greater", denominator, 0.0), body("Log", safe), MASKED)
    return VirtualKey(score, body("Div", numerator, safe))
