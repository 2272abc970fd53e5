"""The com.microsoft operators that our function bodies use, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subquad.runtime.errors import UnsupportedModelError


def _multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, *, num_heads: int, scale: float
) -> Tensor:
    """``[batch, length, num_heads * dim]`` in and out; bodies use neither bias nor mask."""
    q, k, v = (_split_heads(x, num_heads) for x in (query, key, value))
    return _join_heads(functional.scaled_dot_product_attention(q, k, v, scale=scale))


def _group_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    local_window_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal, without past and without padding, as bodies use it; presents are the new ones."""
    length = query.shape[1]
    if past_key is not None or past_value is not None or bool((seqlens_k != length - 1).any()):
        raise UnsupportedModelError("training cannot run GroupQueryAttention with past or padding")
    q = _split_heads(query, num_heads)
    k, v = (_split_heads(x, kv_num_heads) for x in (key, value))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = distance >= 0
    if local_window_size >= 0:
        visible &= distance < local_window_size
    mixed = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=num_heads != kv_num_heads
    )
    return _join_heads(mixed), k, v


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


MICROSOFT_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "GroupQueryAttention": _group_query_attention,
    "MultiHeadAttention": _multi_head_attention,
}
