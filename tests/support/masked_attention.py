"""One attention under a mask that a test builds, its oracle, and raising it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnx_graphs import FLOAT, INT64, Graph, Runner
from subquad.passes.raise_attention import RaisedSites, raise_attention
from subquad.passes.recognise.site import AttentionSite

HEADS, DIM = 2, 6
SCALE = 0.37
Kind = Literal["visible", "hidden", "additive", "bool", "float"]


@dataclass(frozen=True)
class Lengths:
    """Handles a mask may use: names of values and of scalars."""

    query: str
    key: str
    query_len: str
    kv_len: str
    batch: str
    padding: str


MaskBuilder = Callable[[Graph, Lengths], str]


def attention_model(
    build_mask: MaskBuilder | None,
    *,
    kind: Kind = "visible",
    query_dim: int | str = "length",
    kv_dim: int | str = "length",
    padding_type: int = INT64,
    padding_dims: tuple[int | str, ...] | None = None,
    extra: Callable[[Graph], None] | None = None,
    **attributes: Any,
) -> ir.Model:
    """``y`` = attention of inputs ``q``, ``k``, ``v``; ``mask`` is the mask as the graph has it.

    Args:
        build_mask: adds the mask; None for none.
        kind: ``bool`` and ``float`` are masks of an Attention node, the others of a decomposed one.
        query_dim, kv_dim: lengths.
        padding_type, padding_dims: of the input ``padding``.
        extra: adds further inputs first.
        attributes: of the Attention node.
    """
    g = Graph()
    if extra is not None:
        extra(g)
    q = g.input("q", FLOAT, ["batch", HEADS, query_dim, DIM])
    k = g.input("k", FLOAT, ["batch", HEADS, kv_dim, DIM])
    v = g.input("v", FLOAT, ["batch", HEADS, kv_dim, DIM])
    padding = g.input("padding", padding_type, padding_dims or ["batch", kv_dim])
    lengths = Lengths(q, k, g.dim(q, 2), g.dim(k, 2), g.dim(q, 0), padding)
    mask = build_mask(g, lengths) if build_mask is not None else None
    if kind in ("bool", "float") or mask is None:
        y = g("Attention", q, k, v, mask, scale=SCALE, **attributes)
    else:
        scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
        if kind == "additive":
            scores = g("Add", scores, mask)
        elif kind == "visible":
            scores = g("Where", mask, scores, -1e9)
        else:
            scores = g("Where", mask, -1e9, scores)
        y = g("MatMul", g("Softmax", scores, axis=-1), v)
    outputs = [g("Identity", y)]
    if mask is not None:
        outputs.append(g("Identity", mask))
    return g.model(outputs)


def random_feeds(
    rng: np.random.Generator, batch: int, query_len: int, kv_len: int, padding_type: Any = np.int64
) -> dict[str, NDArray[Any]]:
    """Row 0 all real, row 1 padded in front, row 2 behind, then holes."""
    std = (4.0 / (SCALE * DIM**0.5)) ** 0.5
    padding = np.ones((batch, kv_len), bool)
    for row in range(1, batch):
        cut = int(rng.integers(0, kv_len))
        if row % 3 == 1:
            padding[row, :cut] = False
        elif row % 3 == 2:
            padding[row, kv_len - cut :] = False
        else:
            padding[row] = rng.random(kv_len) < 0.6
    return {
        "q": (rng.standard_normal((batch, HEADS, query_len, DIM)) * std).astype(np.float32),
        "k": (rng.standard_normal((batch, HEADS, kv_len, DIM)) * std).astype(np.float32),
        "v": rng.standard_normal((batch, HEADS, kv_len, DIM)).astype(np.float32),
        "padding": padding.astype(padding_type),
    }


def seen_by_source(source: Runner, feeds: Mapping[str, NDArray[Any]], kind: Kind) -> Any:
    """Visibility as the graph itself computes it, ``[batch, heads, query_len, kv_len]``."""
    shape = (*feeds["q"].shape[:3], feeds["k"].shape[2])
    results = source(feeds)
    if len(results) < 2:
        return np.ones(shape, bool)
    mask = results[1]
    if kind in ("additive", "float"):
        return np.broadcast_to(mask > -9e3, shape)
    seen = mask.astype(bool) if kind in ("visible", "bool") else ~mask.astype(bool)
    return np.broadcast_to(seen, shape)


def oracle(feeds: Mapping[str, NDArray[Any]], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Softmax attention over the seen keys, float64; rows that see none are zero."""
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    scores = np.where(seen, SCALE * q @ k.swapaxes(-1, -2), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.where(seen, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.where(total > 0, weights / np.where(total > 0, total, 1), 0) @ v)


def raised(model: ir.Model) -> tuple[ir.Model, RaisedSites]:
    """A raised copy."""
    copy = model.clone()
    return copy, raise_attention(copy)


def only_site(result: RaisedSites) -> AttentionSite:
    assert len(result.sites) == 1, result.rejections
    return result.sites[0]


def only_reason(result: RaisedSites) -> str:
    """Why the only attention was declined, or why what is added to its scores is no mask."""
    if result.sites:
        (bias,) = only_site(result).biases
        return bias.reason
    assert len(result.rejections) == 1
    return result.rejections[0].reason


def assert_follows_graph(
    model: ir.Model,
    copy: ir.Model,
    kind: Kind,
    lengths: tuple[tuple[int, int], ...],
    *,
    is_causal: bool = False,
    padding_type: Any = np.int64,
) -> None:
    """The raised graph equals attention under the mask that the source graph computes."""
    rng = np.random.default_rng(5)
    source, ours = Runner(model), Runner(copy)
    for query_len, kv_len in lengths:
        feeds = random_feeds(rng, 4, query_len, kv_len, padding_type)
        seen = seen_by_source(source, feeds, kind)
        if is_causal:
            seen = seen & np.tril(np.ones((query_len, kv_len), bool))
        want, got = oracle(feeds, seen), ours(feeds)[0]
        # float32 sums over at most some hundreds of keys
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), (query_len, kv_len)
