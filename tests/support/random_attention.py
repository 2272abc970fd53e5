"""Random compositions of the spellings of attention, each with what it means, and their mutants."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto

from onnx_graphs import BOOL, FLOAT, INT64, Graph

DIM = 6
BiasKind = Literal["none", "table", "alibi", "alibi keys", "alibi both"]


@dataclass(frozen=True)
class Spelling:
    """What is computed, and how it is written.

    Attributes:
        heads, kv_heads: grouped where they differ.
        scale, cap: what the scores are multiplied by and capped at (0 = not).
        left, right: visible band, -1 = unlimited.
        padding: hides padded keys.
        bias: added to the scores as well.
        slope: base of the slopes of ALiBi.
        sinks: factor of the logits beside the scores, 0 = none.
        scale_place, mask_form, transpose, repeat: spellings.
        scores_first: order of the operands of Add and Mul.
        casts, guard, shifted, sink_first: spellings around the softmax.
    """

    heads: int
    kv_heads: int
    scale: float
    cap: float
    left: int
    right: int
    padding: bool
    bias: BiasKind
    slope: float
    sinks: float
    scale_place: str
    mask_form: str
    transpose: str
    repeat: str
    scores_first: bool
    casts: bool
    guard: str
    shifted: bool
    sink_first: bool

    @property
    def alibi(self) -> str:
        """As ``AttentionSite.alibi`` has it."""
        # Beside a sink, slope * key is not slope * (key - query).
        if not self.bias.startswith("alibi") or (self.sinks and self.bias == "alibi keys"):
            return "none"
        return "absolute" if self.bias == "alibi both" and self.right != 0 else "signed"

    @property
    def meaning(self) -> str:
        """As ``MaskPredicate.describe`` says it."""
        if self.right == 0:
            text = "causal" if self.left < 0 else f"causal, window {self.left + 1}"
        elif self.left >= 0 or self.right >= 0:
            left, right = ("inf" if x < 0 else x for x in (self.left, self.right))
            text = f"band -{left}..+{right}"
        else:
            text = "full"
        return text + (", key padding" if self.padding else "")


def random_spelling(seed: int) -> Spelling:
    rng = random.Random(seed)
    heads = rng.choice((1, 2, 4))
    left, right = rng.choice(((-1, -1), (-1, 0), (-1, 0), (rng.randint(1, 9), 0), (5, 5)))
    return Spelling(
        heads=heads,
        kv_heads=rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        scale=rng.choice((DIM**-0.5, 1.0, 0.37)),
        cap=rng.choice((0.0, 0.0, 6.5)),
        left=left,
        right=right,
        padding=rng.random() < 0.5,
        bias=rng.choice(("none", "none", "table", "alibi", "alibi keys", "alibi both")),
        slope=0.7,
        sinks=rng.choice((0.0, 0.0, 0.0, 2.5)),
        scale_place=rng.choice(("mul", "div", "query", "key", "both", "computed", "transposed")),
        mask_form=rng.choice(("where", "hidden", "add", "add twice", "product")),
        transpose=rng.choice(("last two", "at once", "two steps")),
        repeat=rng.choice(("expand", "tile", "gather")),
        scores_first=rng.random() < 0.5,
        casts=rng.random() < 0.3,
        guard=rng.choice(("none", "none", "nan", "largest", "all")),
        shifted=rng.random() < 0.3,
        sink_first=rng.random() < 0.5,
    )


MUTATIONS = ("scale", "left", "right", "padding", "cap", "bias", "slope", "sinks")


def mutated(spelling: Spelling, seed: int) -> Spelling:
    """The same spelling with another meaning: one constant, comparison or term changed."""
    rng = random.Random(seed)
    kind = rng.choice(MUTATIONS)
    if kind == "left" and spelling.left >= 0:
        return replace(spelling, left=spelling.left + 1)
    if kind == "right" and spelling.right >= 0:
        return replace(spelling, right=spelling.right + 1)
    if kind == "padding":
        return replace(spelling, padding=not spelling.padding)
    if kind == "cap":
        return replace(spelling, cap=spelling.cap * 1.01 if spelling.cap else 6.5)
    if kind == "bias":
        return replace(spelling, bias="none" if spelling.bias != "none" else "table")
    if kind == "slope" and spelling.bias.startswith("alibi"):
        return replace(spelling, slope=spelling.slope * 1.01)
    if kind == "sinks":
        return replace(spelling, sinks=spelling.sinks * 1.01 if spelling.sinks else 2.5)
    return replace(spelling, scale=spelling.scale * 1.01)


def build(s: Spelling) -> ir.Model:
    """The graph: inputs ``q``, ``k``, ``v`` as ``[batch, length, heads, DIM]`` and ``padding``."""
    g = Graph()
    q = g.input("q", FLOAT, ["batch", "length", s.heads, DIM])
    k, v = (g.input(n, FLOAT, ["batch", "length", s.kv_heads, DIM]) for n in "kv")
    g.input("padding", INT64, ["batch", "length"])
    length = g.dim(q, 1)
    query = g("Transpose", q, perm=[0, 2, 1, 3])
    if s.scale_place in ("query", "both"):
        query = _times(g, s, query, s.scale if s.scale_place == "query" else s.scale**0.5)
    key = _transposed_key(g, s, k)
    scores = g("MatMul", query, key)
    if s.scale_place == "mul":
        scores = _times(g, s, scores, s.scale)
    elif s.scale_place == "div":
        scores = g("Div", scores, 1 / s.scale)
    elif s.scale_place == "computed":
        size = g("Cast", g("Shape", q, start=3, end=4), to=FLOAT)
        root = g("Sqrt", size)
        scores = g("Mul", g("Div", scores, root), s.scale * DIM**0.5)
    if s.cap:
        scores = g("Mul", g("Tanh", g("Div", scores, s.cap)), s.cap)
    if s.bias != "none":
        scores = _plus(g, s, scores, _bias(g, s, length))
    scores = _masked(g, s, scores, length)
    if s.casts and not s.sinks:
        scores = g("Cast", scores, to=TensorProto.DOUBLE)
    weights = _weights(g, s, scores)
    if s.casts and not s.sinks:
        weights = g("Cast", weights, to=FLOAT)
    if s.guard == "nan":
        weights = g("Where", g("IsNaN", weights), 0.0, weights)
    elif s.guard != "none":
        weights = g("Where", _row_hidden(g, s, scores), 0.0, weights)
    value = _repeated(g, s, g("Transpose", v, perm=[0, 2, 1, 3]))
    y = g("Transpose", g("MatMul", weights, value), perm=[0, 2, 1, 3])
    return g.model([y])


def _weights(g: Graph, s: Spelling, scores: str) -> str:
    logits = scores
    if s.sinks:
        sizes = g("Shape", scores, start=0, end=3)
        column = g("Reshape", sink_logits(s), [1, -1, 1, 1])
        column = g("Expand", column, g("Concat", sizes, [1], axis=0))
        parts = [column, scores] if s.sink_first else [scores, column]
        logits = g("Concat", *parts, axis=-1)
    if s.shifted:
        logits = g("Sub", logits, g("ReduceMax", logits, [-1], keepdims=1))
    weights = g("Softmax", logits, axis=-1)
    if not s.sinks:
        return weights
    start, end = (1, 1 << 40) if s.sink_first else (0, -1)
    return g("Slice", weights, [start], [end], [3], [1])


def _row_hidden(g: Graph, s: Spelling, scores: str) -> str:
    """Whether all scores of a row are -inf."""
    hidden = g.const(-np.inf, np.float64 if s.casts and not s.sinks else np.float32)
    if s.guard == "largest":
        return g("Equal", g("ReduceMax", scores, [-1], keepdims=1), hidden)
    each = g("Cast", g("Equal", scores, hidden), to=INT64)
    return g("Cast", g("ReduceMin", each, [-1], keepdims=1), to=BOOL)


def _times(g: Graph, s: Spelling, value: str, factor: float) -> str:
    return g("Mul", value, factor) if s.scores_first else g("Mul", factor, value)


def _plus(g: Graph, s: Spelling, scores: str, term: str) -> str:
    return g("Add", scores, term) if s.scores_first else g("Add", term, scores)


def _transposed_key(g: Graph, s: Spelling, k: str) -> str:
    scaled = {"key": s.scale, "both": s.scale**0.5}.get(s.scale_place)
    if s.transpose == "at once" and s.heads == s.kv_heads:
        if scaled is not None:
            k = _times(g, s, k, scaled)
        key = g("Transpose", k, perm=[0, 2, 3, 1])
    else:
        key = _repeated(g, s, g("Transpose", k, perm=[0, 2, 1, 3]))
        if scaled is not None:
            key = _times(g, s, key, scaled)
        if s.transpose == "two steps":
            # As exporters write k.transpose(1, 2).transpose(2, 3) after a view.
            key = g("Transpose", g("Transpose", key, perm=[0, 2, 1, 3]), perm=[0, 2, 3, 1])
        else:
            key = g("Transpose", key, perm=[0, 1, 3, 2])
    return _times(g, s, key, s.scale) if s.scale_place == "transposed" else key


def _repeated(g: Graph, s: Spelling, value: str) -> str:
    """``[batch, kv_heads, length, DIM]`` with each head as often as queries need it."""
    times = s.heads // s.kv_heads
    if times == 1:
        return value
    if s.repeat == "gather":
        return g("Gather", value, np.arange(s.heads) // times, axis=1)
    wide = g("Unsqueeze", value, [2])
    if s.repeat == "tile":
        wide = g("Tile", wide, [1, 1, times, 1, 1])
    else:
        sizes = [g("Shape", value, start=a, end=a + 1) for a in (0, 2)]
        shape = g("Concat", sizes[0], [s.kv_heads, times], sizes[1], [DIM], axis=0)
        wide = g("Expand", wide, shape)
    return g("Reshape", wide, [0, s.heads, -1, DIM])


def _distance(g: Graph, length: str) -> str:
    """Query slot minus key slot, ``[length, length]``."""
    slots = g.arange(length)
    return g("Sub", g("Unsqueeze", slots, [1]), g("Unsqueeze", slots, [0]))


def bias_table(s: Spelling) -> NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((s.heads, 400)).astype(np.float32) * 2


def slopes(s: Spelling) -> NDArray[np.float32]:
    return np.float32(s.slope) ** np.arange(1, s.heads + 1, dtype=np.float32)


def sink_logits(s: Spelling) -> NDArray[np.float32]:
    return np.float32(s.sinks) * np.array([1, -0.5, 2, 0.25], np.float32)[: s.heads]


def _bias(g: Graph, s: Spelling, length: str) -> str:
    distance = _distance(g, length)
    if s.bias == "alibi keys":
        keys = g("Unsqueeze", g("Cast", g.arange(length), to=FLOAT), [0, 1])
        return g("Mul", keys, slopes(s)[:, None, None])
    if s.bias.startswith("alibi"):
        steps = g("Unsqueeze", g("Cast", distance, to=FLOAT), [0])
        if s.bias == "alibi both":
            steps = g("Abs", steps)
        return g("Mul", steps, -slopes(s)[:, None, None])
    at = g("Add", distance, g.const(200, np.int64))
    return g("Gather", bias_table(s), at, axis=1)


def _masked(g: Graph, s: Spelling, scores: str, length: str) -> str:
    conditions = []
    distance = _distance(g, length) if s.left >= 0 or s.right >= 0 else ""
    if s.left >= 0:
        conditions.append(g("LessOrEqual", distance, g.const(s.left, np.int64)))
    if s.right >= 0:
        conditions.append(g("GreaterOrEqual", distance, g.const(-s.right, np.int64)))
    if s.padding:
        conditions.append(g("Unsqueeze", g("Cast", "padding", to=BOOL), [1, 2]))
    if not conditions:
        return scores
    if s.mask_form == "add twice":
        for condition in conditions:
            scores = _plus(g, s, scores, g("Where", condition, 0.0, -1e9))
        return scores
    if s.mask_form == "product":
        # (1 - visible) * -1e9, as BERT once had it.
        for condition in conditions:
            hidden = g("Sub", 1.0, g("Cast", condition, to=FLOAT))
            scores = _plus(g, s, scores, g("Mul", hidden, -1e9))
        return scores
    seen = conditions[0]
    for condition in conditions[1:]:
        seen = g("And", seen, condition)
    if s.mask_form == "where":
        return g("Where", seen, scores, -1e9)
    if s.mask_form == "hidden":
        return g("Where", g("Not", seen), -1e9, scores)
    return _plus(g, s, scores, g("Where", seen, 0.0, float(np.finfo(np.float32).min)))


# --- oracle ----------------------------------------------------------------------------------


def random_inputs(s: Spelling, length: int, seed: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    std = (4.0 / (s.scale * DIM**0.5)) ** 0.5
    padding = rng.random((3, length)) < 0.7
    padding[0] = True
    padding[:, 0] = True
    return {
        "q": (rng.standard_normal((3, length, s.heads, DIM)) * std).astype(np.float32),
        "k": (rng.standard_normal((3, length, s.kv_heads, DIM)) * std).astype(np.float32),
        "v": rng.standard_normal((3, length, s.kv_heads, DIM)).astype(np.float32),
        "padding": padding.astype(np.int64),
    }


def oracle(
    s: Spelling, feeds: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The attention that ``s`` means, float64, and which rows see a key; ``[b, n, h, d]``."""
    group = s.heads // s.kv_heads
    q = feeds["q"].astype(np.float64).swapaxes(1, 2)
    k, v = (feeds[n].astype(np.float64).swapaxes(1, 2).repeat(group, axis=1) for n in "kv")
    scores = s.scale * q @ k.swapaxes(-1, -2)
    if s.cap:
        scores = s.cap * np.tanh(scores / s.cap)
    length = q.shape[2]
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    if s.bias.startswith("alibi"):
        away = np.abs(distance) if s.bias == "alibi both" else distance
        if s.bias == "alibi keys":
            away = np.broadcast_to(-np.arange(length), distance.shape)
        scores = scores - slopes(s).astype(np.float64)[:, None, None] * away
    elif s.bias == "table":
        scores = scores + bias_table(s).astype(np.float64)[:, distance + 200]
    seen = np.ones((3, 1, length, length), bool)
    if s.left >= 0:
        seen &= distance <= s.left
    if s.right >= 0:
        seen &= distance >= -s.right
    if s.padding:
        seen &= feeds["padding"].astype(bool)[:, None, None]
    scores = np.where(seen, scores, -np.inf)
    top = np.where(seen.any(axis=3, keepdims=True), scores.max(axis=-1, keepdims=True), 0)
    weights = np.where(seen, np.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if s.sinks:
        total = total + np.exp(sink_logits(s).astype(np.float64)[:, None, None] - top)
    output = np.where(total > 0, weights / np.where(total > 0, total, 1), 0) @ v
    rows = np.broadcast_to(seen.any(axis=3), output.shape[:3])
    return output.swapaxes(1, 2), rows.swapaxes(1, 2)
