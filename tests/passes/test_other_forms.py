"""Attention that is named and left alone; float attention between quantised weights is raised."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from masked_attention import only_site, raised
from onnx_graphs import FLOAT, Graph, Runner

B, H, N, D = "batch", 4, "length", 6
Step = Callable[[Graph, str], str]


def with_function(function: Step, *, operand: Step | None = None) -> ir.Model:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), 0.3)
    return g.model([g("MatMul", function(g, scores), v)])


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda g, s: g("Sigmoid", g("Sigmoid", s)), "Sigmoid"),
        (lambda g, s: g("Relu", s), "Relu"),
        (lambda g, s: g("Pow", g("Relu", s), 2.0), "Relu and Pow"),
        (lambda g, s: g("Div", g("Softplus", s), 7.0), "Softplus"),
    ],
)
def test_other_score_functions_are_named(function: Step, name: str) -> None:
    _, result = raised(with_function(function))
    assert [r.reason for r in result.rejections] == [
        f"attention with {name} in place of softmax: no operator of ours has that score function, "
        "so it stays as it is"
    ]


def test_feed_forward_layers_are_not_named() -> None:
    g = Graph()
    x = g.input("x", FLOAT, [B, N, 24])
    inner = g("Sigmoid", g("MatMul", x, np.ones((24, 48), np.float32)))
    _, result = raised(g.model([g("MatMul", inner, np.ones((48, 24), np.float32))]))
    assert not result.rejections and not result.sites


# --- quantised -----------------------------------------------------------------------------


def quantised(g: Graph, value: str, zero_type: type = np.uint8) -> str:
    """What quantising tools put on an edge."""
    zero = g.const(0 if zero_type is np.int8 else 128, zero_type)
    step = g.const(0.02, np.float32)
    return g("DequantizeLinear", g("QuantizeLinear", value, step, zero), step, zero)


def projected(g: Graph, x: str, seed: int) -> str:
    """A projection with a quantised weight and activation: ``[batch, heads, length, dim]``."""
    rng = np.random.default_rng(seed)
    weight = g.const(rng.integers(-127, 128, (H * D, H * D)), np.int8)
    step = g.const(0.003, np.float32)
    weight = g("DequantizeLinear", weight, step, g.const(0, np.int8))
    y = g("MatMul", quantised(g, x), weight)
    return g("Transpose", g("Reshape", y, [0, 0, H, D]), perm=[0, 2, 1, 3])


def quantised_model(
    operand: Step | None = None, scores: Step | None = None, weights: Step | None = None
) -> ir.Model:
    g = Graph()
    x = g.input("x", FLOAT, [B, N, H * D])
    q, k, v = (projected(g, x, seed) for seed in range(3))
    kt = g("Transpose", k, perm=[0, 1, 3, 2])
    if operand is not None:
        q, kt, v = (operand(g, part) for part in (q, kt, v))
    s = g("MatMul", q, kt)
    s = g("Mul", s if scores is None else scores(g, s), 0.3)
    w = g("Softmax", s, axis=-1)
    y = g("MatMul", w if weights is None else weights(g, w), v)
    return g.model([g("Identity", g("Reshape", g("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, -1]))])


@pytest.mark.parametrize("operand", [None, quantised])
def test_float_attention_between_quantised_layers(operand: Step | None) -> None:
    model = quantised_model(operand)
    copy, result = raised(model)
    assert only_site(result).num_heads == H
    x = np.random.default_rng(0).standard_normal((2, 17, H * D)).astype(np.float32)
    want, got = Runner(model)({"x": x})[0], Runner(copy)({"x": x})[0]
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def integer_product(g: Graph, ignored: str) -> str:
    """Dynamic quantisation of both operands, whose product is of integers."""
    parts = []
    for name, seed in (("x", 0), ("x", 1)):
        value = projected(g, name, seed)
        if seed:
            value = g("Transpose", value, perm=[0, 1, 3, 2])
        parts.append(g.multi("DynamicQuantizeLinear", value, outputs=3))
    (a, a_step, a_zero), (b, b_step, b_zero) = parts
    product = g("Cast", g("MatMulInteger", a, b, a_zero, b_zero), to=FLOAT)
    return g("Mul", product, g("Mul", a_step, b_step))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: quantised_model(lambda g, x: quantised(g, x, np.int8)),
            "query comes straight from int8 quantisation",
        ),
        (lambda: quantised_model(scores=quantised), "the scores are quantised (DequantizeLinear)"),
        (
            lambda: quantised_model(weights=quantised),
            "the weights are quantised (QuantizeLinear) before they meet the values",
        ),
        (
            lambda: quantised_model(scores=integer_product),
            "query x key is an integer product (MatMulInteger)",
        ),
    ],
)
def test_integer_attention_is_declined(model: Callable[[], ir.Model], reason: str) -> None:
    _, result = raised(model())
    assert len(result.rejections) == 1 and reason in result.rejections[0].reason
