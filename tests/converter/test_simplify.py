"""What a fresh trace needs before it runs everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_graphs import BOOL, FLOAT, Dims, Graph, Runner
from subquad.converter.simplify import simplify


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_masks_get_a_row_for_each_query(packed: bool, heads: int) -> None:
    """``[batch, heads, 1, keys]``, as torch exports a padding mask, is no mask to ONNX Runtime."""
    g = Graph()
    dims: Dims = ["batch", "length", 12] if packed else ["batch", 2, "length", 6]
    q, k, v = (g.input(name, FLOAT, dims) for name in "qkv")
    mask = g.input("mask", BOOL, ["batch", heads, 1, "length"])
    sizes = {"q_num_heads": 2, "kv_num_heads": 2} if packed else {}
    model = g.model([g("Attention", q, k, v, mask, **sizes)])
    simplify(model)
    rng = np.random.default_rng(0)
    run = Runner(model)
    for length in (1, 9):
        arrays = [rng.standard_normal((3, 2, length, 6)).astype(np.float32) for _ in range(3)]
        seen = rng.random((3, heads, 1, length)) < 0.7
        seen[..., 0] = True
        scores = arrays[0] @ arrays[1].swapaxes(2, 3) / np.sqrt(6)
        weights = np.where(seen, np.exp(scores), 0)
        want = weights / weights.sum(-1, keepdims=True) @ arrays[2]
        feeds = dict(zip("qkv", arrays, strict=True))
        if packed:
            feeds = {n: a.swapaxes(1, 2).reshape(3, length, 12) for n, a in feeds.items()}
            want = want.swapaxes(1, 2).reshape(3, length, 12)
        (got,) = run({**feeds, "mask": seen})
        # float32 sums of at most nine terms
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_masks_of_single_queries_stay() -> None:
    g = Graph()
    q = g.input("q", FLOAT, ["batch", 2, 1, 6])
    k, v = (g.input(name, FLOAT, ["batch", 2, "length", 6]) for name in "kv")
    mask = g.input("mask", BOOL, ["batch", 1, 1, "length"])
    model = g.model([g("Attention", q, k, v, mask)])
    simplify(model)
    assert [node.op_type for node in model.graph] == ["Attention"]
