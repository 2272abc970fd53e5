"""com.microsoft Attention, MultiHeadAttention and GroupQueryAttention, as the optimizer writes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from masked_attention import only_reason, only_site, raised
from onnx_graphs import FLOAT, INT32, INT64, Graph, Runner
from subquad.passes.recognise import speller

B, H, N, D = "batch", 4, "length", 6
C = 20
MICROSOFT = "com.microsoft"
RNG = np.random.default_rng(7)
WEIGHTS = RNG.standard_normal((C, 3 * H * D)).astype(np.float32) * 0.3
BIAS = RNG.standard_normal(3 * H * D).astype(np.float32) * 0.3


def packed_attention(mask: str = "", *, bias: bool = True, **attributes: Any) -> ir.Model:
    """com.microsoft Attention over ``x`` with a mask input of one of its forms."""
    g = Graph()
    x = g.input("x", FLOAT, [B, N, C])
    masks: dict[str, tuple[int, list[Any]]] = {
        "raw": (INT32, [B, N]),
        "rows": (INT32, [B, N, N]),
        "lengths": (INT32, [B]),
        "scores": (FLOAT, [1, H, N, N]),
    }
    given = g.input(mask, *masks[mask]) if mask else None
    padding, extra = (None, given) if mask == "scores" else (given, None)
    more = [padding, None, extra] if extra or padding else []
    while more and more[-1] is None:
        more.pop()
    y = g(
        "Attention",
        *(x, WEIGHTS, BIAS if bias else None, *more),
        domain=MICROSOFT,
        num_heads=H,
        **attributes,
    )
    return g.model([g("Identity", y)])


def packed_feeds(length: int, mask: str = "") -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(length)
    real = rng.random((3, length)) < 0.6
    real[:, 0] = True
    rows = rng.random((3, length, length)) < 0.6
    rows[:, :, 0] = True
    return {
        "x": rng.standard_normal((3, length, C)).astype(np.float32),
        "raw": real.astype(np.int32),
        "rows": rows.astype(np.int32),
        "lengths": rng.integers(1, length + 1, 3).astype(np.int32),
        "scores": rng.standard_normal((1, H, length, length)).astype(np.float32),
    }


def assert_same(model: ir.Model, copy: ir.Model, given: dict[str, NDArray[Any]]) -> None:
    want, got = Runner(model)(given)[0], Runner(copy)(given)[0]
    # Two float32 evaluations with a projection before them.
    assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)


def has_fused(model: ir.Model) -> bool:
    return any(node.domain == MICROSOFT for node in model.graph)


@pytest.mark.parametrize(
    ("mask", "attributes", "meaning"),
    [
        ("", {}, "full"),
        ("", {"bias": False}, "full"),
        ("", {"unidirectional": 1}, "causal"),
        ("", {"scale": 0.2}, "full"),
        ("", {"qkv_hidden_sizes": [H * D] * 3}, "full"),
        ("raw", {}, "full, key padding"),
        ("raw", {"unidirectional": 1}, "causal, key padding"),
        ("raw", {"mask_filter_value": -3e38}, "full, key padding"),
        ("lengths", {}, "full, mask computed from lengths"),
        ("rows", {}, "full, mask computed from rows"),
        ("scores", {}, "full, bias computed from scores"),
    ],
)
def test_attention(mask: str, attributes: dict[str, Any], meaning: str) -> None:
    model = packed_attention(mask, **attributes)
    copy, result = raised(model)
    site = only_site(result)
    assert site.source_form == "com.microsoft Attention"
    assert site.describe() == meaning
    assert site.scale == pytest.approx(attributes.get("scale", D**-0.5))
    assert not has_fused(copy)
    for length in (1, 8, 61):
        assert_same(model, copy, packed_feeds(length, mask))


def test_names_of_outputs_stay() -> None:
    model = packed_attention("raw")
    before = [value.name for value in model.graph.outputs]
    copy, result = raised(model)
    assert [value.name for value in copy.graph.outputs] == before
    assert only_site(result).source_output == "attention_0_0"
    assert any(out.name == "attention_0_0" for node in copy.graph for out in node.outputs)


def test_a_mask_filter_that_hides_nothing_is_a_bias() -> None:
    site = only_site(raised(packed_attention("raw", mask_filter_value=-2.0))[1])
    assert not site.mask.key_padding and site.biases


# --- MultiHeadAttention --------------------------------------------------------------------


def multi_head(
    *, bias: bool = False, mask: bool = False, extra: bool = False, **more: Any
) -> ir.Model:
    g = Graph()
    keys = N if more.get("unidirectional") else "keys"
    operands: list[Any] = [g.input("q", FLOAT, [B, N, H * D])]
    operands += [g.input(name, FLOAT, [B, keys, H * D]) for name in "kv"]
    operands += [
        BIAS if bias else None,
        g.input("mask", INT32, [B, keys]) if mask else None,
        g.input("extra", FLOAT, [B, 1, N, keys]) if extra else None,
    ]
    y = g("MultiHeadAttention", *operands, domain=MICROSOFT, num_heads=H, **more)
    return g.model([g("Identity", y)])


def multi_head_feeds(length: int, keys: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(length)
    mask = rng.random((3, keys)) < 0.6
    mask[:, 0] = True
    shapes = {
        "q": (3, length, H * D),
        "k": (3, keys, H * D),
        "v": (3, keys, H * D),
        "extra": (3, 1, length, keys),
    }
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return {**arrays, "mask": mask.astype(np.int32)}


@pytest.mark.parametrize(
    ("options", "meaning"),
    [
        ({"bias": True}, "full"),
        ({"mask": True}, "full, key padding"),
        ({"bias": True, "mask": True}, "full, key padding"),
        ({"mask": True, "extra": True}, "full, key padding, bias computed from extra"),
        ({"mask": True, "unidirectional": 1}, "causal, key padding"),
    ],
)
def test_multi_head(options: dict[str, Any], meaning: str) -> None:
    model = multi_head(**options)
    copy, result = raised(model)
    site = only_site(result)
    assert (site.source_form, site.describe()) == ("MultiHeadAttention", meaning)
    for length, keys in ((1, 1), (8, 5), (21, 40)):
        if options.get("unidirectional"):
            keys = length
        assert_same(model, copy, multi_head_feeds(length, keys))


# --- GroupQueryAttention -------------------------------------------------------------------

KV = 2
HEAD = 32
TABLES = RNG.standard_normal((2, 64, HEAD // 2)).astype(np.float32)


def group_query(
    *,
    packed: bool = False,
    rotary: bool = False,
    sinks: bool = False,
    presents: bool = False,
    positions: bool = False,
    half: bool = False,
    extra: bool = False,
    **attributes: Any,
) -> ir.Model:
    g = Graph()
    if packed:
        operands: list[Any] = [g.input("qkv", FLOAT, [B, N, (H + 2 * KV) * HEAD]), None, None]
    else:
        operands = [g.input("q", FLOAT, [B, N, H * HEAD])]
        operands += [g.input(name, FLOAT, [B, N, KV * HEAD]) for name in "kv"]
    tables: list[Any] = [None, None]
    if rotary:
        tables = list(TABLES[:, :, : HEAD // 4] if half else TABLES)
        attributes["do_rotary"] = 1
    operands += [None, None, g.input("last", INT32, [B]), g.input("total", INT32, [])]
    operands += [*tables, g.input("positions", INT64, [B, N]) if positions else None]
    operands.append(g.input("extra", FLOAT, [B, 1, N, N]) if extra else None)
    operands.append(np.array([0.5, -1, 2, 0], np.float32) if sinks else None)
    while operands[-1] is None:
        operands.pop()
    outputs = g.multi(
        "GroupQueryAttention",
        *operands,
        outputs=3,
        domain=MICROSOFT,
        num_heads=H,
        kv_num_heads=KV,
        **attributes,
    )
    return g.model([g("Identity", outputs[0]), *(outputs[1:] if presents else [])])


def group_feeds(length: int) -> dict[str, NDArray[Any]]:
    """Row 0 is full, the others end earlier."""
    rng = np.random.default_rng(length)
    last = rng.integers(0, length, 3)
    last[0] = length - 1
    shapes = {"qkv": (H + 2 * KV) * HEAD, "q": H * HEAD, "k": KV * HEAD, "v": KV * HEAD}
    arrays: dict[str, NDArray[Any]] = {
        name: rng.standard_normal((3, length, width)).astype(np.float32)
        for name, width in shapes.items()
    }
    positions = np.broadcast_to(np.arange(length), (3, length))
    return {
        **arrays,
        "last": last.astype(np.int32),
        "total": np.array(length, np.int32),
        "positions": positions.astype(np.int64),
        "extra": rng.standard_normal((3, 1, length, length)).astype(np.float32) * 2,
    }


@pytest.mark.parametrize(
    ("options", "meaning"),
    [
        ({}, "causal"),
        ({"packed": True}, "causal"),
        ({"scale": 0.2}, "causal"),
        ({"local_window_size": 5}, "causal, window 5"),
        ({"softcap": 3.0}, "causal"),
        ({"rotary": True}, "causal"),
        ({"rotary": True, "rotary_interleaved": 1}, "causal"),
        ({"rotary": True, "half": True, "packed": True}, "causal"),
        ({"rotary": True, "presents": True}, "causal"),
        ({"rotary": True, "positions": True}, "causal"),
        ({"sinks": True}, "causal, sinks"),
        ({"smooth_softmax": 1}, "causal, sinks"),
        ({"sinks": True, "local_window_size": 5}, "causal, window 5, sinks"),
        ({"extra": True}, "causal, bias computed from extra"),
    ],
)
def test_group_query(options: dict[str, Any], meaning: str) -> None:
    check_group_query(options, meaning)


def check_group_query(options: dict[str, Any], meaning: str) -> None:
    model = group_query(**options)
    copy, result = raised(model)
    site = only_site(result)
    assert (site.source_form, site.describe()) == ("GroupQueryAttention", meaning), options
    assert (site.num_heads, site.num_kv_heads) == (H, KV)
    assert site.softcap == options.get("softcap", 0.0)
    source, ours = Runner(model), Runner(copy)
    for length in (1, 8, 33):
        given = group_feeds(length)
        wanted, found = source(given), ours(given)
        rows = np.arange(length) <= given["last"][:, None]
        want, got = wanted[0][rows], found[0][rows]
        assert np.linalg.norm(want - got) <= 1e-5 * np.linalg.norm(want)
        for want, got in zip(wanted[1:], found[1:], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def random_options(seed: int) -> tuple[dict[str, Any], str]:
    """Options of ``group_query`` in any combination, and what they mean."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "packed": rng.random() < 0.3,
        "rotary": rng.random() < 0.5,
        "sinks": rng.random() < 0.3,
        "presents": rng.random() < 0.3,
        "positions": rng.random() < 0.3,
        "half": rng.random() < 0.3,
        "extra": rng.random() < 0.3,
        "rotary_interleaved": rng.randint(0, 1),
        "smooth_softmax": 0,
        "local_window_size": rng.choice((-1, -1, rng.randint(1, 12))),
        "softcap": rng.choice((0.0, 0.0, 3.0, 4.5)),
        "scale": rng.choice((0.0, 0.2, 0.21)),
    }
    if not options["sinks"]:
        options["smooth_softmax"] = rng.randint(0, 1)
    window = options["local_window_size"]
    parts = ["causal"] if window < 0 else ["causal", f"window {window}"]
    parts += ["bias computed from extra"] * options["extra"]
    parts += ["sinks"] * (options["sinks"] or options["smooth_softmax"] == 1)
    return options, ", ".join(parts)


@pytest.mark.parametrize("seed", range(6))
def test_random_options(seed: int) -> None:
    check_group_query(*random_options(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_options(seed: int) -> None:
    check_group_query(*random_options(seed))


# --- left alone ----------------------------------------------------------------------------


def test_cache_of_unknown_lengths_is_declined() -> None:
    """``seqlens_k`` as an input may be anything, and the slots of a row with it."""
    g = Graph()
    q = g.input("q", FLOAT, [B, N, H * HEAD])
    k, v = (g.input(name, FLOAT, [B, N, KV * HEAD]) for name in "kv")
    past = [g.input(f"past_{name}", FLOAT, [B, KV, "past", HEAD]) for name in "kv"]
    sizes = [g.input("last", INT32, [B]), g.input("total", INT32, [])]
    outputs = g.multi(
        "GroupQueryAttention",
        *(q, k, v, *past, *sizes),
        outputs=3,
        domain=MICROSOFT,
        num_heads=H,
        kv_num_heads=KV,
    )
    model = g.model(outputs)
    copy, result = raised(model)
    assert "seqlens_k is not the number of real tokens" in only_reason(result)
    assert [node.op_type for node in copy.graph] == ["GroupQueryAttention"]


def test_packed_operands_are_declined() -> None:
    g = Graph()
    qkv = g.input("qkv", FLOAT, [B, N, H, 3, D])
    model = g.model([g("MultiHeadAttention", qkv, domain=MICROSOFT, num_heads=H)])
    assert "of packed operands is run on GPUs only" in only_reason(raised(model)[1])


def test_twins_that_differ_are_declined_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ONNX Runtime computes decides, not what we think the operator means."""
    model = packed_attention("raw")
    original = speller.Speller.attend

    def wrong(self: Any, *arguments: Any) -> Any:
        output = original(self, *arguments)
        return self.op("Mul", output, self.scalar(1.001))

    monkeypatch.setattr(speller.Speller, "attend", wrong)
    copy, result = raised(model)
    assert "Attention, spelled out, gives another" in only_reason(result)
    assert [node.op_type for node in copy.graph] == [node.op_type for node in model.graph]


@pytest.mark.parametrize(
    ("op_type", "reason"),
    [
        ("LinearAttention", "LinearAttention (gated_delta) is linear in the length already"),
        ("PackedAttention", "PackedAttention holds a whole batch in one row"),
        ("QAttention", "QAttention computes with quantised integers"),
        ("SparseAttention", "SparseAttention leaves most pairs of tokens out already"),
        ("SomeAttention", "com.microsoft SomeAttention is not read yet"),
    ],
)
def test_relatives_are_named(op_type: str, reason: str) -> None:
    g = Graph()
    q, k, v = (g.input(name, FLOAT, [B, N, H * D]) for name in "qkv")
    y = g(op_type, q, k, v, domain=MICROSOFT, q_num_heads=H, kv_num_heads=H)
    assert reason in only_reason(raised(g.model([y]))[1])
