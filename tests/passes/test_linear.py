"""Linear attention that is in the graph already: raised as what it is, and near misses not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from feature_maps import MAPS, Step, elu, identity, relu
from masked_attention import only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner
from subquad.passes.recognise.candidates import Candidate
from subquad.passes.recognise.site import LinearForm

B, N = "batch", "length"
HEADS, DIM, VALUE_DIM = 4, 6, 5
Arrays = dict[str, NDArray[Any]]


def real(g: Graph) -> str:
    return g("Cast", g("Unsqueeze", "padding", [1, 2]), to=BOOL)


def causal(g: Graph) -> str:
    slots = g.arange(g.dim("q", 2))
    return g("LessOrEqual", g("Unsqueeze", slots, [0]), g("Unsqueeze", slots, [1]))


def both(g: Graph) -> str:
    return g("And", causal(g), real(g))


def factor(g: Graph, w: str) -> str:
    return g("Mul", w, g("Cast", both(g), to=FLOAT))


def spelled(
    feature: Step = identity,
    mask: Step = factor,
    *,
    of_key: Step | None = None,
    epsilon: float | None = None,
    early: bool = True,
    divisor: Callable[[Graph, str], str] | None = None,
    kv_heads: int = HEADS,
    axis: int = -1,
) -> ir.Model:
    """``(mask(phi(q) phi(k)^T) / sums) v``; ``epsilon`` None: not divided; else early or late."""
    g = Graph()
    q = g.input("q", FLOAT, [B, HEADS, N, DIM])
    k = g.input("k", FLOAT, [B, kv_heads, N, DIM])
    v = g.input("v", FLOAT, [B, kv_heads, N, VALUE_DIM])
    g.input("padding", INT64, [B, N])
    q, k = feature(g, q), (of_key or feature)(g, k)
    if kv_heads != HEADS:
        k, v = (g("Gather", x, np.arange(HEADS) // (HEADS // kv_heads), axis=1) for x in (k, v))
    weights = mask(g, g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])))
    if epsilon is None:
        return g.model([g("Identity", g("MatMul", weights, v))])
    total = g("ReduceSum", weights, [axis], keepdims=1)
    if divisor is not None:
        total = divisor(g, total)
    elif epsilon:
        total = g("Add", total, epsilon)
    if early:
        return g.model([g("Identity", g("MatMul", g("Div", weights, total), v))])
    return g.model([g("Identity", g("Div", g("MatMul", weights, v), total))])


def feeds(length: int, kv_heads: int = HEADS) -> Arrays:
    """Row 0 is all real, row 3 all padding, the others have holes or padding in front."""
    rng = np.random.default_rng(length)
    padding = rng.random((4, length)) < 0.7
    padding[0], padding[3] = True, False
    padding[1, : length // 3] = False
    sizes = {"q": (HEADS, DIM), "k": (kv_heads, DIM), "v": (kv_heads, VALUE_DIM)}
    arrays: Arrays = {
        name: rng.standard_normal((4, heads, length, dim)).astype(np.float32)
        for name, (heads, dim) in sizes.items()
    }
    return {**arrays, "padding": padding.astype(np.int64)}


def oracle(given: Arrays, feature: Step, scale: float, epsilon: float | None) -> NDArray[Any]:
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, HEADS // k.shape[1], axis=1) for x in (k, v))
    seen = np.tril(np.ones((q.shape[2], q.shape[2]), bool)) & (given["padding"] > 0)[:, None, None]
    weights = np.where(seen, scale * MAPS[feature](q) @ MAPS[feature](k).swapaxes(-1, -2), 0)
    if epsilon is not None:
        total = weights.sum(axis=-1, keepdims=True) + epsilon
        weights = np.where(total > 0, weights / np.where(total > 0, total, 1), 0)
    return np.asarray(weights @ v)


def assert_is(
    model: ir.Model,
    feature: Step,
    *,
    scale: float = 1.0,
    epsilon: float | None = None,
    kv_heads: int = HEADS,
) -> Any:
    copy, result = raised(model)
    site = only_site(result)
    assert not result.rejections and site.mask.describe() == "causal, key padding"
    assert not any(node.op_type == "MatMul" for node in copy.graph)
    ours = Runner(copy)
    for length in (1, 7, 63, 64, 65):
        given = feeds(length, kv_heads)
        want, got = oracle(given, feature, scale, epsilon), ours(given)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length
        assert not got[3].any()
    return site


MASKS: dict[str, Step] = {
    "factor": factor,
    "selected": lambda g, w: g("Where", both(g), w, 0.0),
    "hidden": lambda g, w: g("Where", g("Not", both(g)), 0.0, w),
    "two": lambda g, w: g(
        "Where", causal(g), g("Mul", w, g("Cast", g("Unsqueeze", "padding", [1, 2]), to=FLOAT)), 0.0
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_without_a_normaliser(name: str, kv_heads: int) -> None:
    model = spelled(mask=lambda g, w: g("Mul", MASKS[name](g, w), 0.3), kv_heads=kv_heads)
    site = assert_is(model, identity, scale=0.3, kv_heads=kv_heads)
    assert site.linear.describe() == "linear (identity), no normaliser"
    assert (site.num_kv_heads, site.value_dim) == (kv_heads, VALUE_DIM)


@pytest.mark.parametrize("feature", [elu, relu], ids=["elu", "relu"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
@pytest.mark.parametrize("early", [True, False])
def test_normaliser_with_epsilon(feature: Step, epsilon: float, early: bool) -> None:
    site = assert_is(spelled(feature, epsilon=epsilon, early=early), feature, epsilon=epsilon)
    assert site.linear.normaliser == "sum"
    assert site.linear.epsilon == pytest.approx(epsilon)


def test_normaliser_without_epsilon() -> None:
    site = assert_is(spelled(elu, epsilon=0.0), elu, epsilon=0.0)
    assert site.describe() == "causal, key padding, linear (elu)"


def test_other_feature_maps_are_computed_by_the_source() -> None:
    """Without a normaliser any features will do: what is raised are their products."""
    model = spelled(lambda g, x: g("Exp", x))
    copy, result = raised(model)
    assert only_site(result).linear.feature_map == "identity"  # type: ignore[union-attr]
    assert sum(node.op_type == "Exp" for node in copy.graph) == 2
    given = feeds(65)
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_products_scaled_beside_an_epsilon() -> None:
    """``c x / (epsilon + sum c x)`` is ``x / (epsilon / c + sum x)``."""
    model = spelled(elu, lambda g, w: g("Mul", factor(g, w), 0.25), epsilon=0.5)
    assert assert_is(model, elu, epsilon=2.0).linear.epsilon == pytest.approx(2.0)


@pytest.mark.parametrize("early", [True, False])
def test_a_least_divisor(early: bool) -> None:
    """Rows that see little are divided by that number, in the raised node as well."""
    divisor = lambda g, total: g("Max", total, 0.5)  # noqa: E731
    model = spelled(relu, epsilon=1e-6, early=early, divisor=divisor)
    copy, result = raised(model)
    assert only_site(result).linear.describe() == "linear (relu), divided by 0.5 at least"  # type: ignore[union-attr]
    for length in (1, 7, 63, 64, 65):
        given = feeds(length)
        want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


@pytest.mark.parametrize(
    ("of_query", "of_key"), [(elu, relu), (lambda g, x: g("Exp", x), None)], ids=["two", "exp"]
)
def test_features_of_the_source_with_a_normaliser(of_query: Step, of_key: Step | None) -> None:
    """Features that cannot be negative are what ``relu`` leaves as it is."""
    model = spelled(of_query, of_key=of_key, epsilon=1e-6)
    copy, result = raised(model)
    site = only_site(result)
    assert not result.rejections and site.linear == LinearForm(
        "relu", "sum", float(np.float32(1e-6))
    )
    for length in (1, 7, 63, 64, 65):
        given = feeds(length)
        want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


# --- near misses -------------------------------------------------------------------------------

MISSES: dict[str, tuple[Callable[[], ir.Model], str]] = {
    "sums of features that may be negative": (
        lambda: spelled(lambda g, x: g("Tanh", x), epsilon=1e-6),
        "whose normaliser sums features of a kind that is not known",
    ),
    "keys that may be negative": (
        lambda: spelled(elu, of_key=identity, epsilon=1e-6),
        "whose normaliser sums features of a kind that is not known",
    ),
    "half a mask": (
        lambda: spelled(mask=lambda g, w: g("Mul", w, g("Where", both(g), 1.0, 0.5))),
        "multiplies weights by 0.5",
    ),
    "a root of the sums": (
        lambda: spelled(elu, epsilon=1e-6, divisor=lambda g, total: g("Sqrt", total)),
        "which is not the sum of its weights",
    ),
    "twice the sums": (
        lambda: spelled(elu, epsilon=1e-6, divisor=lambda g, total: g("Mul", total, 2.0)),
        "whose quotient is scaled",
    ),
    "another limit": (
        lambda: spelled(elu, epsilon=1e-6, divisor=lambda g, total: g("Min", total, 9.0)),
        "which is not the sum of its weights",
    ),
    "sums over queries": (
        lambda: spelled(elu, epsilon=1e-6, axis=-2),
        "which is not the sum of its weights",
    ),
    "a window": (
        lambda: spelled(
            mask=lambda g, w: g(
                "Mul",
                w,
                g(
                    "Cast",
                    g(
                        "And",
                        causal(g),
                        g(
                            "GreaterOrEqual",
                            g("Unsqueeze", g.arange(g.dim("q", 2)), [0]),
                            g("Sub", g("Unsqueeze", g.arange(g.dim("q", 2)), [1]), 3),
                        ),
                    ),
                    to=FLOAT,
                ),
            )
        ),
        "linear attention within a window",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    build, reason = MISSES[name]
    model = build()
    copy, result = raised(model)
    assert not result.sites and [reason in r.reason for r in result.rejections] == [True]
    given = feeds(9)
    # Also where a row sees no key, and the source divides by zero.
    assert np.array_equal(Runner(copy)(given)[0], Runner(model)(given)[0], equal_nan=True)


@pytest.mark.parametrize("changes", [{"epsilon": 0.0}, {"epsilon": 2e-6}, {"feature_map": "relu"}])
def test_a_wrong_reading_is_refused(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from subquad.passes.recognise import find, linear

    read = linear.linear_products

    def wrong(*args: Any) -> Any:
        for node, candidate in read(*args):
            assert isinstance(candidate, Candidate) and candidate.linear is not None
            yield node, replace(candidate, linear=replace(candidate.linear, **changes))

    monkeypatch.setattr(find, "linear_products", wrong)
    _, result = raised(spelled(elu, epsilon=1e-6))
    assert not result.sites and "differs from the source" in result.rejections[0].reason


# --- the operator ------------------------------------------------------------------------------


def operator(rule: str = "linear", domain: str = "com.microsoft", **more: Any) -> ir.Model:
    g = Graph()
    q = g.input("q", FLOAT, [B, N, HEADS * DIM])
    k = g.input("k", FLOAT, [B, N, 2 * DIM])
    v = g.input("v", FLOAT, [B, N, 2 * VALUE_DIM])
    extra = [g.input("g", FLOAT, [B, N, 2])] if rule != "linear" else []
    extra += [g.input("beta", FLOAT, [B, N, 2])] if "delta" in rule else []
    operands: list[Any] = [q, k, v, *([None, *extra] if extra else [])]
    y, _ = g.multi(
        "LinearAttention",
        *operands,
        outputs=2,
        domain=domain,
        q_num_heads=HEADS,
        kv_num_heads=2,
        update_rule=rule,
        **more,
    )
    doubled = g("MatMul", y, np.eye(HEADS * VALUE_DIM, dtype=np.float32) * 2)
    return g.model([doubled], opset=24 if domain else 27)


@pytest.mark.parametrize("domain", ["com.microsoft", ""])
@pytest.mark.parametrize("more", [{}, {"scale": 0.7}])
def test_operator(domain: str, more: dict[str, Any]) -> None:
    model = operator(domain=domain, **more)
    copy, result = raised(model)
    site = only_site(result)
    assert not result.rejections
    assert site.describe() == "causal, linear (identity), no normaliser"
    assert site.num_kv_heads == 2 and site.source_form == "LinearAttention"
    rng = np.random.default_rng(0)
    sizes = {"q": HEADS * DIM, "k": 2 * DIM, "v": 2 * VALUE_DIM}
    scale = more.get("scale", DIM**-0.5)
    for length in (1, 7, 63, 64, 65, 1000):
        given = {n: rng.standard_normal((2, length, s)).astype("f4") for n, s in sizes.items()}
        split = {
            n: x.reshape(2, length, -1, VALUE_DIM if n == "v" else DIM).swapaxes(1, 2)
            for n, x in given.items()
        }
        want = oracle({**split, "padding": np.ones((2, length))}, identity, scale, None)
        want = 2 * want.swapaxes(1, 2).reshape(2, length, -1)
        got = Runner(copy)(given)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("gated", "with a decay for each token, where HybridAttention has one for each head"),
        ("delta", "by the delta rule, which HybridAttention has not"),
        ("gated_delta", "by the delta rule, which HybridAttention has not"),
    ],
)
def test_other_update_rules_say_why(rule: str, reason: str) -> None:
    _, result = raised(operator(rule))
    assert not result.sites and len(result.rejections) == 1
    assert reason in result.rejections[0].reason
