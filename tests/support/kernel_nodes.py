"""Variants of slow kernels, one-node sessions, and inputs: what tests of the host share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import slow_kernels
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.one_node import one_node_model
from subquad.kernels.operator import OperatorVariant

TEMPLATES = {"Attention": "slow_kernels:TEMPLATE"}

PLAIN = AttentionVariant(4, 2, 8, 5, 0.3)
BANDED = AttentionVariant(2, 2, 3, 4, 0.5, window_left=7, window_right=0)
MASKED = AttentionVariant(2, 1, 4, 4, 0.5, has_key_mask=True)
BOTH = AttentionVariant(4, 2, 8, 5, 0.3, window_left=7, window_right=2, has_key_mask=True)
TINY = AttentionVariant(4, 2, 6, 6, float(np.float32(0.7)), window_right=0, has_key_mask=True)
"""That of ``tiny_onnx``."""
RIGHT = (PLAIN, BANDED, MASKED, BOTH, TINY)

ABORTING = AttentionVariant(slow_kernels.ABORTS, 1, 8, 8, 0.5)
FAILING = AttentionVariant(slow_kernels.FAILS, 1, 8, 8, 0.5)
SKIPPING = AttentionVariant(slow_kernels.SKIPS, 1, 8, 8, 0.5)
NAMELESS = AttentionVariant(slow_kernels.NAMELESS, 1, 8, 8, 0.5)
REFUSED = AttentionVariant(slow_kernels.REFUSES, 1, 8, 8, 0.5)
CAPPED = AttentionVariant(4, 2, 8, 5, 0.3, softcap=2.5)

Feeds = dict[str, NDArray[Any]]


def open_node(variant: OperatorVariant, library: Path | None, threads: int = 1) -> Any:
    """A session of one node of ``variant``."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if library is not None:
        options.register_custom_ops_library(str(library))
    model = one_node_model(variant).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def node_feeds(
    variant: AttentionVariant, rng: np.random.Generator, batch: int = 2, lengths: Any = (9, 13)
) -> Feeds:
    """Random inputs; queries are the last of the slots, the first row starts with padding."""
    query_len, kv_len = lengths
    sizes = {
        "query": (batch, variant.num_heads, query_len, variant.head_dim),
        "key": (batch, variant.num_kv_heads, kv_len, variant.head_dim),
        "value": (batch, variant.num_kv_heads, kv_len, variant.value_dim),
    }
    feeds: Feeds = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    padding = np.zeros((batch, 1), np.int64)
    if variant.has_key_mask and kv_len > 2:
        padding[0] = 2
    slots = np.arange(kv_len)[None] - padding
    if variant.has_key_mask:
        feeds["key_mask"] = slots >= 0
    if variant.has_positions:
        feeds["query_positions"] = np.ascontiguousarray(slots[:, kv_len - query_len :])
        feeds["key_positions"] = slots
    return feeds
