"""Shared helpers: random inputs, one-node models in ONNX Runtime, naive per-query attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from subquad.kernels.one_node import one_node_model
from subquad.kernels.operator import OperatorVariant, present_inputs


@lru_cache(maxsize=256)
def _session(variant: Any) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    serialized = one_node_model(variant).SerializeToString()
    return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def session(variant: OperatorVariant) -> ort.InferenceSession:
    """A CPU session of ``one_node_model``, one thread."""
    hashable: Any = variant
    return _session(hashable)


@dataclass(frozen=True)
class Case:
    """Inputs of one operator call; positions as the converter makes them from the mask."""

    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    key_mask: NDArray[np.bool_]
    query_positions: NDArray[np.int64]
    key_positions: NDArray[np.int64]
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Inputs of one operator only, by name."""

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def edited(self, name: str, edit: Callable[[NDArray[Any]], None]) -> Case:
        """A copy with one array changed in place by ``edit``."""
        array = np.array(getattr(self, name))
        edit(array)
        changed: dict[str, Any] = {name: array}
        return replace(self, **changed)

    def feeds(self, variant: OperatorVariant) -> dict[str, NDArray[Any]]:
        return {
            name: self.extra[name] if name in self.extra else getattr(self, name)
            for name in present_inputs(variant)
        }


def run(variant: OperatorVariant, case: Case) -> NDArray[np.float32]:
    """The first output of the function body in ONNX Runtime."""
    return run_all(variant, case)[0]


def run_all(variant: OperatorVariant, case: Case) -> list[NDArray[np.float32]]:
    """All outputs of the function body in ONNX Runtime."""
    outputs: list[NDArray[np.float32]] = session(variant).run(None, case.feeds(variant))
    return outputs


def reference(variant: OperatorVariant, case: Case) -> NDArray[np.float64]:
    """The first output of the float64 reference on the same inputs."""
    return reference_all(variant, case)[0]


def reference_all(variant: OperatorVariant, case: Case) -> list[NDArray[np.float64]]:
    wanted = variant.reference(**case.feeds(variant))
    return list(wanted) if isinstance(wanted, tuple) else [wanted]


def random_case(
    rng: np.random.Generator,
    variant: Any,
    *,
    batch: int = 2,
    query_len: int = 7,
    kv_len: int | None = None,
    mask: NDArray[np.bool_] | None = None,
    gain: float = 1.0,
) -> Case:
    """Random inputs; queries are the last ``query_len`` of ``kv_len`` slots."""
    kv_len = query_len if kv_len is None else kv_len
    heads = variant.heads
    if mask is None:
        mask = np.ones((batch, kv_len), dtype=np.bool_)
    first_real = np.where(mask.any(axis=1), mask.argmax(axis=1), 0)
    key_positions = np.arange(kv_len, dtype=np.int64)[None] - first_real[:, None]
    return Case(
        query=_normal(rng, gain, batch, heads.num_heads, query_len, heads.head_dim),
        key=_normal(rng, gain, batch, heads.num_kv_heads, kv_len, heads.head_dim),
        value=_normal(rng, 1.0, batch, heads.num_kv_heads, kv_len, heads.value_dim),
        key_mask=mask,
        query_positions=key_positions[:, kv_len - query_len :],
        key_positions=key_positions,
        extra=_extra(rng, variant, batch, query_len, kv_len),
    )


def _extra(
    rng: np.random.Generator, variant: Any, batch: int, query_len: int, kv_len: int
) -> dict[str, NDArray[np.float32]]:
    """Inputs of one operator: biases of the size that scores have, a tenth of them hiding."""
    sizes = {"batch": batch, "query_len": query_len, "kv_len": kv_len}
    extra = {}
    for spec in variant.inputs[6:]:
        if spec is None or spec.dtype != "float32":
            continue
        array = _normal(rng, 1.0, *(sizes.get(dim, dim) for dim in spec.dims))
        if spec.name in ("query_map", "key_map"):
            array *= np.float32(0.7)
        if spec.name == "log_decay":
            array = np.float32(-0.1) * np.abs(array)
        if spec.name == "window_gain":
            array = rng.uniform(0.1, 1.1, array.shape).astype(np.float32)
        if spec.name == "slopes":
            array = rng.uniform(0.05, 0.5, array.shape).astype(np.float32)
        if spec.name in ("key_bias", "score_bias"):
            hiding = rng.choice(np.array([-np.inf, np.finfo(np.float32).min, -1e30]), array.shape)
            array = np.where(rng.random(array.shape) < 0.1, hiding, array).astype(np.float32)
        extra[spec.name] = array
    return extra


def _normal(rng: np.random.Generator, gain: float, *shape: int) -> NDArray[np.float32]:
    return (gain * rng.standard_normal(shape)).astype(np.float32)


def mask_of(kind: str, batch: int, kv_len: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A key mask: none, left, right, holes or empty_row (padding of one row, or everywhere)."""
    mask = np.ones((batch, kv_len), dtype=np.bool_)
    if kind == "left":
        mask[0, : kv_len // 3] = False
    elif kind == "right":
        mask[0, kv_len - kv_len // 3 :] = False
    elif kind == "holes":
        mask &= rng.random(mask.shape) > 0.3
    elif kind == "empty_row":
        mask[-1] = False
    return mask


def prefix(case: Case, start: int, end: int) -> Case:
    """Queries ``start .. end-1`` against the keys up to ``end``, as with a cache."""
    return Case(
        query=case.query[:, :, start:end],
        key=case.key[:, :, :end],
        value=case.value[:, :, :end],
        key_mask=case.key_mask[:, :end],
        query_positions=case.query_positions[:, start:end],
        key_positions=case.key_positions[:, :end],
        extra=case.extra,
    )


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Relative L2 error over the whole array."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    scale = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / (scale if scale else 1.0)
