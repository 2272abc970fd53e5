"""Attention operators that hold a cache: each is raised, and steps give what the source gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from masked_attention import only_reason, only_site, raised
from onnx_graphs import BOOL, FLOAT, INT32, INT64, Graph, Runner
from subquad.passes.recognise.site import SiteCache

B, N, P, T = "batch", "length", "past", "total"
H, KV, D = 4, 2, 32
MICROSOFT = "com.microsoft"
RNG = np.random.default_rng(3)
TABLES = RNG.standard_normal((2, 64, D // 2)).astype(np.float32)
WEIGHTS = RNG.standard_normal((20, 3 * H * D)).astype(np.float32) * 0.2
CACHE = ("past_key", "past_value")
Arrays = dict[str, NDArray[Any]]


def raised_like(model: ir.Model, form: str, meaning: str) -> tuple[ir.Model, SiteCache | None]:
    copy, result = raised(model)
    site = only_site(result)
    assert (site.source_form, site.describe()) == (form, meaning)
    assert [v.name for v in copy.graph.outputs] == [v.name for v in model.graph.outputs]
    assert [n for n in copy.graph if n.op_type == "Attention"] == [
        n for n in copy.graph if n.domain == "ai.subquad"
    ]
    return copy, site.cache


def assert_equal(model: ir.Model, copy: ir.Model, feeds: Arrays) -> None:
    for want, got in zip(Runner(model)(feeds), Runner(copy)(feeds), strict=True):
        # Two float32 evaluations with a projection before them.
        assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) * 1.5


# --- the standard operator -----------------------------------------------------------------


def standard(
    *, packed: bool, mask: str = "", outside: bool = False, causal: int = 1, **more: Any
) -> ir.Model:
    g = Graph()
    sizes = (H, KV, KV)
    dims: list[list[int | str]] = [[B, N, h * D] if packed else [B, h, N, D] for h in sizes]
    operands: list[Any] = [g.input(n, FLOAT, d) for n, d in zip("qkv", dims, strict=True)]
    axes: list[int | str] = [B, 1, N, "past + length"]
    kinds = {"bool": BOOL, "float": FLOAT}
    operands.append(g.input("mask", kinds[mask], axes) if mask else None)
    if outside:
        operands += [None, None, g.input("nonpad", INT64, [B])]
    else:
        operands += [g.input(name, FLOAT, [B, KV, P, D]) for name in CACHE]
    if packed:
        more |= {"q_num_heads": H, "kv_num_heads": KV}
    outputs = g.multi("Attention", *operands, outputs=3, is_causal=causal, **more)
    return g.model([g("Identity", outputs[0]), *(() if outside else outputs[1:])])


def standard_feeds(length: int, past: int, *, packed: bool) -> Arrays:
    arrays = {
        name: normal(3, length, heads * D) if packed else normal(3, heads, length, D)
        for name, heads in zip("qkv", (H, KV, KV), strict=True)
    }
    arrays |= {name: normal(3, KV, past, D) + number for number, name in enumerate(CACHE)}
    seen = np.random.default_rng(length).random((3, 1, length, past + length)) < 0.7
    seen[..., 0] = True
    return {**arrays, "bool": seen, "float": normal(*seen.shape)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("mask", "options", "meaning"),
    [
        ("", {}, "causal, cached"),
        ("", {"scale": 0.2, "softcap": 3.0}, "causal, cached"),
        ("", {"causal": 0}, "full, cached"),
        ("bool", {}, "causal, mask computed from mask, cached"),
        ("float", {}, "causal, bias computed from mask, cached"),
    ],
)
def test_standard(packed: bool, mask: str, options: dict[str, Any], meaning: str) -> None:
    model = standard(packed=packed, mask=mask, **options)
    copy, cache = raised_like(model, "Attention", meaning)
    assert cache == SiteCache(*CACHE, "attention_0_1", "attention_0_2")
    for length, past in ((1, 0), (1, 23), (9, 0), (9, 40)):
        feeds = standard_feeds(length, past, packed=packed)
        assert_equal(model, copy, {**feeds, "mask": feeds.get(mask, feeds["q"])})


def test_a_cache_outside_the_operator() -> None:
    """The number of real keys of each row; their frontier moves with it."""
    model = standard(packed=False, outside=True)
    copy, cache = raised_like(model, "Attention", "full, mask computed from nonpad")
    assert cache is None
    for real in ([9, 9, 9], [3, 9, 7]):  # the first queries of row 0 see nothing
        feeds = standard_feeds(9, 0, packed=False) | {"nonpad": np.array(real)}
        want, got = Runner(model)(feeds)[0], Runner(copy)(feeds)[0]
        assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)
    assert not got[0, :, :6].any()


# --- com.microsoft -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head(causal: int) -> None:
    g = Graph()
    operands: list[Any] = [g.input(name, FLOAT, [B, N, H * D]) for name in "qkv"]
    operands += [None, g.input("mask", INT32, [B, "past + length"]), None]
    operands += [g.input(name, FLOAT, [B, H, P, D]) for name in CACHE]
    outputs = g.multi(
        "MultiHeadAttention",
        *operands,
        outputs=3,
        domain=MICROSOFT,
        num_heads=H,
        unidirectional=causal,
    )
    model = g.model([g("Identity", outputs[0]), *outputs[1:]])
    meaning = f"{'causal' if causal else 'full'}, key padding, cached"
    copy, cache = raised_like(model, "MultiHeadAttention", meaning)
    assert cache == SiteCache(*CACHE, "multiheadattention_0_1", "multiheadattention_0_2")
    for length, past in ((1, 0), (1, 23), (9, 40)):
        real = np.random.default_rng(past).random((3, past + length)) < 0.7
        real[:, 0] = True
        feeds = {name: normal(3, length, H * D) + n for n, name in enumerate("qkv")}
        feeds |= {name: normal(3, H, past, D) + n for n, name in enumerate(CACHE)}
        assert_equal(model, copy, feeds | {"mask": real.astype(np.int32)})


def test_packed_attention() -> None:
    """Keys and values of a cache are one tensor: raised, though no cache that a method serves."""
    g = Graph()
    x = g.input("x", FLOAT, [B, N, 20])
    mask, past = (
        g.input("mask", INT32, [B, "past + length"]),
        g.input("past", FLOAT, [2, B, H, P, D]),
    )
    y, present = g.multi(
        "Attention",
        *(x, WEIGHTS, np.zeros(3 * H * D, np.float32), mask, past),
        outputs=2,
        domain=MICROSOFT,
        num_heads=H,
        unidirectional=1,
    )
    model = g.model([g("Identity", y), present])
    copy, cache = raised_like(model, "com.microsoft Attention", "causal, key padding")
    assert cache is None
    for length, count in ((1, 0), (1, 23), (9, 40)):
        real = np.random.default_rng(count).random((3, count + length)) < 0.7
        real[:, 0] = True
        feeds = {"x": normal(3, length, 20), "past": normal(2, 3, H, count, D)}
        assert_equal(model, copy, feeds | {"mask": real.astype(np.int32)})


# --- GroupQueryAttention as the model builder of ONNX Runtime GenAI writes it -----------------


def group_query(
    *,
    packed: bool = False,
    rotary: bool = True,
    less: int = 1,
    axis: int = 1,
    total: str = "mask",
    **attributes: Any,
) -> ir.Model:
    """Lengths are counted in the padding input: its sum less ``less``, and its columns."""
    g = Graph()
    if packed:
        operands: list[Any] = [g.input("qkv", FLOAT, [B, N, (H + 2 * KV) * D]), None, None]
    else:
        operands = [g.input("q", FLOAT, [B, N, H * D])]
        operands += [g.input(name, FLOAT, [B, N, KV * D]) for name in "kv"]
    past = [g.input(name, FLOAT, [B, KV, P, D]) for name in CACHE]
    mask = g.input("attention_mask", INT64, [B, T])
    count = g("Sub", g("ReduceSum", mask, np.array([axis]), keepdims=0), np.array([less]))
    last = g("Cast", count, to=INT32)
    of = {"mask": (mask, 1), "batch": (mask, 0)}[total]
    whole = g("Cast", g("Gather", g("Shape", of[0]), np.array(of[1]), axis=0), to=INT32)
    outputs = g.multi(
        "GroupQueryAttention",
        *(*operands, *past, last, whole, *(TABLES if rotary else ())),
        outputs=3,
        domain=MICROSOFT,
        num_heads=H,
        kv_num_heads=KV,
        do_rotary=int(rotary),
        **attributes,
    )
    return g.model([g("Identity", outputs[0]), *outputs[1:]])


def group_feeds(length: int, past: int, real: NDArray[Any] | None = None) -> Arrays:
    widths = {"qkv": (H + 2 * KV) * D, "q": H * D, "k": KV * D, "v": KV * D}
    feeds = {name: normal(3, length, width) for name, width in widths.items()}
    feeds |= {name: normal(3, KV, past, D) + number for number, name in enumerate(CACHE)}
    real = np.ones((3, past + length)) if real is None else real
    return feeds | {"attention_mask": real.astype(np.int64)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packed": True},
        {"rotary": False},
        {"rotary_interleaved": 1},
        {"softcap": 3.0},
        {"scale": 0.21},
    ],
    ids=str,
)
def test_group_query(options: dict[str, Any]) -> None:
    model = group_query(**options)
    copy, cache = raised_like(model, "GroupQueryAttention", "causal, key padding, cached")
    presents = [str(v.name) for v in model.graph.outputs[1:]]
    assert cache == SiteCache(*CACHE, *presents)
    for length, past in ((1, 0), (9, 0), (1, 23), (9, 40)):
        feeds = group_feeds(length, past)
        if length > 1 and past:  # all that ONNX Runtime serves
            feeds = {name: array[:1] for name, array in feeds.items()}
        assert_equal(model, copy, feeds)


def test_group_query_with_sinks() -> None:
    copy, _ = raised_like(
        group_query(smooth_softmax=1), "GroupQueryAttention", "causal, key padding, cached, sinks"
    )
    assert_equal(group_query(smooth_softmax=1), copy, group_feeds(1, 12))


def test_rows_padded_behind_their_prompt() -> None:
    """The source packs the keys of such a row, we keep its slots: what it writes is the same."""
    model = group_query()
    copy, result = raised(model)
    assert only_site(result).cache
    source, ours = Runner(model), Runner(copy)
    real = np.ones((3, 8), bool)
    real[1, 5:] = real[2, 2:] = False
    prompt = group_feeds(8, 0, real)
    want, got = source(prompt), ours(prompt)
    np.testing.assert_allclose(got[0][real], want[0][real], rtol=1e-4, atol=1e-5)
    states, mine, mask = want[1:], got[1:], real
    for step in range(3):
        mask = np.concatenate([mask, np.ones((3, 1), bool)], axis=1)
        feeds = group_feeds(1, 8 + step, mask)
        feeds = {name: array + step for name, array in feeds.items() if name in "qkv"}
        feeds["attention_mask"] = mask.astype(np.int64)
        want = source(feeds | dict(zip(CACHE, states, strict=True)))
        got = ours(feeds | dict(zip(CACHE, mine, strict=True)))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
        states, mine = want[1:], got[1:]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"less": 0}, "seqlens_k is not the number of real tokens"),
        ({"less": 2}, "seqlens_k is not the number of real tokens"),
        ({"axis": 0}, "seqlens_k is not the number of real tokens"),
        ({"total": "batch"}, "total_sequence_length is not the length of 'attention_mask'"),
        ({"local_window_size": 5}, "counts real tokens where rows are padded"),
    ],
    ids=str,
)
def test_group_query_near_misses(options: dict[str, Any], reason: str) -> None:
    model = group_query(**options)
    copy, result = raised(model)
    assert reason in only_reason(result)
    assert [n.op_type for n in copy.graph] == [n.op_type for n in model.graph]
