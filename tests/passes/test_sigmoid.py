"""Sigmoid attention: raised with its offset, biases and masks, and near misses not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from masked_attention import only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner
from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise import sigmoid

B, N = "batch", "length"
HEADS, DIM, VALUE_DIM = 4, 6, 5
SCALE = 0.37
Step = Callable[[Graph, str], str]


def nothing(g: Graph, x: str) -> str:
    return x


def model_of(
    before: Step = nothing,
    after: Step = nothing,
    *,
    function: Step = lambda g, x: g("Sigmoid", x),
    kv_heads: int = HEADS,
    scaled: bool = True,
) -> ir.Model:
    """``function(before(scores))``, then ``after``, times the values; ``padding`` is an input."""
    g = Graph()
    q = g.input("q", FLOAT, [B, HEADS, N, DIM])
    k = g.input("k", FLOAT, [B, kv_heads, N, DIM])
    v = g.input("v", FLOAT, [B, kv_heads, N, VALUE_DIM])
    g.input("padding", INT64, [B, N])
    if kv_heads != HEADS:
        k, v = (g("Gather", x, np.arange(HEADS) // (HEADS // kv_heads), axis=1) for x in (k, v))
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    if scaled:
        scores = g("Mul", scores, SCALE)
    weights = after(g, function(g, before(g, scores)))
    return g.model([g("Identity", g("MatMul", weights, v))])


def weighted_by(dtype: int, test: Step = nothing) -> ir.Model:
    """An input ``[batch, length]`` of ``dtype`` multiplies the weights, after ``test``."""
    g = Graph()
    q = g.input("q", FLOAT, [B, HEADS, N, DIM])
    k = g.input("k", FLOAT, [B, HEADS, N, DIM])
    v = g.input("v", FLOAT, [B, HEADS, N, VALUE_DIM])
    g.input("weights", dtype, [B, N])
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
    factor = g("Cast", g("Unsqueeze", test(g, "weights"), [1, 2]), to=FLOAT)
    weights = g("Mul", g("Sigmoid", scores), factor)
    return g.model([g("Identity", g("MatMul", weights, v))])


def feeds(length: int, kv_heads: int = HEADS, batch: int = 4) -> dict[str, NDArray[Any]]:
    """Row 0 is all real, row 3 all padding, the others have holes or padding in front."""
    rng = np.random.default_rng(length)
    padding = rng.random((batch, length)) < 0.7
    padding[0] = True
    padding[1, : length // 3] = False
    padding[3] = False
    sizes = {"q": (HEADS, DIM), "k": (kv_heads, DIM), "v": (kv_heads, VALUE_DIM)}
    arrays: dict[str, NDArray[Any]] = {
        name: (rng.standard_normal((batch, heads, length, dim)) * 2).astype(np.float32)
        for name, (heads, dim) in sizes.items()
    }
    return {**arrays, "padding": padding.astype(np.int64)}


def oracle(
    given: dict[str, NDArray[Any]], bias: NDArray[Any] | float, seen: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """``(sigmoid(scale * q k^T + bias) * seen) v`` in float64."""
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, HEADS // k.shape[1], axis=1) for x in (k, v))
    scores = SCALE * q @ k.swapaxes(-1, -2) + bias
    weights = np.where(seen, 1.0 / (1.0 + np.exp(-scores)), 0.0)
    return np.asarray(weights @ v)


LENGTHS = (1, 7, 63, 64, 65)


def assert_raised(
    model: ir.Model,
    bias: Callable[[dict[str, NDArray[Any]]], NDArray[Any] | float],
    seen: Callable[[NDArray[Any], NDArray[np.bool_]], NDArray[np.bool_]] = lambda d, p: d == d,
    kv_heads: int = HEADS,
) -> Any:
    """One site, whose graph is the oracle; returns it."""
    copy, result = raised(model)
    site = only_site(result)
    assert site.score_function == "sigmoid" and not result.rejections
    assert not any(node.op_type in ("Sigmoid", "MatMul") for node in copy.graph)
    ours = Runner(copy)
    for length in LENGTHS:
        given = feeds(length, kv_heads)
        slots = np.arange(length)
        distance = (slots[:, None] - slots)[None, None]
        visible = seen(distance, given["padding"][:, None, None] > 0)
        want, got = oracle(given, bias(given), visible), ours(given)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length
        hidden = ~np.broadcast_to(visible, (4, HEADS, length, length)).any(axis=3)
        assert not got[hidden].any()
    return site


# --- offsets and biases ----------------------------------------------------------------------


def add(term: Any) -> Step:
    return lambda g, x: g("Add", x, term)


@pytest.mark.parametrize(
    ("before", "offset"),
    [
        (nothing, 0.0),
        (add(-3.0), -3.0),
        (lambda g, x: g("Sub", x, 3.0), -3.0),
        (lambda g, x: g("Add", 1.5, g("Sub", x, 3.0)), -1.5),
        (add(np.full((1, 1, 1, 1), -np.log(128), np.float32)), -np.log(128)),
    ],
)
def test_one_number_is_the_offset(before: Step, offset: float) -> None:
    site = assert_raised(model_of(before), lambda given: offset)
    assert site.score_offset == pytest.approx(offset) and not site.biases
    assert site.describe() == ", ".join(["full", "sigmoid"] + [f"offset {offset:g}"] * bool(offset))


def log_length(g: Graph, x: str) -> str:
    """FlashSigmoid's ``-log n`` of the length at hand."""
    length = g("Cast", g("Shape", "q", start=2, end=3), to=FLOAT)
    return g("Sub", x, g("Log", length))


def log_real(g: Graph, x: str) -> str:
    """``-log`` of each row's number of real tokens."""
    count = g("Cast", g("ReduceSum", "padding", [1], keepdims=1), to=FLOAT)
    logs = g("Log", g("Max", count, 1.0))
    return g("Sub", x, g("Unsqueeze", logs, [2, 3]))


def real_count(given: dict[str, NDArray[Any]]) -> NDArray[Any]:
    count = np.maximum(given["padding"].sum(axis=1), 1)
    return np.asarray(-np.log(count)[:, None, None, None])


PER_HEAD = np.array([-1.0, 0.5, -3.0, 2.0], np.float32)[:, None, None]


@pytest.mark.parametrize(
    ("before", "bias", "axes"),
    [
        (log_length, lambda given: -np.log(given["q"].shape[2]), ""),
        (log_real, real_count, "b"),
        (add(PER_HEAD), lambda given: PER_HEAD.astype(np.float64), "h"),
    ],
    ids=["length", "real tokens", "head"],
)
def test_other_biases_stay_biases(
    before: Step, bias: Callable[[dict[str, NDArray[Any]]], Any], axes: str
) -> None:
    site = assert_raised(model_of(before), bias)
    assert site.score_offset == 0 and [b.axes for b in site.biases] == [axes]


def test_a_bias_computed_from_queries_is_handed_over() -> None:
    """No constant: the node gets the source's own values."""

    def before(g: Graph, x: str) -> str:
        return g("Add", x, g("ReduceSum", g("Identity", "q"), [-1], keepdims=1))

    site = assert_raised(
        model_of(before), lambda given: given["q"].astype(np.float64).sum(axis=3, keepdims=True)
    )
    assert "computed from" in site.biases[0].kind and site.biases[0].axes == "bhq"


def test_slope_times_key_is_no_alibi() -> None:
    """It differs from a distance by a constant for each row, which a softmax would not see."""

    def before(g: Graph, x: str) -> str:
        keys = g("Cast", g.arange(g.dim("q", 2)), to=FLOAT)
        return g("Add", x, g("Mul", g("Unsqueeze", keys, [0, 1]), 0.25 * np.ones((4, 1, 1), "f4")))

    site = assert_raised(model_of(before), lambda given: 0.25 * np.arange(given["q"].shape[2]))
    assert site.alibi == "none" and site.biases


def test_alibi() -> None:
    slopes = np.array([0.5, 0.25, 0.125, 1.0], np.float32)[:, None, None]

    def before(g: Graph, x: str) -> str:
        slots = g("Cast", g.arange(g.dim("q", 2)), to=FLOAT)
        distance = g("Sub", g("Unsqueeze", slots, [0]), g("Unsqueeze", slots, [1]))
        return g("Add", x, g("Mul", slopes, distance))

    def bias(given: dict[str, NDArray[Any]]) -> NDArray[Any]:
        slots = np.arange(given["q"].shape[2])
        return np.asarray(slopes.astype(np.float64) * (slots - slots[:, None]))

    assert assert_raised(model_of(before), bias).alibi == "signed"


# --- masks -----------------------------------------------------------------------------------


def real(g: Graph) -> str:
    return g("Cast", g("Unsqueeze", "padding", [1, 2]), to=BOOL)


def causal(g: Graph) -> str:
    slots = g.arange(g.dim("q", 2))
    return g("LessOrEqual", g("Unsqueeze", slots, [0]), g("Unsqueeze", slots, [1]))


def both(g: Graph) -> str:
    return g("And", causal(g), real(g))


MASKED: dict[str, tuple[Step, Step]] = {
    "added": (lambda g, x: g("Add", x, g("Where", both(g), 0.0, -np.inf)), nothing),
    "least float": (
        lambda g, x: g("Add", x, g("Where", both(g), 0.0, float(np.finfo(np.float32).min))),
        nothing,
    ),
    "selected": (lambda g, x: g("Where", both(g), x, -1e9), nothing),
    "factor": (nothing, lambda g, w: g("Mul", w, g("Cast", both(g), to=FLOAT))),
    "factor first": (nothing, lambda g, w: g("Mul", g("Cast", both(g), to=FLOAT), w)),
    "weights": (nothing, lambda g, w: g("Where", both(g), w, 0.0)),
    "hidden weights": (nothing, lambda g, w: g("Where", g("Not", both(g)), 0.0, w)),
    "two places": (
        lambda g, x: g("Where", real(g), x, -1e9),
        lambda g, w: g("Mul", w, g("Cast", causal(g), to=FLOAT)),
    ),
    "product of padding": (
        lambda g, x: g("Where", causal(g), x, -np.inf),
        lambda g, w: g("Mul", w, g("Cast", g("Unsqueeze", "padding", [1, 2]), to=FLOAT)),
    ),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_masks(name: str, kv_heads: int) -> None:
    before, after = MASKED[name]
    model = model_of(lambda g, x: g("Sub", before(g, x), 2.0), after, kv_heads=kv_heads)
    site = assert_raised(
        model, lambda given: -2.0, lambda distance, real: (distance >= 0) & real, kv_heads
    )
    assert site.mask.describe() == "causal, key padding"
    assert site.num_kv_heads == kv_heads and site.value_dim == VALUE_DIM


def test_spelled_out() -> None:
    model = model_of(
        function=lambda g, x: g("Div", 1.0, g("Add", 1.0, g("Exp", g("Neg", g("Sub", x, 2.0)))))
    )
    assert assert_raised(model, lambda given: -2.0).score_offset == -2.0


# --- near misses -------------------------------------------------------------------------------


def summed(g: Graph, w: str) -> str:
    return g("Div", w, g("ReduceSum", w, [-1], keepdims=1))


MISSES: dict[str, tuple[Step, Step, str]] = {
    "half a mask": (
        nothing,
        lambda g, w: g("Mul", w, g("Where", both(g), 1.0, 0.5)),
        "what weights are multiplied by is no mask: multiplies weights by 0.5",
    ),
    "twice the mask": (
        nothing,
        lambda g, w: g("Mul", w, g("Mul", 2.0, g("Cast", both(g), to=FLOAT))),
        "multiplies weights by 2",
    ),
    "the mask multiplies scores": (
        lambda g, x: g("Mul", x, g("Cast", both(g), to=FLOAT)),
        nothing,
        "expected query x key before scale, softcap and masks, found operator Mul",
    ),
    "hidden scores are small": (
        lambda g, x: g("Where", both(g), x, -3.0),
        nothing,
        "masked scores are set to -3",
    ),
    "hidden weights are one": (
        nothing,
        lambda g, w: g("Where", both(g), w, 1.0),
        "some weights are set to 1, not to zero",
    ),
    "a mean over keys": (
        nothing,
        lambda g, w: g("Div", w, g("Cast", g("Shape", "q", start=2, end=3), to=FLOAT)),
        "the sigmoids of scores go into Div before they meet the values",
    ),
    "a share": (nothing, summed, "attention with Sigmoid and ReduceSum in place of softmax"),
    "one constant": (
        nothing,
        lambda g, w: g("Mul", w, 0.125),
        "what weights are multiplied by is no mask: multiplies weights by 0.125",
    ),
    "the prefix too": (
        nothing,
        lambda g, w: g(
            "Mul",
            w,
            g(
                "Cast",
                g("Or", causal(g), g("Less", g("Unsqueeze", g.arange(g.dim("q", 2)), [0]), 3)),
                to=FLOAT,
            ),
        ),
        "what weights are multiplied by is no mask",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    before, after, reason = MISSES[name]
    model = model_of(before, after)
    copy, result = raised(model)
    assert not result.sites and len(result.rejections) == 1
    assert reason in result.rejections[0].reason
    given = feeds(9)
    assert np.array_equal(Runner(copy)(given)[0], Runner(model)(given)[0])


def test_a_float_that_multiplies_weights_is_no_mask() -> None:
    """Any number may be fed; integers are masks, as of tokenizers, and so is what is compared."""
    model = weighted_by(FLOAT)
    copy, result = raised(model)
    assert not result.sites and "nothing says that it is 0 or 1" in result.rejections[0].reason
    given = feeds(9)
    weights = np.random.default_rng(0).random((4, 9)).astype(np.float32)
    given = {**given, "weights": weights}
    assert np.array_equal(Runner(copy)(given)[0], Runner(model)(given)[0])
    for mask in (weighted_by(INT64), weighted_by(FLOAT, lambda g, x: g("Greater", x, 0.0))):
        assert only_site(raised(mask)[1]).mask.key_padding


def test_a_float_that_is_added_is_a_mask_beside_a_factor() -> None:
    """``(1 - x) * -1e4``, as exporters write it, under a causal factor."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, HEADS, N, DIM]) for name in "qkv")
    g.input("padding", FLOAT, [B, N])
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
    hidden = g("Mul", g("Sub", 1.0, g("Unsqueeze", "padding", [1, 2])), -10000.0)
    weights = g("Mul", g("Sigmoid", g("Add", scores, hidden)), g("Cast", causal(g), to=FLOAT))
    _, result = raised(g.model([g("Identity", g("MatMul", weights, v))]))
    assert only_site(result).mask.describe() == "causal, key padding"


@pytest.mark.parametrize("what", ["offset", "scale", "function"])
def test_a_wrong_reading_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of the node sees an error of one percent, whoever makes it."""
    import dataclasses

    real_reader = sigmoid.without_offset

    def wrong(candidate: Any, interpreter: Any) -> Any:
        read = real_reader(candidate, interpreter)
        if what == "offset":
            return dataclasses.replace(read, score_offset=read.score_offset * 1.01)
        if what == "scale":
            return dataclasses.replace(read, scale=read.scale * 1.01)
        return dataclasses.replace(read, score_function="softmax", score_offset=0.0)

    monkeypatch.setattr("subquad.passes.raise_attention.without_offset", wrong)
    model = model_of(add(-3.0), MASKED["factor"][1])
    _, result = raised(model)
    assert not result.sites and "differs from the source" in result.rejections[0].reason


KEPT = ["causal", "padding", "nothing"]


def reason_with_a_wrong_mask(kept: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a site is declined whose mask is derived to hide less than it does."""
    import dataclasses

    from subquad.passes.recognise import bias
    from subquad.passes.recognise.mask import derive_mask as real_derivation

    def wrong(*args: Any, **more: Any) -> Any:
        derived = real_derivation(*args, **more)
        predicate = derived.predicate
        if kept != "causal":
            predicate = dataclasses.replace(predicate, window_right=UNLIMITED)
        if kept != "padding":
            predicate = dataclasses.replace(predicate, key_padding=False)
        return dataclasses.replace(derived, predicate=predicate)

    model = model_of(add(-3.0), MASKED["factor"][1])
    assert only_site(raised(model)[1]).mask.describe() == "causal, key padding"
    monkeypatch.setattr(bias, "derive_mask", wrong)
    _, result = raised(model)
    assert not result.sites
    return result.rejections[0].reason


@pytest.mark.parametrize("kept", KEPT)
def test_a_wrong_mask_is_refused(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = reason_with_a_wrong_mask(kept, monkeypatch)
    assert "the mask of the graph differs from the derived one" in reason


@pytest.mark.parametrize("kept", KEPT)
def test_the_probe_of_the_node_sees_a_wrong_mask(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing compares the mask itself."""
    monkeypatch.setattr("subquad.passes.raise_attention.probe_masks", lambda question: 1)
    assert "differs from the source" in reason_with_a_wrong_mask(kept, monkeypatch)


def test_gates_are_no_attention() -> None:
    """``silu(x W1) * (x W2)``, then a projection."""
    g = Graph()
    x = g.input("x", FLOAT, [B, N, 24])
    gate = g("MatMul", x, np.ones((24, 48), np.float32))
    gated = g("Mul", g("Mul", gate, g("Sigmoid", gate)), g("MatMul", x, np.ones((24, 48), "f4")))
    _, result = raised(g.model([g("MatMul", gated, np.ones((48, 24), np.float32))]))
    assert not result.rejections and not result.sites
