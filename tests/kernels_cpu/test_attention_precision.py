"""The dense kernel's error against float64: at most twice that of torch's float32 attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oracles import Case, mask_of, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.visibility import allowed_keys

RunKernel = Callable[..., NDArray[np.float32]]


def of_heads(
    num_heads: int, num_kv_heads: int, dim: int, *, causal: bool = False, mask: bool = False
) -> AttentionVariant:
    right = 0 if causal else -1
    return AttentionVariant(
        *(num_heads, num_kv_heads, dim, dim, dim**-0.5), window_right=right, has_key_mask=mask
    )


VARIANTS = [
    of_heads(2, 2, 64),
    of_heads(6, 2, 32, causal=True, mask=True),
    # Compiling a kernel takes seconds.
    *(
        pytest.param(variant, marks=pytest.mark.slow)
        for variant in (
            of_heads(3, 1, 8, mask=True),
            of_heads(2, 1, 80, causal=True),
            of_heads(4, 4, 128, mask=True),
            of_heads(4, 2, 128, causal=True, mask=True),
            of_heads(2, 1, 256, causal=True, mask=True),
            of_heads(2, 2, 256),
        )
    ),
]
LENGTHS = [*range(1, 66), 1000]

LARGE = 100.0
"""Of scores: weights large enough for softmax to pick single keys."""


def torch_attention(variant: AttentionVariant, case: Case) -> NDArray[np.float32]:
    sizes = (case.query.shape[0], case.query.shape[2], case.key.shape[2])
    visible = allowed_keys(
        sizes,
        variant.window_left,
        variant.window_right,
        case.key_mask if variant.has_key_mask else None,
        case.query_positions,
        case.key_positions,
    )
    q, k, v = (torch.from_numpy(x) for x in (case.query, case.key, case.value))
    output: NDArray[np.float32] = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=torch.from_numpy(np.broadcast_to(visible, sizes).copy())[:, None],
        scale=variant.scale,
        enable_gqa=True,
    ).numpy()
    return output


@pytest.mark.parametrize("scores", [1.0, LARGE], ids=["usual", "large"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)
def test_error_is_at_most_twice_that_of_torch(
    run_kernel: RunKernel, variant: AttentionVariant, scores: float
) -> None:
    """Of the same inputs: lengths 1 to 65 and 1000, GQA, masks with holes, decode steps.

    With usual weights at every length. Where softmax picks single keys the error of a length is
    that of one or two of its scores, by chance in ours or in torch's: all lengths count together.
    """
    rng = np.random.default_rng(0)
    # Scores are sums of head_dim products of two factors with this gain.
    gain = math.sqrt(scores / 3.0 / (variant.scale * math.sqrt(variant.head_dim)))
    ours, torchs = [], []
    for length in LENGTHS:
        kind = "holes" if variant.has_key_mask else "none"
        mask = mask_of(kind, 2, length, rng)
        for query_len in {length, 1}:
            case = random_case(
                rng, variant, query_len=query_len, kv_len=length, mask=mask, gain=gain
            )
            want = reference(variant, case)
            other = torch_attention(variant, case)
            # torch has no output for rows that see no key; zeros are ours.
            seen = np.broadcast_to(np.abs(want).max(axis=-1, keepdims=True) > 0, want.shape)
            if not seen.any():
                continue
            got = run_kernel(variant, case)
            ours.append(relative_error(got[seen], want[seen]))
            torchs.append(relative_error(other[seen], want[seen]))
            if scores < LARGE:
                assert ours[-1] <= 2 * torchs[-1], (query_len, length)
    assert np.linalg.norm(ours) <= 2 * np.linalg.norm(torchs)
