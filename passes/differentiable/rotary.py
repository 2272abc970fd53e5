"""``RotaryEmbedding`` of ONNX in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Rotate pairs of the first dims: halves of them, or neighbours if ``interleaved``.

    Args:
        x: ``[batch, heads, length, dim]``, or ``[batch, length, heads * dim]``.
        cos_cache, sin_cache: ``[batch, length, pairs]``, or ``[positions, pairs]``.
        position_ids: ``[batch, length]``, where the tables are of positions.
    """
    packed = x.dim() == 3
    if packed:
        x = x.reshape(x.shape[0], x.shape[1], num_heads, -1).transpose(1, 2)
    width = rotary_embedding_dim or x.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    cos, sin = (table[..., : width // 2].unsqueeze(1) for table in (cos_cache, sin_cache))
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (cos * first - sin * second, sin * first + cos * second)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    rotated = torch.cat((turned, kept), dim=-1)
    return rotated.transpose(1, 2).flatten(2) if packed else rotated
