"""Spellings of attention: scale, transposes, casts, softcap, grouped heads; and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from masked_attention import only_reason, only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner
from subquad.passes.raise_attention import raise_attention
from subquad.runtime.errors import UnsupportedModelError

B, H, N, D = "batch", 4, "length", 6
Pieces = dict[str, Any]


def decomposed(
    *,
    kv_heads: int = H,
    query: Callable[[Graph, str], str] | None = None,
    key: Callable[[Graph, str], str] | None = None,
    value: Callable[[Graph, str], str] | None = None,
    scores: Callable[[Graph, str], str] | None = None,
    weights: Callable[[Graph, str], str] | None = None,
    transpose: Callable[[Graph, str], str] | None = None,
    axis: int = -1,
    more: Callable[[Graph, str, str], str] | None = None,
) -> ir.Model:
    """Softmax attention of ``q``, ``k``, ``v`` with steps put in where a test wants them."""
    g = Graph()
    q = g.input("q", FLOAT, [B, H, N, D])
    k, v = (g.input(name, FLOAT, [B, kv_heads, N, D]) for name in "kv")
    g.input("padding", INT64, [B, N])
    q, k, v = (
        g("Identity", x) if f is None else f(g, x) for f, x in ((query, q), (key, k), (value, v))
    )
    kt = g("Transpose", k, perm=[0, 1, 3, 2]) if transpose is None else transpose(g, k)
    product = g("MatMul", q, kt)
    before = product if scores is None else scores(g, product)
    soft = g("Softmax", before, axis=axis)
    after = soft if weights is None else weights(g, soft)
    y = g("MatMul", after, v)
    outputs = [g("Identity", y)]
    if more is not None:
        outputs.append(more(g, product, soft))
    return g.model(outputs)


def feeds(length: int, kv_heads: int = H, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    padding = np.ones((3, length), np.int64)
    padding[1, length // 2 + 1 :] = 0
    padding[2, : length // 3] = 0
    arrays: dict[str, NDArray[Any]] = {
        name: rng.standard_normal((3, heads, length, D)).astype(np.float32) * 2
        for name, heads in (("q", H), ("k", kv_heads), ("v", kv_heads))
    }
    return {**arrays, "padding": padding}


def assert_equal(model: ir.Model, copy: ir.Model, kv_heads: int = H) -> None:
    before, after = Runner(model), Runner(copy)
    for length in (1, 8, 61):
        given = feeds(length, kv_heads)
        want, got = before(given)[0], after(given)[0]
        # Padded in front and causal, a row may see no key: no result to compare.
        seen = given["padding"].cumsum(1) > 0
        want, got = want.swapaxes(1, 2)[seen], got.swapaxes(1, 2)[seen]
        assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def sqrt_in_graph(g: Graph, scores: str) -> str:
    """Divide by the root of a size read from the shape."""
    size = g("Cast", g("Shape", "q", start=3, end=4), to=FLOAT)
    return g("Div", scores, g("Sqrt", size))


def cast(g: Graph, value: str, to: int) -> str:
    return g("Cast", value, to=to)


def padding_bias(g: Graph) -> str:
    real = g("Cast", g("Unsqueeze", "padding", [1, 2]), to=FLOAT)
    return g("Mul", g("Sub", 1.0, real), -1e4)


def causal_bias(g: Graph) -> str:
    slots = g.arange(g.dim("q", 2))
    later = g("Greater", g("Unsqueeze", slots, [0]), g("Unsqueeze", slots, [1]))
    return g("Where", later, -1e9, 0.0)


def softcap(g: Graph, scores: str, cap: float = 5.0) -> str:
    return g("Mul", g("Tanh", g("Div", scores, cap)), cap)


def nan_guard(g: Graph, weights: str) -> str:
    return g("Where", g("IsNaN", weights), 0.0, weights)


FORMS: dict[str, tuple[Pieces, float, float, str]] = {
    "no scale": ({}, 1.0, 0.0, "full"),
    "mul": ({"scores": lambda g, s: g("Mul", s, 0.3)}, 0.3, 0.0, "full"),
    "mul, constant first": ({"scores": lambda g, s: g("Mul", 0.3, s)}, 0.3, 0.0, "full"),
    "div": ({"scores": lambda g, s: g("Div", s, 4.0)}, 0.25, 0.0, "full"),
    "twice": ({"scores": lambda g, s: g("Mul", g("Div", s, 4.0), 0.5)}, 0.125, 0.0, "full"),
    "on query": ({"query": lambda g, q: g("Mul", q, 0.3)}, 0.3, 0.0, "full"),
    "on both": (
        {"query": lambda g, q: g("Mul", q, 0.5), "key": lambda g, k: g("Mul", k, 0.5)},
        0.5,
        0.0,
        "full",
    ),
    "on transposed key": (
        {"transpose": lambda g, k: g("Mul", g("Transpose", k, perm=[0, 1, 3, 2]), 0.25)},
        0.25,
        0.0,
        "full",
    ),
    "computed": ({"scores": sqrt_in_graph}, D**-0.5, 0.0, "full"),
    "full tensor": (
        {"scores": lambda g, s: g("Mul", s, np.full((1, H, 1, 1), 0.3, np.float32))},
        0.3,
        0.0,
        "full",
    ),
    "on query before transpose": (
        {
            "query": lambda g, q: g(
                "Transpose",
                g("Mul", g("Transpose", q, perm=[0, 2, 1, 3]), 0.3),
                perm=[0, 2, 1, 3],
            )
        },
        1.0,
        0.0,
        "full",
    ),
    "casts": (
        {
            "scores": lambda g, s: cast(g, g("Mul", cast(g, s, FLOAT), 0.3), FLOAT),
            "weights": lambda g, w: cast(g, cast(g, w, FLOAT), FLOAT),
        },
        0.3,
        0.0,
        "full",
    ),
    "wider softmax": (
        {
            "scores": lambda g, s: cast(g, s, TensorProto.DOUBLE),
            "weights": lambda g, w: cast(g, w, FLOAT),
        },
        1.0,
        0.0,
        "full",
    ),
    "softcap": ({"scores": softcap}, 1.0, 5.0, "full"),
    "scale, softcap": (
        {"scores": lambda g, s: softcap(g, g("Mul", s, 0.3))},
        0.3,
        5.0,
        "full",
    ),
    "softcap, scale": (
        {"scores": lambda g, s: g("Mul", softcap(g, s, 4.0), 0.5)},
        0.5,
        2.0,
        "full",
    ),
    "tanh alone": ({"scores": lambda g, s: g("Tanh", s)}, 1.0, 1.0, "full"),
    "softcap, mask": (
        {"scores": lambda g, s: g("Add", softcap(g, g("Mul", s, 0.3)), causal_bias(g))},
        0.3,
        5.0,
        "causal",
    ),
    "add, add": (
        {"scores": lambda g, s: g("Add", g("Add", s, causal_bias(g)), padding_bias(g))},
        1.0,
        0.0,
        "causal, key padding",
    ),
    "mask first": (
        {"scores": lambda g, s: g("Add", causal_bias(g), g("Mul", s, 0.3))},
        0.3,
        0.0,
        "causal",
    ),
    "where filled tensor": (
        {
            "scores": lambda g, s: g(
                "Where",
                g("Cast", g("Unsqueeze", "padding", [1, 2]), to=BOOL),
                s,
                g(
                    "ConstantOfShape",
                    g("Shape", s),
                    value=helper.make_tensor("fill", FLOAT, [1], [-1e9]),
                ),
            )
        },
        1.0,
        0.0,
        "full, key padding",
    ),
    "nan guard": (
        {
            "scores": lambda g, s: g(
                "Where", g("Equal", g("Unsqueeze", "padding", [1, 2]), [0]), -np.inf, s
            ),
            "weights": nan_guard,
        },
        1.0,
        0.0,
        "full, key padding",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    pieces, scale, cap, meaning = FORMS[form]
    model = decomposed(**pieces)
    copy, result = raised(model)
    site = only_site(result)
    assert site.scale == pytest.approx(scale, rel=1e-7)
    assert site.softcap == pytest.approx(cap, rel=1e-7)
    assert site.mask.describe() == meaning
    assert site.source_form == "decomposed"
    assert not any(node.op_type == "Softmax" for node in copy.graph)
    if form != "nan guard":  # its rows without keys are compared in test_mask
        assert_equal(model, copy)


# --- layouts -------------------------------------------------------------------------------


def split_heads(g: Graph, x: str, perm: list[int]) -> str:
    return g("Transpose", g("Reshape", x, [0, 0, H, D]), perm=perm)


@pytest.mark.parametrize("key_perm", [[0, 2, 3, 1], [0, 2, 1, 3]])
def test_packed_projections(key_perm: list[int]) -> None:
    """Query, key and value from ``[batch, length, heads * dim]``, key transposed in one or two."""
    g = Graph()
    packed = [g.input(name, FLOAT, [B, N, H * D]) for name in "qkv"]
    q, v = (split_heads(g, x, [0, 2, 1, 3]) for x in (packed[0], packed[2]))
    k = split_heads(g, packed[1], key_perm)
    if key_perm[2] == 1:
        k = g("Transpose", k, perm=[0, 1, 3, 2])
    y = g("MatMul", g("Softmax", g("Mul", g("MatMul", q, k), 0.2), axis=-1), v)
    model = g.model([g("Reshape", g("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, -1])])
    copy, result = raised(model)
    site = only_site(result)
    assert (site.num_heads, site.num_kv_heads, site.head_dim) == (H, H, D)
    given = {name: feeds(17)[name].swapaxes(1, 2).reshape(3, 17, H * D) for name in "qkv"}
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def test_three_axes_are_one_head() -> None:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, N, D]) for name in "qkv")
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 2, 1])), 0.2)
    model = g.model([g("MatMul", g("Softmax", g("Add", scores, causal_bias3(g)), axis=-1), v)])
    copy, result = raised(model)
    site = only_site(result)
    assert site.num_heads == 1 and site.mask.is_causal
    given = {name: array[:, 0] for name, array in feeds(17).items() if name != "padding"}
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert want.shape == got.shape
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def merged(g: Graph, x: str) -> str:
    """torch's MultiheadAttention: ``[length, batch, heads * dim]`` as ``[batch * heads, ...]``."""
    length, batch = (g("Shape", x, start=a, end=a + 1) for a in (0, 1))
    shape = g("Concat", length, g("Mul", batch, [H]), [D], axis=0)
    return g("Transpose", g("Reshape", x, shape), perm=[1, 0, 2])


@pytest.mark.parametrize("masked", [False, True])
def test_heads_merged_throughout(masked: bool) -> None:
    """Batch and heads are one axis from the scores to the output: split by the axis's size."""
    g = Graph()
    q, k, v = (merged(g, g.input(name, FLOAT, [N, B, H * D])) for name in "qkv")
    scores = g("MatMul", g("Mul", q, 0.2), g("Transpose", k, perm=[0, 2, 1]))
    if masked:
        slots = g.arange(g.dim("q", 0))
        later = g("Greater", g("Unsqueeze", slots, [0]), g("Unsqueeze", slots, [1]))
        scores = g("Add", scores, g("Unsqueeze", g("Where", later, -1e9, 0.0), [0]))
    y = g("MatMul", g("Softmax", scores, axis=-1), v)
    model = g.model([g("Identity", y)])
    copy, result = raised(model)
    site = only_site(result)
    assert (site.num_heads, site.is_self) == (H, True)
    assert site.mask.describe() == ("causal" if masked else "full")
    assert not any(node.op_type == "Softmax" for node in copy.graph)
    given = {n: feeds(17)[n].transpose(2, 0, 1, 3).reshape(17, 3, H * D) for n in "qkv"}
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert want.shape == got.shape == (3 * H, 17, D)
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def causal_bias3(g: Graph) -> str:
    slots = g.arange(g.dim("q", 1))
    later = g("Greater", g("Unsqueeze", slots, [0]), g("Unsqueeze", slots, [1]))
    return g("Unsqueeze", g("Where", later, -1e9, 0.0), [0])


def test_packed_attention_node() -> None:
    g = Graph()
    q = g.input("q", FLOAT, [B, N, H * D])
    k, v = (g.input(name, FLOAT, [B, N, 2 * D]) for name in "kv")
    y = g("Attention", q, k, v, q_num_heads=H, kv_num_heads=2, is_causal=1)
    model = g.model([g("Identity", y)])
    copy, result = raised(model)
    site = only_site(result)
    assert (site.num_heads, site.num_kv_heads, site.mask.is_causal) == (H, 2, True)
    given = {n: a.swapaxes(1, 2).reshape(3, 17, -1) for n, a in feeds(17, 2).items() if n in "qkv"}
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_of_the_optimizer(causal: int) -> None:
    """com.microsoft MultiHeadAttention, which ONNX Runtime's transformer optimizer writes."""
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, N, H * D]) for name in "qkv")
    y = g("MultiHeadAttention", q, k, v, domain="com.microsoft", num_heads=H, unidirectional=causal)
    model = g.model([g("Identity", y)])
    copy, result = raised(model)
    site = only_site(result)
    assert (site.num_heads, site.mask.is_causal) == (H, bool(causal))
    assert site.scale == pytest.approx(D**-0.5)
    given = {n: a.swapaxes(1, 2).reshape(3, 17, -1) for n, a in feeds(17).items() if n in "qkv"}
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def test_one_value_as_query_key_and_value() -> None:
    g = Graph()
    x = g("Neg", g.input("x", FLOAT, [B, H, N, D]))
    scores = g("MatMul", x, g("Transpose", x, perm=[0, 1, 3, 2]))
    model = g.model([g("MatMul", g("Softmax", scores, axis=-1), x)])
    copy, result = raised(model)
    assert only_site(result).scale == 1.0
    given = {"x": feeds(9)["q"] / 2}
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


# --- grouped heads -------------------------------------------------------------------------


def expand(g: Graph, x: str, groups: int = 2) -> str:
    sizes = [g("Shape", x, start=a, end=a + 1) for a in (0, 2)]
    wide = g("Concat", sizes[0], [groups, H // groups], sizes[1], [D], axis=0)
    final = g("Concat", sizes[0], [H], sizes[1], [D], axis=0)
    return g("Reshape", g("Expand", g("Unsqueeze", x, [2]), wide), final)


def tile(g: Graph, x: str) -> str:
    return g("Reshape", g("Tile", g("Unsqueeze", x, [2]), [1, 1, 2, 1, 1]), [0, H, -1, D])


def gather(g: Graph, x: str) -> str:
    return g("Gather", x, [0, 0, 1, 1], axis=1)


def concat(g: Graph, x: str) -> str:
    wide = g("Unsqueeze", x, [2])
    return g("Reshape", g("Concat", wide, wide, axis=2), [0, H, -1, D])


@pytest.mark.parametrize("repeat", [expand, tile, gather, concat])
def test_grouped_heads(repeat: Callable[[Graph, str], str]) -> None:
    model = decomposed(kv_heads=2, key=repeat, value=repeat)
    copy, result = raised(model)
    assert (only_site(result).num_heads, only_site(result).num_kv_heads) == (H, 2)
    assert_equal(model, copy, 2)


def test_one_shared_head() -> None:
    model = decomposed(
        kv_heads=1, key=lambda g, x: expand(g, x, 1), value=lambda g, x: expand(g, x, 1)
    )
    copy, result = raised(model)
    assert only_site(result).num_kv_heads == 1
    assert_equal(model, copy, 1)


def test_interleaved_heads_are_not_grouped() -> None:
    """Head h reads key head h % 2: the repetition stays in the graph, the site has all heads."""
    order = lambda g, x: g("Gather", x, [0, 1, 0, 1], axis=1)  # noqa: E731
    model = decomposed(kv_heads=2, key=order, value=order)
    copy, result = raised(model)
    assert only_site(result).num_kv_heads == H
    assert_equal(model, copy, 2)


def test_key_and_value_grouped_differently() -> None:
    model = decomposed(
        kv_heads=2, key=expand, value=lambda g, x: g("Gather", x, [0, 1, 0, 1], axis=1)
    )
    copy, result = raised(model)
    assert only_site(result).num_kv_heads == H
    assert_equal(model, copy, 2)


# --- no attention --------------------------------------------------------------------------

NONE: dict[str, tuple[Pieces, str]] = {
    "weights are an output": (
        {"more": lambda g, product, soft: soft},
        "the softmax is an output of the graph",
    ),
    "weights used twice": (
        {"more": lambda g, product, soft: g("ReduceMax", soft, [3])},
        "used in several places: its weights are needed",
    ),
    "scores used twice": (
        {"more": lambda g, product, soft: g("ReduceMax", product, [3])},
        "is used elsewhere too",
    ),
    "wrong axis": ({"axis": 2}, "softmax over axis 2, not over keys"),
    "transposed weights": (
        {"weights": lambda g, w: g("Transpose", w, perm=[0, 1, 3, 2])},
        "goes into Transpose, not into a product with values",
    ),
    "weights scaled": ({"weights": lambda g, w: g("Mul", w, 2.0)}, "goes into Mul"),
    "computed bias": (
        {
            "scores": lambda g, s: g(
                "Add", s, g("MatMul", "q", g("Transpose", "k", perm=[0, 1, 3, 2]))
            )
        },
        "two computed terms are added: a score bias",
    ),
    "half precision": (
        {
            "scores": lambda g, s: g("Cast", g("Cast", s, to=TensorProto.FLOAT16), to=FLOAT),
        },
        "found operator Cast",
    ),
    "small fill": (
        {"scores": lambda g, s: g("Where", g("Cast", "padding", to=BOOL), s, -50.0)},
        "masked scores are set to -50",
    ),
    "nan set to one": (
        {"weights": lambda g, w: g("Where", g("IsNaN", w), 1.0, w)},
        "some weights are set to 1.0",
    ),
    "squared scores": ({"scores": lambda g, s: g("Mul", s, s)}, "found operator Mul"),
    "relu": ({"scores": lambda g, s: g("Relu", s)}, "found operator Relu"),
}


@pytest.mark.parametrize("name", NONE)
def test_no_attention(name: str) -> None:
    pieces, reason = NONE[name]
    assert reason in only_reason(raised(decomposed(**pieces))[1])


def test_router_and_classifier() -> None:
    """Softmaxes over experts or classes are reported, as everything that is left alone."""
    g = Graph()
    x = g.input("x", FLOAT, [B, N, D])
    logits = g("MatMul", x, np.ones((D, 4), np.float32))
    best = g.multi("TopK", g("Softmax", logits, axis=-1), [2], outputs=2)[0]
    _, result = raised(g.model([best, g("Softmax", logits, axis=-1)]))
    assert [r.reason for r in result.rejections] == [
        "the softmax goes into TopK, not into a product with values: no attention",
        "the softmax is an output of the graph, or unused",
    ]


@pytest.mark.parametrize("name", ["float16", "double"])
def test_other_float_types(name: str) -> None:
    dtype = TensorProto.FLOAT16 if name == "float16" else TensorProto.DOUBLE
    g = Graph()
    q, k, v = (g.input(x, dtype, [B, H, N, D]) for x in "qkv")
    _, result = raised(g.model([g("Attention", q, k, v)]))
    assert f"query is {name.upper()}: only float32 attention is raised" in only_reason(result)


def test_attention_node_with_other_outputs() -> None:
    g = Graph()
    q, k, v = (g.input(x, FLOAT, [B, H, N, D]) for x in "qkv")
    outputs = g.multi("Attention", q, k, v, None, outputs=4)
    _, result = raised(g.model([outputs[0], outputs[3]]))
    assert "the scores or weights are an output of Attention too" in only_reason(result)


@pytest.mark.parametrize("shared", ["q", "kv"])
def test_broadcast_batch(shared: str) -> None:
    """Learned queries shared by all rows, as in pooling heads; or a learned memory."""
    g = Graph()
    q = g.input("q", FLOAT, [1 if shared == "q" else B, H, 5, D])
    k, v = (g.input(x, FLOAT, [1 if shared == "kv" else B, H, N, D]) for x in "kv")
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    model = g.model([g("Identity", g("MatMul", g("Softmax", scores, axis=-1), v))])
    copy, result = raised(model)
    site = only_site(result)
    assert not site.is_self and site.mask.describe() == "full"
    given = feeds(17)
    given["q"] = given["q"][:, :, :5]
    for name in shared:
        given[name] = given[name][:1]
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    assert want.shape == got.shape == (3, H, 5, D)
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def test_different_batches() -> None:
    g = Graph()
    q = g.input("q", FLOAT, [2, H, N, D])
    k, v = (g.input(x, FLOAT, [3, H, N, D]) for x in "kv")
    _, result = raised(g.model([g("Attention", q, k, v)]))
    assert "key has batch size 3, others 2" in only_reason(result)


def test_dynamic_head_count() -> None:
    g = Graph()
    q, k, v = (g.input(x, FLOAT, [B, "heads", N, D]) for x in "qkv")
    _, result = raised(g.model([g("Attention", q, k, v)]))
    assert "the head count must be a fixed integer, got heads" in only_reason(result)


def test_attention_in_a_branch_is_reported() -> None:
    g = Graph()
    q = g.input("q", FLOAT, [B, H, N, D])
    condition = g.input("condition", BOOL, [])
    inner = [
        helper.make_graph(
            [helper.make_node(op, ["q"] * count, [f"y{number}"], name=f"inner{number}")],
            f"branch{number}",
            [],
            [helper.make_tensor_value_info(f"y{number}", FLOAT, None)],
        )
        for number, (op, count) in enumerate((("Attention", 3), ("Identity", 1)))
    ]
    y = g("If", condition, then_branch=inner[0], else_branch=inner[1])
    _, result = raised(g.model([y]))
    assert "Attention inside a subgraph (If, Loop or Scan)" in only_reason(result)
    assert q == "q"


@pytest.mark.parametrize("function", ["Softmax", "Sigmoid", "Identity", "divided"])
def test_weights_that_go_into_a_branch_are_left_alone(function: str) -> None:
    """The product with values, or the division behind it, is inside an If."""
    g = Graph()
    q, k, v = (g.input(x, FLOAT, [B, H, N, D]) for x in "qkv")
    condition = g.input("condition", BOOL, [])
    if function == "divided":
        q, k = g("Relu", q), g("Relu", k)
    scores = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    if function == "divided":
        inner = ("Div", [g("MatMul", scores, v), g("ReduceSum", scores, [-1], keepdims=1)])
    else:
        inner = ("MatMul", [g(function, scores), v])
    branches = [
        helper.make_graph(
            [helper.make_node(op, inputs, [f"y{number}"])],
            f"branch{number}",
            [],
            [helper.make_tensor_value_info(f"y{number}", FLOAT, None)],
        )
        for number, (op, inputs) in enumerate((inner, ("Identity", [v])))
    ]
    y = g("If", condition, then_branch=branches[0], else_branch=branches[1])
    _, result = raised(g.model([g("Identity", y)]))
    assert not result.sites


def test_old_opset_is_an_error() -> None:
    g = Graph()
    x = g.input("x", FLOAT, [B, N])
    with pytest.raises(UnsupportedModelError, match="from opset 18 on, the model has 13"):
        raise_attention(g.model([g("Identity", x)], opset=13))
