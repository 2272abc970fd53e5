"""Biases that are proved to be ALiBi become slopes; what only looks like it stays a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from masked_attention import only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner

B, H, N, D = "batch", 4, "length", 6
SCALE = 0.37
SLOPES = np.float32(0.71) ** np.arange(1, H + 1, dtype=np.float32)
LONGEST = 300
Builder = Callable[[Graph], str]


def model_with(bias: Builder, *, causal: bool, padding: bool = False) -> ir.Model:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, H, N, D]) for name in "qkv")
    g.input("padding", INT64, [B, N])
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), SCALE)
    scores = g("Add", scores, bias(g))
    if causal:
        scores = g("Where", g("GreaterOrEqual", distance(g), [0]), scores, -1e9)
    if padding:
        real = g("Cast", g("Unsqueeze", "padding", [1, 2]), to=BOOL)
        scores = g("Where", real, scores, -1e9)
    return g.model([g("Identity", g("MatMul", g("Softmax", scores, axis=-1), v))])


def slots(g: Graph) -> str:
    return g.arange(g.dim("q", 2))


def distance(g: Graph) -> str:
    """Query slot minus key slot, ``[length, length]``."""
    return g("Sub", g("Unsqueeze", slots(g), [1]), g("Unsqueeze", slots(g), [0]))


def as_float(g: Graph, value: str) -> str:
    return g("Cast", value, to=FLOAT)


def sloped(g: Graph, value: str, sign: float = 1.0) -> str:
    return g("Mul", as_float(g, value), sign * SLOPES[:, None, None])


def bloom(g: Graph) -> str:
    """Slope times the number of the key, counted by a running sum of ones."""
    ones = g(
        "Expand",
        g.const([[1]], np.int64),
        g("Concat", [1], g("Shape", "q", start=2, end=3), axis=0),
    )
    count = g("Sub", g("CumSum", ones, g.const(1, np.int64)), [1])
    return g("Mul", as_float(g, g("Unsqueeze", count, [1])), SLOPES[:, None, None])


def mpt(g: Graph) -> str:
    """The last entries of a table ``slope * (1 - longest .. 0)``."""
    table = SLOPES[:, None, None] * np.arange(1 - LONGEST, 1, dtype=np.float32)
    start = g("Sub", [LONGEST], g("Shape", "q", start=2, end=3))
    return g("Slice", table, start, [LONGEST], [2])


def pairs_table(g: Graph) -> str:
    grid = np.arange(LONGEST, dtype=np.float32)
    table = -SLOPES[:, None, None] * (grid[:, None] - grid)
    ends = g("Shape", "q", start=2, end=3)
    return g("Slice", g("Slice", table, [0], ends, [1]), [0], ends, [2])


def chosen(g: Graph) -> str:
    """``where(later, slope * distance, -slope * distance)``."""
    return turning(g, 0)


SIGNED: dict[str, Builder] = {
    "relative": lambda g: sloped(g, distance(g), -1.0),
    "bloom": bloom,
    "mpt": mpt,
    "table of pairs": pairs_table,
    "absolute under a causal mask": lambda g: sloped(g, g("Abs", distance(g)), -1.0),
    "inside its mask": lambda g: g(
        "Where",
        g("GreaterOrEqual", distance(g), [0]),
        sloped(g, distance(g), -1.0),
        float(np.finfo(np.float32).min),
    ),
    "negated": lambda g: g("Neg", sloped(g, distance(g))),
    "from the end": lambda g: sloped(
        g, g("Sub", g("Unsqueeze", slots(g), [0, 1]), g("Sub", g.dim("q", 2), g.const(1, np.int64)))
    ),
}
ABSOLUTE: dict[str, Builder] = {
    "abs": lambda g: sloped(g, g("Abs", distance(g)), -1.0),
    "chosen": chosen,
}


def feeds(length: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(length)
    padding = rng.random((3, length)) < 0.7
    padding[0], padding[:, 0] = True, True
    arrays: dict[str, NDArray[Any]] = {
        name: rng.standard_normal((3, H, length, D)).astype(np.float32) * 2 for name in "qkv"
    }
    return {**arrays, "padding": padding.astype(np.int64)}


def oracle(
    given: dict[str, NDArray[Any]], *, causal: bool, padding: bool, absolute: bool
) -> NDArray[np.float64]:
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    far = np.arange(q.shape[2])[:, None] - np.arange(q.shape[2])
    away = np.abs(far) if absolute else far
    scores = SCALE * q @ k.swapaxes(-1, -2) - SLOPES.astype(np.float64)[:, None, None] * away
    seen = np.broadcast_to((far >= 0) | (not causal), scores.shape)
    if padding:
        seen = seen & (given["padding"][:, None, None] > 0)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ v)


@pytest.mark.parametrize("name", [*SIGNED, *ABSOLUTE])
def test_alibi(name: str) -> None:
    absolute = name in ABSOLUTE
    model = model_with(
        ABSOLUTE[name] if absolute else SIGNED[name], causal=not absolute, padding=True
    )
    copy, result = raised(model)
    site = only_site(result)
    assert site.alibi == ("absolute" if absolute else "signed") and not site.biases
    np.testing.assert_allclose(site.slopes, SLOPES, rtol=1e-6)
    kind = "ALiBi of both sides" if absolute else "ALiBi"
    mask = "full" if absolute else "causal"
    assert site.describe() == f"{mask}, key padding, {kind}"
    ours = Runner(copy)
    for length in (1, 17, 200):
        given = feeds(length)
        want = oracle(given, causal=not absolute, padding=True, absolute=absolute)
        # Sources add slopes times positions up to 200 in float32: 1e-5 in a score.
        assert np.linalg.norm(ours(given)[0] - want) <= 2e-5 * np.linalg.norm(want)


def bent_table(g: Graph) -> str:
    """Linear but for one entry far behind those that probes see."""
    table = SLOPES[:, None, None] * np.arange(LONGEST, dtype=np.float32)
    table[1, 0, 250] += 0.01
    return g("Slice", table, [0], g("Shape", "q", start=2, end=3), [2])


def counted(g: Graph) -> str:
    """BLOOM numbers real tokens: with holes that is no distance."""
    number = g("Sub", g("CumSum", "padding", g.const(1, np.int64)), [1])
    keys = g("Unsqueeze", g("Mul", number, "padding"), [1, 2])
    return sloped(g, keys)


def turning(g: Graph, distance_of_turn: int) -> str:
    """Like ``chosen``, but the sign changes some tokens away from the query."""
    far = distance(g)
    later = g("Less", far, [distance_of_turn])
    return g("Where", later, sloped(g, far), sloped(g, far, -1.0))


NOT_ALIBI: dict[str, tuple[Builder, bool]] = {
    "bent": (bent_table, True),
    "counted real tokens": (counted, True),
    "squared": (
        lambda g: sloped(g, g("Mul", distance(g), distance(g)), -0.1),
        True,
    ),
    "clipped": (lambda g: sloped(g, g("Min", distance(g), g.const(9, np.int64)), -1.0), True),
    "both sides, moved": (
        lambda g: sloped(g, g("Abs", g("Add", distance(g), [1])), -1.0),
        False,
    ),
    "other slope behind": (
        lambda g: g(
            "Where",
            g("Less", distance(g), [0]),
            sloped(g, distance(g), 1.01),
            sloped(g, distance(g), -1.0),
        ),
        False,
    ),
    "turning early": (lambda g: turning(g, -1), False),
    "turning late": (lambda g: turning(g, 2), False),
    "for each length": (
        lambda g: sloped(g, g("Mul", g("Unsqueeze", slots(g), [0]), g.dim("q", 2)), 0.01),
        True,
    ),
}


@pytest.mark.parametrize("name", NOT_ALIBI)
def test_other_biases_stay_what_they_are(name: str) -> None:
    bias, causal = NOT_ALIBI[name]
    model = model_with(bias, causal=causal)
    copy, result = raised(model)
    site = only_site(result)
    assert site.alibi == "none" and len(site.biases) == 1
    source, ours = Runner(model), Runner(copy)
    for length in (1, 17, 280):
        given = feeds(length)
        want, got = source(given)[0], ours(given)[0]
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


def test_half_precision_positions_are_no_alibi() -> None:
    """Positions above 2048 are not whole in float16: the bias is what the source computes."""
    model = model_with(
        lambda g: g(
            "Cast",
            g(
                "Mul",
                g("Cast", distance(g), to=TensorProto.FLOAT16),
                g("Cast", g.const(-SLOPES[:, None, None]), to=TensorProto.FLOAT16),
            ),
            to=FLOAT,
        ),
        causal=True,
    )
    assert only_site(raised(model)[1]).alibi == "none"
