"""``ai.subquad::HybridAttention``: an exact key set plus a linear remainder, one normaliser.

With E the exact keys of a query and R all other keys it may see, ``s = scale * q.k`` and
``r = phi_q(q).phi_k(k)``,

    lse:     out = (sum_E e^(s-m) v + e^(-m) sum_R r v) / (sum_E e^(s-m) + e^(-m) sum_R r)
    shared:  out = (g sum_E e^(s-m) v + sum_R r v) / (g sum_E e^(s-m) + sum_R r),   m = max_E s

``shared`` is Zhang et al., 2024, "LoLCATs", https://arxiv.org/abs/2410.10254, eq. 6, with a gain
``g`` per head. In ``lse``, ``m`` cancels and only keeps the terms finite: it equals softmax where
r = e^s. Either set may be empty. E is the window and the sinks, both inside what the site allows;
heads may differ in both, and in whether they have a linear part (``head_parts``).

Without exact keys the linear part stands alone, and may have another normaliser or none:

    sum:     out = sum_R r v / max(least, epsilon + sum_R r)
    none:    out = scale * sum_R r v                  for feature maps that may be negative, too

With decay, ``r`` is multiplied by ``exp(log_decay * distance)``, the distance in positions.

Inputs after the six that all operators share:

| # | name | shape, dtype | |
|---|---|---|---|
| 6 | query_map | ``[num_heads, head_dim + 1, map_dim]`` float32 | feature maps with weights |
| 7 | key_map | ``[num_kv_heads, head_dim + 1, map_dim]`` float32 | feature maps with weights |
| 8 | log_decay | ``[num_kv_heads]`` float32, at most 0 | ``has_decay`` |
| 9 | window_gain | ``[num_heads]`` float32, positive: ``g`` | mix ``shared`` |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import Body
from subquad.kernels.hybrid.bodies import hybrid_body, mixed_body
from subquad.kernels.hybrid.feature_maps import NONE, FeatureMap, get_feature_map
from subquad.kernels.hybrid.reference import (
    LinearWeights,
    hybrid_attention,
    linear_attention,
)
from subquad.kernels.inputs import (
    Heads,
    declare_inputs,
    input_specs,
    limit_label,
    number_label,
    output_spec,
)
from subquad.kernels.operator import UNLIMITED, TensorSpec, node_attributes
from subquad.kernels.visibility import allowed_keys, in_band

MIXES = ("lse", "shared")
NORMALISERS = ("sum", "none")


class HeadPart(NamedTuple):
    """What one query head of a mixed node does.

    Attributes:
        window_left, window_right, sinks: as of ``HybridVariant``.
        linear: 1 if the other keys it may see count by features, 0 if they are dropped.

    Neither window nor sinks nor linear: every key it may see is exact (a dense head).
    """

    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    sinks: int = 0
    linear: int = 0

    @property
    def is_dense(self) -> bool:
        return self == HeadPart()

    @property
    def has_window(self) -> bool:
        return self.window_left != UNLIMITED


@dataclass(frozen=True)
class HybridVariant:
    """Hybrid attention with all static choices fixed.

    Attributes:
        scale: multiplies query . key of exact keys, and sums without a normaliser; feature maps see
            unscaled vectors.
        window_left, window_right: the exact window in positions, the query itself not counted;
            both -1: no window.
        sinks: positions ``0 .. sinks-1`` are exact for every query that may see them.
        allowed_left, allowed_right: the site's own band; -1 = unlimited. With a linear part the
            left is unlimited and the right is unlimited or 0.
        feature_map: ``"none"`` leaves the linear part empty.
        mix: how the two parts share a normaliser, see above.
        has_key_mask: whether input 3 is present.
        map_dim: outputs of the feature map's projection; 0 for maps without weights.
        has_decay: whether input 8 is present.
        head_parts: a ``HeadPart`` (or its four numbers) per query head; then window, sinks and the
            presence of a linear part are those, not the fields above. Empty: heads do the same.
        normaliser, epsilon, least: of a linear part that stands alone, see above.
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
    mix: Literal["lse", "shared"] = "lse"
    has_key_mask: bool = False
    map_dim: int = 0
    has_decay: bool = False
    head_parts: tuple[tuple[int, int, int, int], ...] = ()
    normaliser: Literal["sum", "none"] = "sum"
    epsilon: float = 0.0
    least: float = 0.0

    def __post_init__(self) -> None:
        _ = self.heads
        if self.mix not in MIXES:
            raise ValueError(f"unknown mixing rule {self.mix!r}; known: {', '.join(MIXES)}")
        if min(self.allowed_left, self.allowed_right) < UNLIMITED:
            raise ValueError(f"limits must be -1 or more, got {self}")
        feature_map = get_feature_map(self.feature_map)
        if (self.map_dim > 0) != (feature_map is not None and feature_map.has_weights):
            raise ValueError(f"map_dim belongs to feature maps with weights, got {self}")
        if feature_map is None and self.has_decay:
            raise ValueError(f"decay belongs to the linear part, got {self}")
        if feature_map is not None and (self.allowed_left != UNLIMITED or self.allowed_right > 0):
            raise ValueError(f"a linear part cannot forget keys by distance, got {self}")
        if self.head_parts:
            self._check_mixed()
        for part in self.parts:
            self._check_part(part)
        exact = any(part.has_window or part.sinks for part in self.parts)
        if self.mix == "shared" and not (exact and feature_map is not None):
            raise ValueError(f"the shared mix needs exact and linear keys, got {self}")
        self._check_normaliser(feature_map, exact)

    def _check_normaliser(self, feature_map: FeatureMap | None, exact: bool) -> None:
        if self.normaliser not in NORMALISERS:
            raise ValueError(
                f"unknown normaliser {self.normaliser!r}; known: {', '.join(NORMALISERS)}"
            )
        limited = self.epsilon or self.least
        if min(self.epsilon, self.least) < 0 or (limited and self.normaliser == "none"):
            raise ValueError(
                f"epsilon and least must be 0 or more, and belong to a sum, got {self}"
            )
        alone = feature_map is not None and not exact and not self.head_parts
        if (limited or self.normaliser == "none") and not alone:
            raise ValueError(f"only a linear part that stands alone has its normaliser, got {self}")
        if feature_map is not None and feature_map.is_signed and self.normaliser != "none":
            raise ValueError(f"a sum of features that may be negative is no normaliser, got {self}")

    def _check_mixed(self) -> None:
        if len(self.head_parts) != self.num_heads:
            raise ValueError(f"head_parts needs one entry per query head, got {self}")
        if self.has_window or self.sinks:
            raise ValueError(f"with head_parts, windows and sinks stand there only, got {self}")
        if any(part.linear for part in self.parts) != (self.feature_map != NONE):
            raise ValueError(f"a feature map is for the linear heads of head_parts, got {self}")

    def _check_part(self, part: HeadPart) -> None:
        if min(part.window_left, part.window_right) < UNLIMITED or part.sinks < 0:
            raise ValueError(f"limits must be -1 or more and sinks 0 or more, got {self}")
        if (part.window_left == UNLIMITED) != (part.window_right == UNLIMITED):
            raise ValueError(f"an exact window needs both limits, got {self}")
        if _wider(part.window_left, self.allowed_left) or _wider(
            part.window_right, self.allowed_right
        ):
            raise ValueError(f"the exact window must lie inside the allowed band, got {self}")
        if part.is_dense and not self.head_parts:
            raise ValueError(f"neither an exact nor a linear part, got {self}")

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def parts(self) -> tuple[HeadPart, ...]:
        """What each query head does."""
        if self.head_parts:
            return tuple(HeadPart(*part) for part in self.head_parts)
        linear = int(self.feature_map != NONE)
        part = HeadPart(self.window_left, self.window_right, self.sinks, linear)
        return (part,) * self.num_heads

    @property
    def is_causal(self) -> bool:
        return self.allowed_right == 0

    @property
    def has_window(self) -> bool:
        return self.window_left != UNLIMITED

    @property
    def has_positions(self) -> bool:
        banded = self.allowed_left != UNLIMITED or self.allowed_right != UNLIMITED
        exact = any(part.has_window or part.sinks > 0 for part in self.parts)
        return banded or exact or self.has_decay

    @property
    def feature_dim(self) -> int:
        """Features per head; 0 without a linear part."""
        feature_map = get_feature_map(self.feature_map)
        if feature_map is None:
            return 0
        return feature_map.feature_dim(self.map_dim or self.head_dim)

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
        if self.head_parts:
            # The numbers of 32 heads would not fit a name; the node's attribute spells them out.
            numbers = ",".join(str(number) for part in self.head_parts for number in part)
            parts.append("mixed" + hashlib.sha256(numbers.encode()).hexdigest()[:12])
        parts.append(f"l{limit_label(self.allowed_left)}r{limit_label(self.allowed_right)}")
        parts.append(self.feature_map + (str(self.map_dim) if self.map_dim else ""))
        if self.feature_map != NONE:
            parts.append(self.mix)
        if self.normaliser == "none":
            parts.append("unnormalised")
        if self.epsilon:
            parts.append(f"eps{number_label(self.epsilon)}")
        if self.least:
            parts.append(f"least{number_label(self.least)}")
        if self.has_decay:
            parts.append("decay")
        if self.has_key_mask:
            parts.append("mask")
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        maps: list[TensorSpec | None] = [None, None]
        if self.map_dim:
            rows = self.head_dim + 1
            maps = [
                TensorSpec("query_map", "float32", (self.num_heads, rows, self.map_dim)),
                TensorSpec("key_map", "float32", (self.num_kv_heads, rows, self.map_dim)),
            ]
        decay = TensorSpec("log_decay", "float32", (self.num_kv_heads,))
        gain = TensorSpec("window_gain", "float32", (self.num_heads,))
        extra = [
            *maps,
            decay if self.has_decay else None,
            gain if self.mix == "shared" else None,
        ]
        return input_specs(
            self.heads, key_mask=self.has_key_mask, positions=self.has_positions, extra=extra
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (output_spec(self.heads),)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return node_attributes(
            self,
            "num_heads",
            "num_kv_heads",
            "scale",
            "window_left",
            "window_right",
            "sinks",
            "allowed_left",
            "allowed_right",
            "feature_map",
            "mix",
            *(("head_parts",) if self.head_parts else ()),
            *(("normaliser",) if self.normaliser != "sum" else ()),
            *(("epsilon",) if self.epsilon else ()),
            *(("least",) if self.least else ()),
        )

    def build_function(self) -> ir.Function:
        body = Body()
        formal, inputs = declare_inputs(self.inputs)
        build = mixed_body if self.head_parts else hybrid_body
        output = build(body, self, inputs)
        return body.function(self.op_type, self.overload, formal, [output], self.attributes())

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        value: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        query_positions: NDArray[np.int64] | None = None,
        key_positions: NDArray[np.int64] | None = None,
        query_map: NDArray[np.floating] | None = None,
        key_map: NDArray[np.floating] | None = None,
        log_decay: NDArray[np.floating] | None = None,
        window_gain: NDArray[np.floating] | None = None,
    ) -> NDArray[np.float64]:
        shape = (query.shape[0], query.shape[2], key.shape[2])
        allowed = allowed_keys(
            shape, self.allowed_left, self.allowed_right, key_mask, query_positions, key_positions
        )
        q, k, v = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
        feature_map = get_feature_map(self.feature_map)
        weights: LinearWeights | None = None
        if feature_map is not None:
            distance = None
            if log_decay is not None:
                assert query_positions is not None and key_positions is not None
                distance = np.abs(query_positions[:, :, None] - key_positions[:, None]) * 1.0
            weights = LinearWeights(
                feature_map.apply(q, query_map),
                feature_map.apply(k, key_map),
                None if log_decay is None else np.asarray(log_decay, dtype=np.float64),
                distance,
                None if window_gain is None else np.asarray(window_gain, dtype=np.float64),
            )
        outputs = {}
        for part in set(self.parts):
            exact = self._exact_keys(part, shape, query_positions, key_positions)
            used = weights if part.linear else None
            remainder = allowed & ~exact
            if self.normaliser == "none" or self.epsilon or self.least:
                assert weights is not None
                factor = self.scale if self.normaliser == "none" else None
                outputs[part] = linear_attention(
                    v, weights, remainder, factor, self.epsilon, self.least
                )
                continue
            outputs[part] = hybrid_attention(q, k, v, used, allowed & exact, remainder, self.scale)
        heads = [outputs[part][:, head] for head, part in enumerate(self.parts)]
        return np.stack(heads, axis=1)

    def _exact_keys(
        self,
        part: HeadPart,
        shape: tuple[int, int, int],
        query_positions: NDArray[np.int64] | None,
        key_positions: NDArray[np.int64] | None,
    ) -> NDArray[np.bool_]:
        exact = np.full(shape, part.is_dense)
        if part.has_window:
            assert query_positions is not None and key_positions is not None
            exact |= in_band(query_positions, key_positions, part.window_left, part.window_right)
        if part.sinks:
            assert key_positions is not None
            exact |= ((key_positions >= 0) & (key_positions < part.sinks))[:, None, :]
        return exact

    @property
    def map(self) -> FeatureMap | None:
        return get_feature_map(self.feature_map)


def _wider(window: int, allowed: int) -> bool:
    return allowed != UNLIMITED and window > allowed
