"""What every operator of the domain ``ai.subquad`` provides.

All attention operators share their first six inputs:

| # | name | shape, dtype | |
|---|---|---|---|
| 0 | query | ``[batch, num_heads, query_len, head_dim]`` float32 | |
| 1 | key | ``[batch, num_kv_heads, kv_len, head_dim]`` float32 | |
| 2 | value | ``[batch, num_kv_heads, kv_len, value_dim]`` float32 | |
| 3 | key_mask | ``[batch, kv_len]`` bool, true = real token | optional |
| 4 | query_positions | ``[batch, query_len]`` int64 | optional |
| 5 | key_positions | ``[batch, kv_len]`` int64 | optional |

Positions are real-token positions: slot minus first real slot (plus past length for queries), so
padding slots in front have negative ones. They rise by one per slot. A query sees a key iff the
key is real and ``-window_right <= query_position - key_position <= window_left`` (a limit of -1
means unlimited; ``window_right = 0`` is causal). A query that sees no key yields exact zeros.
Query head ``h`` reads key/value head ``h // (num_heads // num_kv_heads)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "ai.subquad"
DOMAIN_VERSION = 1
OPSET = 24

UNLIMITED = -1
"""Value of ``window_left`` / ``window_right`` that puts no limit on that side."""


class OperatorVariant(Protocol):
    """One operator with all static choices fixed: it has one function body and one overload.

    A body can branch neither on list attributes nor on absent inputs, hence a function per
    variant. Implementations are frozen dataclasses.
    """

    @property
    def op_type(self) -> str:
        """Operator name inside ``ai.subquad``."""

    @property
    def overload(self) -> str:
        """Unique, readable, deterministic name of this variant (ONNX function overload)."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs in order; ``""`` for an optional input that is absent."""

    def attributes(self) -> Mapping[str, ir.Attr]:
        """Attributes a node of this variant carries (read by kernels; bodies have them baked)."""

    def build_function(self) -> ir.Function:
        """The model-local ONNX function (opset 24 and allow-listed com.microsoft ops)."""

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        value: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        query_positions: NDArray[np.int64] | None = None,
        key_positions: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """The operator by its formula, in float64."""
