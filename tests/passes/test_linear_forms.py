"""Linear attention that sums keys and values first: raised as what it is, and near misses not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from feature_maps import MAPS, Step, elu, exp, identity, relu
from masked_attention import only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner
from subquad.passes.recognise.candidates import Candidate

B, N = "batch", "length"
HEADS, DIM, VALUE_DIM = 4, 6, 5
Arrays = dict[str, NDArray[Any]]


def real(g: Graph) -> str:
    """``[batch, 1, length, 1]``: 1 for real keys."""
    return g("Cast", g("Unsqueeze", "padding", [1, 3]), to=FLOAT)


def times_real(g: Graph, x: str) -> str:
    return g("Mul", x, real(g))


def where_real(g: Graph, x: str) -> str:
    return g("Where", g("Cast", g("Unsqueeze", "padding", [1, 3]), to=BOOL), x, 0.0)


def where_padded(g: Graph, x: str) -> str:
    return g("Where", g("Not", g("Cast", g("Unsqueeze", "padding", [1, 3]), to=BOOL)), 0.0, x)


@dataclass(frozen=True)
class Operands:
    """Names of the features ``[batch, heads, length, ...]``, masked, and of what normalises."""

    q: str
    k: str
    v: str
    summed: str


# --- spellings: numerator and sums, or the quotient ------------------------------------------


Spelling = Callable[[Graph, Operands], tuple[str, str]]


def context(g: Graph, x: Operands) -> tuple[str, str]:
    """``q (k^T v)``, and ``q`` times the sum of ``k``."""
    state = g("MatMul", g("Transpose", x.k, perm=[0, 1, 3, 2]), x.v)
    total = g("Unsqueeze", g("ReduceSum", x.summed, [2], keepdims=0), [3])
    return g("MatMul", x.q, state), g("MatMul", x.q, total)


def context_elementwise(g: Graph, x: Operands) -> tuple[str, str]:
    state = g("MatMul", g("Transpose", x.k, perm=[0, 1, 3, 2]), x.v)
    total = g("ReduceSum", x.summed, [-2], keepdims=1)
    return g("MatMul", x.q, state), g("ReduceSum", g("Mul", x.q, total), [-1], keepdims=1)


def of_equations(*equations: str) -> Spelling:
    """Einsum for ``k v^T``, and for ``q`` times it and times the sums of keys."""
    state_of, times, times_total = equations

    def spelling(g: Graph, x: Operands) -> tuple[str, str]:
        state = g("Einsum", x.k, x.v, equation=state_of)
        total = g("ReduceSum", x.summed, [-2], keepdims=0)
        return (
            g("Einsum", state, x.q, equation=times),
            g("Unsqueeze", g("Einsum", x.q, total, equation=times_total), [3]),
        )

    spelling.__name__ = state_of
    return spelling


einsums = of_equations("bhnd,bhne->bhde", "bhde,bhnd->bhne", "bhnd,bhd->bhn")
ellipsis = of_equations("...nd,...ne->...de", "... d e, ... n d -> ... n e", "...nd,...d->...n")


def merged(g: Graph, x: Operands) -> tuple[str, str]:
    """Einsum as torch takes it apart: matrix products of three axes."""
    length = g("Shape", x.q, start=2, end=3)

    def merge(value: str, width: int) -> str:
        shape = g("Concat", np.array([-1]), length, np.array([width]), axis=0)
        return g("Reshape", value, shape)

    flat = {"q": merge(x.q, DIM), "k": merge(x.k, DIM), "v": merge(x.v, VALUE_DIM)}
    state = g("MatMul", g("Transpose", flat["k"], perm=[0, 2, 1]), flat["v"])
    batch = g("Shape", x.q, start=0, end=1)
    apart = g("Concat", batch, np.array([HEADS]), length, np.array([VALUE_DIM]), axis=0)
    total = g("ReduceSum", x.summed, [-2], keepdims=1)
    sums = g("ReduceSum", g("Mul", x.q, total), [-1], keepdims=1)
    return g("Reshape", g("MatMul", flat["q"], state), apart), sums


def outer(g: Graph, x: Operands) -> str:
    return g("Mul", g("Unsqueeze", x.k, [4]), g("Unsqueeze", x.v, [3]))


def running(g: Graph, x: Operands, axis: int = 2, **flags: int) -> tuple[str, str]:
    """Running sums of ``k v^T`` and of ``k``."""
    state = g("CumSum", outer(g, x), np.array(axis), **flags)
    total = g("CumSum", x.summed, np.array(2), **flags)
    row = g("MatMul", g("Unsqueeze", x.q, [3]), state)
    return g("Squeeze", row, [3]), g("ReduceSum", g("Mul", x.q, total), [-1], keepdims=1)


def running_elementwise(g: Graph, x: Operands) -> tuple[str, str]:
    state = g("CumSum", outer(g, x), np.array(-3))
    total = g("CumSum", x.summed, np.array(-2))
    return (
        g("ReduceSum", g("Mul", g("Unsqueeze", x.q, [4]), state), [3], keepdims=0),
        g("ReduceSum", g("Mul", x.q, total), [-1], keepdims=1),
    )


def running_einsum(g: Graph, x: Operands) -> tuple[str, str]:
    state = g("CumSum", g("Einsum", x.k, x.v, equation="bhnd,bhne->bhnde"), np.array(2))
    total = g("CumSum", x.summed, np.array(2))
    return (
        g("Einsum", x.q, state, equation="bhnd,bhnde->bhne"),
        g("Unsqueeze", g("Einsum", x.q, total, equation="bhnd,bhnd->bhn"), [3]),
    )


def quadratic(g: Graph, x: Operands) -> tuple[str, str]:
    weights = g("MatMul", x.q, g("Transpose", x.k, perm=[0, 1, 3, 2]))
    return g("MatMul", weights, x.v), g("ReduceSum", weights, [-1], keepdims=1)


FULL: tuple[Spelling, ...] = (context, context_elementwise, einsums, ellipsis, merged, quadratic)
CAUSAL: tuple[Spelling, ...] = (running, running_elementwise, running_einsum)


# --- divisions -------------------------------------------------------------------------------


def late(g: Graph, numerator: str, divisor: str) -> str:
    return g("Div", numerator, divisor)


def inverse(g: Graph, numerator: str, divisor: str) -> str:
    return g("Mul", numerator, g("Div", 1.0, divisor))


def reciprocal(g: Graph, numerator: str, divisor: str) -> str:
    return g("Mul", g("Reciprocal", divisor), numerator)


def plus(epsilon: float) -> Step:
    return lambda g, total: g("Add", total, epsilon)


def at_least(number: float) -> Step:
    return lambda g, total: g("Max", total, number)


def clipped(number: float) -> Step:
    return lambda g, total: g("Clip", total, np.float32(number))


@dataclass(frozen=True)
class Form:
    """One spelled-out linear attention."""

    spelling: Spelling = context
    feature: Step = elu
    of_key: Step | None = None
    mask: Step | None = times_real
    mask_values: Step | None = None
    mask_sums: Step | None = times_real
    divide: Callable[[Graph, str, str], str] | None = late
    guard: Step = plus(1e-6)
    kv_heads: int = HEADS
    other_sums: bool = False

    def model(self) -> ir.Model:
        g = Graph()
        q = g.input("q", FLOAT, [B, HEADS, N, DIM])
        k = g.input("k", FLOAT, [B, self.kv_heads, N, DIM])
        v = g.input("v", FLOAT, [B, self.kv_heads, N, VALUE_DIM])
        other = g.input("other", FLOAT, [B, self.kv_heads, N, DIM])
        g.input("padding", INT64, [B, N])
        repeats = np.arange(HEADS) // (HEADS // self.kv_heads)
        k, v, other = (
            x if self.kv_heads == HEADS else g("Gather", x, repeats, axis=1) for x in (k, v, other)
        )
        q, k = self.feature(g, q), (self.of_key or self.feature)(g, k)
        summed = self.feature(g, other) if self.other_sums else k
        masked = k if self.mask is None else self.mask(g, k)
        if self.mask_sums is not self.mask or self.other_sums:
            summed = summed if self.mask_sums is None else self.mask_sums(g, summed)
        else:
            summed = masked
        values = v if self.mask_values is None else self.mask_values(g, v)
        y, total = self.spelling(g, Operands(q, masked, values, summed))
        if self.divide is not None:
            y = self.divide(g, y, self.guard(g, total))
        return g.model([g("Identity", y)])


def feeds(length: int, kv_heads: int = HEADS) -> Arrays:
    """Row 0 is all real, row 3 all padding, the others have holes or padding in front."""
    rng = np.random.default_rng(length)
    padding = rng.random((4, length)) < 0.7
    padding[0], padding[3] = True, False
    padding[1, : length // 3] = False
    sizes = {
        "q": (HEADS, DIM),
        "k": (kv_heads, DIM),
        "v": (kv_heads, VALUE_DIM),
        "other": (kv_heads, DIM),
    }
    arrays: Arrays = {
        name: rng.standard_normal((4, heads, length, dim)).astype(np.float32)
        for name, (heads, dim) in sizes.items()
    }
    return {**arrays, "padding": padding.astype(np.int64)}


def oracle(
    given: Arrays, form: Form, *, causal: bool, epsilon: float, least: float
) -> NDArray[Any]:
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, HEADS // k.shape[1], axis=1) for x in (k, v))
    seen = np.ones((q.shape[2], q.shape[2]), bool)
    seen = np.tril(seen) if causal else seen
    if form.mask is not None:
        seen = seen & (given["padding"] > 0)[:, None, None]
    weights = MAPS[form.feature](q) @ MAPS[form.feature](k).swapaxes(-1, -2)
    weights = np.where(seen, weights, 0)
    if form.divide is not None:
        total = np.maximum(weights.sum(axis=-1, keepdims=True) + epsilon, least)
        weights = np.where(total > 0, weights / np.where(total > 0, total, 1), 0)
    return np.asarray(weights @ v)


def assert_is(form: Form, *, causal: bool = False, epsilon: float = 0.0, least: float = 0.0) -> Any:
    copy, result = raised(form.model())
    site = only_site(result)
    assert not result.rejections
    masks = ["causal" if causal else "full"] + ["key padding"] * (form.mask is not None)
    assert site.mask.describe() == ", ".join(masks)
    kinds = {node.op_type for node in copy.graph}
    assert not kinds & {"MatMul", "CumSum", "Einsum", "ReduceSum", "Div", "Reciprocal"}
    assert site.linear is not None
    assert site.linear.epsilon == pytest.approx(epsilon)
    assert site.linear.least == pytest.approx(least)
    ours = Runner(copy)
    for length in (1, 7, 63, 64, 65):
        given = feeds(length, form.kv_heads)
        want = oracle(given, form, causal=causal, epsilon=epsilon, least=least)
        got = ours(given)[0]
        # float32 sums of at most 65 keys
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length
        assert form.mask is None or not got[3].any()
    return site


@pytest.mark.parametrize("spelling", FULL + CAUSAL, ids=lambda s: s.__name__)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_with_a_normaliser(spelling: Spelling, kv_heads: int) -> None:
    form = Form(spelling, kv_heads=kv_heads)
    site = assert_is(form, causal=spelling in CAUSAL, epsilon=1e-6)
    assert (site.linear.feature_map, site.linear.normaliser) == ("elu", "sum")
    assert (site.num_kv_heads, site.head_dim, site.value_dim) == (kv_heads, DIM, VALUE_DIM)


@pytest.mark.parametrize("spelling", FULL[:-1] + CAUSAL, ids=lambda s: s.__name__)
def test_without_a_normaliser(spelling: Spelling) -> None:
    form = Form(spelling, identity, divide=None)
    site = assert_is(form, causal=spelling in CAUSAL)
    assert site.linear.describe() == "linear (identity), no normaliser"


@pytest.mark.parametrize("mask", [times_real, where_real, where_padded, None])
@pytest.mark.parametrize("spelling", [context, running], ids=lambda s: s.__name__)
@pytest.mark.parametrize("divide", [late, inverse, reciprocal])
def test_masks_and_divisions(mask: Step | None, spelling: Spelling, divide: Any) -> None:
    form = Form(spelling, relu, mask=mask, mask_sums=mask, divide=divide)
    assert_is(form, causal=spelling in CAUSAL, epsilon=1e-6)


@pytest.mark.parametrize("spelling", [context, running], ids=lambda s: s.__name__)
@pytest.mark.parametrize("feature", [elu, relu], ids=["elu", "relu"])
@pytest.mark.parametrize(
    "guarded",
    [(at_least(1e-6), 1e-6), (at_least(0.5), 0.5), (clipped(0.25), 0.25)],
    ids=["1e-6", "0.5", "clip"],
)
def test_divisors_with_a_least_value(
    spelling: Spelling, feature: Step, guarded: tuple[Step, float]
) -> None:
    guard, least = guarded
    form = Form(spelling, feature, guard=guard)
    assert_is(form, causal=spelling in CAUSAL, least=least)


def test_values_are_masked_as_well() -> None:
    assert_is(Form(mask_values=times_real), epsilon=1e-6)


def test_features_that_cannot_be_negative() -> None:
    site = assert_is(Form(feature=exp), epsilon=1e-6)
    assert site.linear.feature_map == "relu"


def test_softmax_of_features() -> None:
    """Efficient attention (Shen et al., 2018): the softmaxes are feature maps, no attention."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, HEADS, N, DIM]) for name in "qkv")
    q = g("Mul", g("Softmax", q, axis=-1), DIM**-0.5)
    k = g("Softmax", k, axis=-2)
    state = g("MatMul", g("Transpose", k, perm=[0, 1, 3, 2]), v)
    model = g.model([g("Identity", g("MatMul", q, state))])
    copy, result = raised(model)
    assert not result.rejections
    assert only_site(result).describe() == "full, linear (identity), no normaliser"
    for length in (1, 7, 63, 64, 65):
        rng = np.random.default_rng(length)
        shape = (2, HEADS, length, DIM)
        given = {name: rng.standard_normal(shape).astype(np.float32) for name in "qkv"}
        want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


def test_lengths_in_front_of_heads() -> None:
    """Queries ``[batch, length, heads, dim]``, as in fast_transformers, and the result as well."""
    g = Graph()
    q, k = (g.input(name, FLOAT, [B, N, HEADS, DIM]) for name in "qk")
    v = g.input("v", FLOAT, [B, N, HEADS, VALUE_DIM])
    g.input("padding", INT64, [B, N])
    q, k = elu(g, q), elu(g, k)
    k = g("Mul", k, g("Cast", g("Unsqueeze", "padding", [2, 3]), to=FLOAT))
    state = g("Einsum", k, v, equation="nshd,nshm->nhmd")
    total = g("ReduceSum", k, [1], keepdims=0)
    z = g("Reciprocal", g("Add", g("Einsum", q, total, equation="nlhd,nhd->nlh"), 1e-6))
    model = g.model([g("Identity", g("Einsum", q, state, z, equation="nlhd,nhmd,nlh->nlhm"))])
    copy, result = raised(model)
    assert only_site(result).describe() == "full, key padding, linear (elu), epsilon 1e-06"
    for length in (1, 7, 63, 64, 65):
        given = feeds(length)
        want = oracle(given, Form(), causal=False, epsilon=1e-6, least=0.0)
        moved = {n: x.swapaxes(1, 2) if x.ndim == 4 else x for n, x in given.items()}
        got = Runner(copy)(moved)[0].swapaxes(1, 2)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


# --- near misses -----------------------------------------------------------------------------


def other_axis(g: Graph, x: Operands) -> tuple[str, str]:
    return running(g, x, axis=1)


def own_token_left_out(g: Graph, x: Operands) -> tuple[str, str]:
    return running(g, x, exclusive=1)


def backwards(g: Graph, x: Operands) -> tuple[str, str]:
    return running(g, x, reverse=1)


def full_sums(g: Graph, x: Operands) -> tuple[str, str]:
    return running(g, x)[0], context(g, x)[1]


def sums_of_queries(g: Graph, x: Operands) -> tuple[str, str]:
    total = g("ReduceSum", x.q, [-2], keepdims=1)
    return context(g, x)[0], g("ReduceSum", g("Mul", x.k, total), [-1], keepdims=1)


BASE = Form()
NOT_ITS_SUM = "which is not the sum of its weights"
MISSES: dict[str, tuple[Form, str]] = {
    "a running sum over heads": (replace(BASE, spelling=other_axis), "running sum over something"),
    "an exclusive sum": (
        replace(BASE, spelling=own_token_left_out),
        "leaves out the query's own token",
    ),
    "a reverse sum": (replace(BASE, spelling=backwards), "runs over later ones"),
}
DIVIDED_BY_THE_SOURCE: dict[str, Form] = {
    "sums of all keys": replace(BASE, spelling=full_sums),
    "sums of queries": replace(BASE, spelling=sums_of_queries),
    "sums of other keys": replace(BASE, other_sums=True),
    "sums of padding, too": replace(BASE, mask_sums=None),
    "only values are masked": replace(BASE, mask=None, mask_values=times_real, mask_sums=None),
    "root": replace(BASE, guard=lambda g, total: g("Sqrt", total)),
    "absolute": replace(BASE, guard=lambda g, total: g("Max", g("Abs", total), 1.0)),
    "an upper limit": replace(
        BASE, guard=lambda g, total: g("Clip", total, np.float32(0.1), np.float32(9))
    ),
    "less a number": replace(BASE, guard=plus(-0.25)),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    form, reason = MISSES[name]
    model = form.model()
    copy, result = raised(model)
    assert not result.sites and [reason in r.reason for r in result.rejections] == [True]
    given = feeds(9)
    assert np.array_equal(Runner(copy)(given)[0], Runner(model)(given)[0])


@pytest.mark.parametrize("name", DIVIDED_BY_THE_SOURCE)
def test_another_divisor_stays_with_the_source(name: str) -> None:
    """The sums are raised without a normaliser: the quotient is none that the operator has."""
    form = DIVIDED_BY_THE_SOURCE[name]
    model = form.model()
    copy, result = raised(model)
    site = only_site(result)
    assert site.linear is not None and site.linear.normaliser == "none"
    assert any(node.op_type == "Div" for node in copy.graph)
    for length in (1, 7, 65):
        given = feeds(length)
        want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
        kept = np.isfinite(want)
        # As the source, also in rows that it divides by nothing.
        assert np.array_equal(np.isfinite(got), kept)
        assert np.linalg.norm((got - want)[kept]) <= 1e-5 * np.linalg.norm(want[kept])


@pytest.mark.parametrize("name", DIVIDED_BY_THE_SOURCE)
def test_weights_that_something_else_divides_stay(name: str) -> None:
    """Here the divisor needs all pairs anyway."""
    if name in ("sums of all keys", "sums of queries"):
        return
    form = replace(DIVIDED_BY_THE_SOURCE[name], spelling=quadratic)
    if form.other_sums or form.mask_sums is not form.mask or form.mask_values is not None:
        return
    _, result = raised(form.model())
    assert not result.sites and [NOT_ITS_SUM in r.reason for r in result.rejections] == [True]


def test_a_state_that_is_used_elsewhere() -> None:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, HEADS, N, DIM]) for name in "qkv")
    state = g("MatMul", g("Transpose", k, perm=[0, 1, 3, 2]), v)
    _, result = raised(g.model([g("Identity", g("MatMul", q, state)), g("Identity", state)]))
    assert not result.sites and "is used elsewhere too" in result.rejections[0].reason


@pytest.mark.parametrize(
    "changes",
    [{"epsilon": 0.0}, {"epsilon": 2e-6}, {"feature_map": "relu"}, {"least": 0.5}],
    ids=["no epsilon", "another epsilon", "another map", "a least divisor"],
)
@pytest.mark.parametrize("spelling", [context, running], ids=lambda s: s.__name__)
def test_a_wrong_reading_is_refused(
    changes: dict[str, Any], spelling: Spelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subquad.passes.recognise import find, linear

    read = linear.linear_products

    def wrong(*args: Any) -> Any:
        for node, candidate in read(*args):
            assert isinstance(candidate, Candidate) and candidate.linear is not None
            yield node, replace(candidate, linear=replace(candidate.linear, **changes))

    monkeypatch.setattr(find, "linear_products", wrong)
    _, result = raised(Form(spelling).model())
    assert not result.sites and "differs from the source" in result.rejections[0].reason


@pytest.mark.parametrize("causal", [True, False])
def test_a_wrong_causality_is_refused(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.passes.recognise import find, linear

    read = linear.linear_products

    def wrong(*args: Any) -> Any:
        for node, candidate in read(*args):
            assert isinstance(candidate, Candidate)
            yield node, replace(candidate, is_causal=not candidate.is_causal)

    monkeypatch.setattr(find, "linear_products", wrong)
    _, result = raised(Form(running if causal else context).model())
    assert not result.sites and "differs from the source" in result.rejections[0].reason


# --- what is none ----------------------------------------------------------------------------


def products_of_three(g: Graph) -> str:
    """Rotations of points: as many rows as columns."""
    a, b, c = (g.input(name, FLOAT, [B, 3, 3]) for name in "abc")
    return g("MatMul", g("MatMul", a, b), c)


def gram(g: Graph) -> str:
    x = g.input("x", FLOAT, [B, N, 24])
    return g("MatMul", g("Transpose", x, perm=[0, 2, 1]), x)


def style_loss(g: Graph) -> str:
    """A Gram matrix over its own sum."""
    y = gram(g)
    return g("Div", y, g("Add", g("ReduceSum", y, [1, 2], keepdims=1), 1e-6))


def adapters(g: Graph) -> str:
    """``x (W a) b`` with computed low-rank factors, as hypernetworks make them."""
    x = g.input("x", FLOAT, [B, N, 24])
    a = g.input("a", FLOAT, [B, 24, 4])
    b = g.input("b", FLOAT, [B, 4, 16])
    return g("MatMul", g("MatMul", x, a), b)


def normalised(g: Graph) -> str:
    """Vectors over their length, then cosines."""
    x = g.input("x", FLOAT, [B, N, 24])
    y = g("Div", x, g("Sqrt", g("ReduceSum", g("Mul", x, x), [-1], keepdims=1)))
    return g("MatMul", y, g("Transpose", y, perm=[0, 2, 1]))


def graph_convolution(g: Graph) -> str:
    """``D^-1 A X W`` of an adjacency matrix that is an input."""
    x = g.input("x", FLOAT, [B, N, 24])
    a = g.input("a", FLOAT, [B, N, N])
    mean = g("Div", a, g("ReduceSum", a, [-1], keepdims=1))
    return g("MatMul", g("MatMul", mean, x), np.ones((24, 8), np.float32))


@pytest.mark.parametrize(
    "build", [products_of_three, gram, style_loss, adapters, normalised, graph_convolution]
)
def test_products_of_other_things_are_silent(build: Callable[[Graph], str]) -> None:
    g = Graph()
    _, result = raised(g.model([g("Identity", build(g))]))
    assert not result.sites and not result.rejections


@pytest.mark.parametrize("keys_first", [True, False])
def test_one_moved_tensor_is_query_and_key(keys_first: bool) -> None:
    """Its axes have the same labels on both sides, which are two."""
    g = Graph()
    x = g("Transpose", g.input("x", FLOAT, [B, N, HEADS, DIM]), perm=[0, 2, 1, 3])
    v = g.input("v", FLOAT, [B, HEADS, N, VALUE_DIM])
    turned = g("Transpose", x, perm=[0, 1, 3, 2])
    if keys_first:
        y = g("MatMul", x, g("MatMul", turned, v))
    else:
        y = g("Einsum", x, x, v, equation="bhnd,bhmd,bhme->bhne")
    copy, result = raised(g.model([g("Identity", y)]))
    site = only_site(result)
    assert site.linear is not None and site.linear.normaliser == "none"
    assert site.mask.describe() == "full"
    rng = np.random.default_rng(0)
    given: Arrays = {
        "x": rng.standard_normal((2, 33, HEADS, DIM)).astype(np.float32),
        "v": rng.standard_normal((2, HEADS, 33, VALUE_DIM)).astype(np.float32),
    }
    q = given["x"].astype(np.float64).swapaxes(1, 2)
    want = (q @ q.swapaxes(-1, -2)) @ given["v"].astype(np.float64)
    got = Runner(copy)(given)[0]
    # float32 sums of 33 keys
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
