"""Sinks beside the scores, and guards of rows that see no key: recognised, and near misses not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from masked_attention import only_reason, only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner

B, H, N, D = "batch", 4, "length", 6
SCALE = 0.37
INF = float("inf")
LOGITS = np.array([1.5, -2.0, 0.3, 4.0], np.float32)
Step = Callable[[Graph, str], str]


# --- sinks ---------------------------------------------------------------------------------


def expanded(g: Graph, logits: Any, scores: str) -> str:
    """``[1, heads, 1, 1]`` logits as a column beside the scores."""
    sizes = g("Shape", scores, start=0, end=3)
    return g("Expand", logits, g("Concat", sizes, [1], axis=0))


def per_head(g: Graph, scores: str) -> str:
    return expanded(g, g("Reshape", LOGITS, [1, -1, 1, 1]), scores)


def with_sink(
    column: Step,
    *,
    first: bool = False,
    shift: bool = True,
    drop: tuple[int, int] | None = None,
    masked: bool = True,
) -> ir.Model:
    """GPT-OSS: the column joins the scores, the row's largest is subtracted, softmax, drop."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    g.input("padding", INT64, [B, N])
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
    if masked:
        real = g("Cast", g("Unsqueeze", "padding", [1, 2]), to=BOOL)
        scores = g("Add", scores, g("Where", real, 0.0, -3e38))
    parts = [column(g, scores), scores] if first else [scores, column(g, scores)]
    logits = g("Concat", *parts, axis=-1)
    if shift:
        logits = g("Sub", logits, g("ReduceMax", logits, [-1], keepdims=1))
    weights = g("Softmax", logits, axis=-1)
    start, end = drop or ((1, 1 << 40) if first else (0, -1))
    kept = g("Slice", weights, [start], [end], [3], [1])
    return g.model([g("Identity", g("MatMul", kept, v))])


def feeds(length: int) -> dict[str, NDArray[Any]]:
    """Row 3 is all padding."""
    rng = np.random.default_rng(length)
    padding = rng.random((4, length)) < 0.7
    padding[0], padding[3] = True, False
    arrays: dict[str, NDArray[Any]] = {
        name: rng.standard_normal((4, H, length, D)).astype(np.float32) * 2 for name in "qkv"
    }
    return {**arrays, "padding": padding.astype(np.int64)}


def with_sinks_oracle(given: dict[str, NDArray[Any]], logits: NDArray[Any]) -> NDArray[Any]:
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    scores = SCALE * q @ k.swapaxes(-1, -2)
    scores = np.where(given["padding"][:, None, None] > 0, scores, -np.inf)
    sink = logits.astype(np.float64)[None, :, None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    return np.asarray(weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)) @ v)


SINKS: dict[str, tuple[dict[str, Any], NDArray[np.float32]]] = {
    "last": ({"column": per_head}, LOGITS),
    "first": ({"column": per_head, "first": True}, LOGITS),
    "not shifted": ({"column": per_head, "shift": False}, LOGITS),
    "reversed heads": (
        {
            "column": lambda g, s: expanded(
                g, g("Reshape", g("Gather", LOGITS, [3, 2, 1, 0]), [1, -1, 1, 1]), s
            )
        },
        LOGITS[::-1],
    ),
    "one of a table of layers": (
        {
            "column": lambda g, s: expanded(
                g, g("Reshape", g("Gather", np.stack([LOGITS, -LOGITS]), [1]), [1, -1, 1, 1]), s
            )
        },
        -LOGITS,
    ),
    "one for all heads": (
        {"column": lambda g, s: expanded(g, np.full((1, 1, 1, 1), 0.7, np.float32), s)},
        np.full(4, 0.7, np.float32),
    ),
    "one more in the denominator": (
        {"column": lambda g, s: expanded(g, np.zeros((1, 1, 1, 1), np.float32), s)},
        np.zeros(4, np.float32),
    ),
}


@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str) -> None:
    options, logits = SINKS[name]
    copy, result = raised(with_sink(**options))
    site = only_site(result)
    assert site.has_sinks and site.describe() == "full, key padding, sinks"
    assert not any(node.op_type in ("Softmax", "Concat") for node in copy.graph)
    ours = Runner(copy)
    for length in (1, 9, 40):
        given = feeds(length)
        want, got = with_sinks_oracle(given, logits), ours(given)[0]
        # A row that sees no key gives zeros in the source, too: its sink takes everything.
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
        assert not got[3].any()


def varying(g: Graph, scores: str) -> str:
    """A logit for each query, computed from it."""
    return g("ReduceSum", "q", [-1], keepdims=1)


NO_SINKS: dict[str, tuple[dict[str, Any], str]] = {
    "a key is dropped": (
        {"column": per_head, "drop": (1, 1 << 40)},
        "a column is added to the scores and not dropped after the softmax",
    ),
    "two columns": (
        {"column": lambda g, s: g("Concat", per_head(g, s), per_head(g, s), axis=-1)},
        "columns are added to the scores: one sink is known",
    ),
    "one for each query": (
        {"column": varying},
        "is not one fixed logit for each head",
    ),
    "infinite": (
        {"column": lambda g, s: expanded(g, np.full((1, 1, 1, 1), INF, np.float32), s)},
        "a sink of logit inf",
    ),
}


@pytest.mark.parametrize("name", NO_SINKS)
def test_no_sinks(name: str) -> None:
    options, reason = NO_SINKS[name]
    assert reason in only_reason(raised(with_sink(**options))[1])


def test_a_shift_by_something_else_is_no_softmax_of_the_scores() -> None:
    """Subtracting what differs between keys changes the weights."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    logits = g("Sub", scores, g("ReduceMax", scores, [-2], keepdims=1))
    model = g.model([g("MatMul", g("Softmax", logits, axis=-1), v)])
    assert "found operator Sub" in only_reason(raised(model)[1])


# --- guards --------------------------------------------------------------------------------


def real(g: Graph) -> str:
    return g("Cast", g("Unsqueeze", "padding", [1, 2]), to=BOOL)


def guarded(
    guard: Callable[[Graph, str, str, str], str], *, fill: float = -INF, selects: bool = False
) -> ir.Model:
    """Attention with padding; ``guard(graph, mask, logits, weights)`` gives the new weights."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    g.input("padding", INT64, [B, N])
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
    if selects:
        mask = real(g)
        logits = g("Where", mask, scores, fill)
    else:
        mask = g("Where", real(g), 0.0, fill)
        logits = g("Add", scores, mask)
    weights = g("Softmax", logits, axis=-1)
    return g.model([g("Identity", g("MatMul", guard(g, mask, logits, weights), v))])


def row_is(g: Graph, value: str, number: float) -> str:
    return g("Equal", g("ReduceMax", value, [-1], keepdims=1), number)


def any_of(g: Graph, value: str) -> str:
    """``torch.any`` as exporters write it."""
    return g("Cast", g("ReduceMax", g("Cast", value, to=INT64), [-1], keepdims=1), to=BOOL)


def all_of(g: Graph, value: str) -> str:
    return g("Cast", g("ReduceMin", g("Cast", value, to=INT64), [-1], keepdims=1), to=BOOL)


GUARDS: dict[str, tuple[Callable[[Graph, str, str, str], str], dict[str, Any]]] = {
    "weights are NaN": (lambda g, m, x, w: g("Where", g("IsNaN", w), 0.0, w), {}),
    "weights are numbers": (lambda g, m, x, w: g("Where", g("Not", g("IsNaN", w)), w, 0.0), {}),
    "largest of the mask": (lambda g, m, x, w: g("Where", row_is(g, m, -INF), 0.0, w), {}),
    "largest of the scores": (lambda g, m, x, w: g("Where", row_is(g, x, -INF), 0.0, w), {}),
    "torch's safe softmax": (
        lambda g, m, x, w: g("Where", all_of(g, g("Equal", x, -INF)), 0.0, w),
        {},
    ),
    "safe softmax, not any": (
        lambda g, m, x, w: g("Where", g("Not", any_of(g, g("Not", g("Equal", x, -INF)))), 0.0, w),
        {},
    ),
    "any key": (lambda g, m, x, w: g("Where", any_of(g, m), w, 0.0), {"selects": True}),
    "count of keys": (
        lambda g, m, x, w: g(
            "Where",
            g("Greater", g("ReduceSum", g("Cast", m, to=FLOAT), [-1], keepdims=1), 0.5),
            w,
            0.0,
        ),
        {"selects": True},
    ),
    "hidden keys": (lambda g, m, x, w: g("Where", m, w, 0.0), {"selects": True}),
    "times the mask": (
        lambda g, m, x, w: g("Mul", w, g("Cast", m, to=FLOAT)),
        {"selects": True, "fill": -1e9},
    ),
    "hidden keys, finite fill": (
        lambda g, m, x, w: g("Where", m, w, 0.0),
        {"selects": True, "fill": -3e38},
    ),
    "least score": (
        lambda g, m, x, w: g(
            "Where", g("LessOrEqual", g("ReduceMax", m, [-1], keepdims=1), -3e38), 0.0, w
        ),
        {"fill": float(np.finfo(np.float32).min)},
    ),
    "two guards": (
        lambda g, m, x, w: g("Where", row_is(g, m, -INF), 0.0, g("Where", g("IsNaN", w), 0.0, w)),
        {},
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guard(name: str) -> None:
    guard, options = GUARDS[name]
    model = guarded(guard, **options)
    copy, result = raised(model)
    site = only_site(result)
    assert site.mask.describe() == "full, key padding" and site.proof.empty_rows == "zeros"
    assert not any(node.op_type in ("Softmax", "IsNaN", "ReduceMax") for node in copy.graph)
    source, ours = Runner(model), Runner(copy)
    for length in (1, 9, 40):
        given = feeds(length)
        want, got = source(given)[0], ours(given)[0]
        # All rows: one that sees no key is zeros in both.
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
        assert not got[3].any()


def test_without_a_guard_rows_that_see_no_key_differ() -> None:
    """They are means over hidden keys in the source: the proof says so."""
    model = guarded(lambda g, m, x, w: g("Identity", w), fill=-1e9)
    assert only_site(raised(model)[1]).proof.empty_rows == "other"


@pytest.mark.parametrize("sunk", [False, True])
def test_a_guard_may_read_the_product_itself(sunk: bool) -> None:
    """Without scale and mask the softmax and its guard read one value."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    logits = g("Concat", scores, per_head(g, scores), axis=-1) if sunk else scores
    weights = g("Softmax", logits, axis=-1)
    if sunk:
        weights = g("Slice", weights, [0], [-1], [3], [1])
    weights = g("Where", row_is(g, scores, -INF), 0.0, weights)
    model = g.model([g("Identity", g("MatMul", weights, v))])
    assert only_site(raised(model)[1]).has_sinks == sunk


NO_GUARDS: dict[str, tuple[Callable[[Graph, str, str, str], str], dict[str, Any], str]] = {
    "rows that see a key": (
        lambda g, m, x, w: g("Where", row_is(g, m, 0.0), 0.0, w),
        {},
        "may hold for keys that a query sees",
    ),
    "the other way round": (
        lambda g, m, x, w: g("Where", row_is(g, m, -INF), w, 0.0),
        {},
        "may hold for keys that a query sees",
    ),
    "any hidden key": (
        lambda g, m, x, w: g("Where", any_of(g, g("Equal", x, -INF)), 0.0, w),
        {},
        "may hold for keys that a query sees",
    ),
    "all keys": (
        lambda g, m, x, w: g("Where", all_of(g, m), w, 0.0),
        {"selects": True},
        "may hold for keys that a query sees",
    ),
    "more than one key": (
        lambda g, m, x, w: g(
            "Where",
            g("Greater", g("ReduceSum", g("Cast", m, to=FLOAT), [-1], keepdims=1), 1.5),
            w,
            0.0,
        ),
        {"selects": True},
        "may hold for keys that a query sees",
    ),
    "over queries": (
        lambda g, m, x, w: g(
            "Where", g("Equal", g("ReduceMax", x, [-2], keepdims=1), -INF), 0.0, w
        ),
        {},
        "may hold for keys that a query sees",
    ),
    "small scores": (
        lambda g, m, x, w: g("Where", g("Less", g("ReduceMax", x, [-1], keepdims=1), 0.0), 0.0, w),
        {},
        "may hold for keys that a query sees",
    ),
    "small weights": (
        lambda g, m, x, w: g("Where", g("Less", w, 0.1), 0.0, w),
        {},
        "may hold for keys that a query sees",
    ),
    "the mask of others": (
        lambda g, m, x, w: g("Mul", w, g("Cast", g("Not", m), to=FLOAT)),
        {"selects": True},
        "the softmax goes into Mul",
    ),
    "twice the mask": (
        lambda g, m, x, w: g("Mul", w, g("Mul", 2.0, g("Cast", m, to=FLOAT))),
        {"selects": True},
        "the softmax goes into Mul",
    ),
    "to one": (
        lambda g, m, x, w: g("Where", row_is(g, m, -INF), 1.0, w),
        {},
        "some weights are set to 1.0, not to zero",
    ),
}


@pytest.mark.parametrize("name", NO_GUARDS)
def test_no_guard(name: str) -> None:
    guard, options, reason = NO_GUARDS[name]
    assert reason in only_reason(raised(guarded(guard, **options))[1])


def test_softmax_in_single_steps() -> None:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
    powers = g("Exp", g("Sub", scores, g("ReduceMax", scores, [-1], keepdims=1)))
    weights = g("Div", powers, g("ReduceSum", powers, [-1], keepdims=1))
    model = g.model([g("Identity", g("MatMul", weights, v))])
    copy, result = raised(model)
    assert only_site(result).mask.describe() == "full"
    given = feeds(17)
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", ["axis", "sum of others"])
def test_other_quotients_are_no_softmax(kind: str) -> None:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    powers = g("Exp", scores)
    summed = powers if kind == "axis" else g("Exp", g("Mul", scores, 0.5))
    total = g("ReduceSum", summed, [-2 if kind == "axis" else -1], keepdims=1)
    _, result = raised(g.model([g("MatMul", g("Div", powers, total), v)]))
    assert not result.sites
