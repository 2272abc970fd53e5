"""What masks mean: every accepted kind by its predicate and its numbers, near misses by reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from masked_attention import (
    Kind,
    Lengths,
    MaskBuilder,
    assert_follows_graph,
    attention_model,
    only_reason,
    only_site,
    oracle,
    raised,
    random_feeds,
    seen_by_source,
)
from onnx_graphs import BOOL, FLOAT, INT32, INT64, Graph, Runner

FLOAT_MIN = float(np.finfo(np.float32).min)
LONG = ((1, 1), (2, 2), (40, 40), (203, 203))


def key_slots(g: Graph, n: Lengths) -> str:
    return g("Unsqueeze", g.arange(n.kv_len), [0])


def query_slots(g: Graph, n: Lengths, start: str | None = None) -> str:
    """Rows; from ``start`` on (0 by default)."""
    if start is None:
        return g("Unsqueeze", g.arange(n.query_len), [1])
    return g("Unsqueeze", g.arange(g("Add", start, n.query_len), start), [1])


def at_end(g: Graph, n: Lengths) -> str:
    return query_slots(g, n, g("Sub", n.kv_len, n.query_len))


def causal(g: Graph, n: Lengths) -> str:
    return g("LessOrEqual", key_slots(g, n), query_slots(g, n))


def causal_at_end(g: Graph, n: Lengths) -> str:
    return g("LessOrEqual", key_slots(g, n), at_end(g, n))


def real(g: Graph, n: Lengths) -> str:
    return g("Unsqueeze", g("Cast", n.padding, to=BOOL), [1, 2])


def everything(g: Graph, n: Lengths) -> str:
    shape = g("Concat", *(g("Unsqueeze", x, [0]) for x in (n.query_len, n.kv_len)), axis=0)
    return g("Expand", g.const([[True]]), shape)


def real_rows(g: Graph, n: Lengths) -> str:
    """An Attention node wants a row for each query."""
    row = g("Expand", g.const([True]), g("Unsqueeze", n.query_len, [0]))
    return g("And", real(g, n), g("Unsqueeze", row, [1]))


def flattened(g: Graph, n: Lengths) -> str:
    """TorchScript reads ``mask[b, j]`` as row ``b * length + j`` of a flat view."""
    flat = g("Flatten", g("Cast", n.padding, to=BOOL), axis=2)
    rows = g("Unsqueeze", g.arange(n.batch), [1, 2, 3])
    columns = g("Unsqueeze", g.arange(n.kv_len), [0, 1, 2])
    at = g("Add", columns, g("Mul", rows, n.kv_len))
    picked = g("Reshape", g("Gather", flat, at, axis=0), [-1])
    return g("Reshape", picked, g("Shape", at))


def causal_real(g: Graph, n: Lengths) -> str:
    return g("And", causal(g, n), real(g, n))


def causal_real_at_end(g: Graph, n: Lengths) -> str:
    return g("And", causal_at_end(g, n), real(g, n))


def causal_real_flat(g: Graph, n: Lengths) -> str:
    """Padding read through one flat index, as TorchScript exports an index by two tensors."""
    rows = g("Mul", g("Unsqueeze", g.arange(n.batch), [1]), n.kv_len)
    index = g("Reshape", g("Add", rows, key_slots(g, n)), [-1])
    flat = g("Gather", g("Reshape", n.padding, [-1]), index)
    batch, kv_len = (g("Unsqueeze", x, [0]) for x in (n.batch, n.kv_len))
    back = g("Reshape", flat, g("Concat", batch, [1, 1], kv_len, axis=0))
    return g("And", causal_at_end(g, n), g("Cast", back, to=BOOL))


def double_negation(g: Graph, n: Lengths) -> str:
    return g("Not", g("Not", causal_real(g, n)))


def de_morgan(g: Graph, n: Lengths) -> str:
    later = g("Greater", key_slots(g, n), query_slots(g, n))
    return g("Not", g("Or", later, g("Not", real(g, n))))


def window(g: Graph, n: Lengths, left: int = 5) -> str:
    distance = g("Sub", query_slots(g, n), key_slots(g, n))
    return g("And", causal(g, n), g("Less", distance, left))


def band(g: Graph, n: Lengths) -> str:
    distance = g("Sub", query_slots(g, n), key_slots(g, n))
    return g("LessOrEqual", g("Abs", distance), 3)


def uneven_band(g: Graph, n: Lengths) -> str:
    distance = g("Sub", query_slots(g, n), key_slots(g, n))
    inside = g("And", g("LessOrEqual", distance, 7), g("GreaterOrEqual", distance, -2))
    return g("And", inside, real(g, n))


def float_positions(g: Graph, n: Lengths) -> str:
    rows, columns = (g("Cast", f(g, n), to=FLOAT) for f in (query_slots, key_slots))
    return g("GreaterOrEqual", g("Add", g("Sub", rows, columns), 0.5), 0.0)


def gathered(g: Graph, n: Lengths) -> str:
    """Transformers' vmap over index functions: the padding read by GatherND."""
    batch = g("Unsqueeze", g.arange(n.batch), [1, 2, 3, 4])
    column = g("Unsqueeze", g.arange(n.kv_len), [0, 1, 2, 4])
    one = g.const([1], np.int64)
    sizes = [g("Unsqueeze", x, [0]) for x in (n.batch, n.kv_len)]
    shape = g("Concat", sizes[0], one, one, sizes[1], one, axis=0)
    index = g("Concat", g("Expand", batch, shape), g("Expand", column, shape), axis=-1)
    return g("And", causal(g, n), g("GatherND", g("Cast", n.padding, to=BOOL), index))


def gpt2_buffer(g: Graph, n: Lengths) -> str:
    buffer = np.tril(np.ones((1, 1, 300, 300), bool))
    past = g("Unsqueeze", g("Sub", n.kv_len, n.query_len), [0])
    end = g("Unsqueeze", n.kv_len, [0])
    rows = g("Slice", buffer, past, end, [2])
    return g("Slice", rows, [0], end, [3])


def gpt2_bytes(g: Graph, n: Lengths) -> str:
    buffer = np.tril(np.ones((1, 1, 300, 300), np.uint8))
    end = g("Unsqueeze", n.kv_len, [0])
    rows = g("Slice", g("Slice", buffer, [0], end, [2]), [0], end, [3])
    return g("Cast", rows, to=BOOL)


def additive_buffer(g: Graph, n: Lengths) -> str:
    buffer = np.triu(np.full((300, 300), -np.inf, np.float32), 1)
    end = g("Unsqueeze", n.kv_len, [0])
    return g("Slice", buffer, [0, 0], g("Concat", end, end, axis=0), [0, 1])


def window_buffer(g: Graph, n: Lengths) -> str:
    """GPT-Neo's local attention: a table with two diagonals."""
    buffer = np.tril(np.ones((300, 300), bool)) ^ np.tril(np.ones((300, 300), bool), -8)
    end = g("Unsqueeze", n.kv_len, [0])
    return g("Slice", buffer, [0, 0], g("Concat", end, end, axis=0), [0, 1])


def trilu(g: Graph, n: Lengths) -> str:
    return g("Trilu", everything(g, n), g.const(0, np.int64), upper=0)


def additive_trilu(g: Graph, n: Lengths) -> str:
    full = g("Where", everything(g, n), FLOAT_MIN, 0.0)
    return g("Trilu", full, g.const(1, np.int64), upper=1)


def additive_where(g: Graph, n: Lengths) -> str:
    return g("Where", causal_real(g, n), 0.0, FLOAT_MIN)


def bert(g: Graph, n: Lengths, step: float = -1e4) -> str:
    inverted = g("Sub", 1.0, g("Cast", g("Unsqueeze", n.padding, [1, 2]), to=FLOAT))
    return g("Mul", inverted, step)


def bert_min(g: Graph, n: Lengths) -> str:
    return bert(g, n, FLOAT_MIN)


def equals_zero(g: Graph, n: Lengths) -> str:
    """Hidden where the padding input is 0."""
    return g("Unsqueeze", g("Equal", n.padding, g.const(0, np.int64)), [1, 2])


def equals_one(g: Graph, n: Lengths) -> str:
    return g("Unsqueeze", g("Equal", n.padding, g.const(1, np.int64)), [1, 2])


def flipped_min(g: Graph, n: Lengths) -> str:
    """A causal mask as the minimum of positions, compared with itself."""
    least = g("Min", query_slots(g, n), key_slots(g, n))
    return g("Equal", least, key_slots(g, n))


def rank_one(g: Graph, n: Lengths) -> str:
    shape = g("Unsqueeze", n.kv_len, [0])
    return g("Expand", g.const([True]), shape)


ACCEPTED: list[tuple[MaskBuilder, Kind, str]] = [
    (everything, "visible", "full"),
    (rank_one, "visible", "full"),
    (real, "visible", "full, key padding"),
    (real_rows, "bool", "full, key padding"),
    (flattened, "visible", "full, key padding"),
    (causal, "visible", "causal"),
    (causal, "bool", "causal"),
    (causal_at_end, "visible", "causal"),
    (causal_real, "visible", "causal, key padding"),
    (double_negation, "bool", "causal, key padding"),
    (de_morgan, "visible", "causal, key padding"),
    (window, "visible", "causal, window 5"),
    (band, "visible", "band -3..+3"),
    (uneven_band, "bool", "band -7..+2, key padding"),
    (float_positions, "visible", "causal"),
    (gathered, "bool", "causal, key padding"),
    (gpt2_buffer, "visible", "causal"),
    (gpt2_bytes, "visible", "causal"),
    (additive_buffer, "additive", "causal"),
    (additive_buffer, "float", "causal"),
    (window_buffer, "visible", "causal, window 8"),
    (trilu, "bool", "causal"),
    (additive_trilu, "additive", "causal"),
    (additive_where, "additive", "causal, key padding"),
    (additive_where, "float", "causal, key padding"),
    (bert, "additive", "full, key padding"),
    (bert_min, "additive", "full, key padding"),
    (equals_zero, "hidden", "full, key padding"),
    (equals_one, "visible", "full, key padding"),
    (flipped_min, "visible", "causal"),
]


@pytest.mark.parametrize(("build", "kind", "meaning"), ACCEPTED)
def test_mask_is_derived(build: MaskBuilder, kind: Kind, meaning: str) -> None:
    model = attention_model(build, kind=kind)
    copy, result = raised(model)
    site = only_site(result)
    assert site.mask.describe() == meaning
    assert site.proof.mask_probes >= 4 and site.proof.node_probes >= 4
    assert site.is_self
    assert_follows_graph(model, copy, kind, LONG)


def test_derivation_reads_as_a_sentence() -> None:
    _, result = raised(attention_model(causal_real))
    assert only_site(result).proof.mask == (
        "causal, key padding: visible where i >= j and padding[b, j] is nonzero, at every length"
    )


def test_no_mask_is_full() -> None:
    model = attention_model(None)
    copy, result = raised(model)
    assert only_site(result).mask.describe() == "full"
    assert_follows_graph(model, copy, "bool", LONG)


@pytest.mark.parametrize(
    ("build", "meaning"), [(None, "causal"), (real_rows, "causal, key padding")]
)
def test_causal_attribute_joins_the_mask(build: MaskBuilder | None, meaning: str) -> None:
    model = attention_model(build, kind="bool", is_causal=1)
    copy, result = raised(model)
    assert only_site(result).mask.describe() == meaning
    assert_follows_graph(model, copy, "bool", LONG, is_causal=True)


# --- queries and keys of different lengths ---------------------------------------------------

DECODE = ((1, 1), (1, 9), (4, 30), (7, 210))


@pytest.mark.parametrize(
    ("build", "query_dim", "kv_dim", "alignment"),
    [
        (causal_at_end, "length", "total", "end"),
        (causal_at_end, "length", "past + length", "end"),
        (causal_real_at_end, "length", "past + length", "end"),
        (causal_real_flat, "length", "past + length", "end"),
        (gpt2_buffer, "length", "past + length", "end"),
        (causal, "length", "total", "start"),
    ],
)
def test_offset(build: MaskBuilder, query_dim: str, kv_dim: str, alignment: str) -> None:
    model = attention_model(build, query_dim=query_dim, kv_dim=kv_dim)
    copy, result = raised(model)
    site = only_site(result)
    assert site.mask.is_causal and site.mask.alignment == alignment and not site.is_self
    assert_follows_graph(model, copy, "visible", DECODE)


def test_cross_attention_with_padding() -> None:
    model = attention_model(real, query_dim="length", kv_dim="source_length")
    copy, result = raised(model)
    site = only_site(result)
    assert site.mask.describe() == "full, key padding" and not site.is_self
    assert_follows_graph(model, copy, "visible", ((3, 9), (30, 4)))


def test_one_query_sees_its_window() -> None:
    def build(g: Graph, n: Lengths) -> str:
        first = g("Sub", n.kv_len, g.const(6, np.int64))
        return g("GreaterOrEqual", key_slots(g, n), first)

    model = attention_model(build, query_dim=1, kv_dim="total")
    copy, result = raised(model)
    assert only_site(result).mask.window_left == 5
    assert_follows_graph(model, copy, "visible", ((1, 1), (1, 6), (1, 40)))


def test_fixed_sizes_read_as_causal_at_the_end() -> None:
    table = np.tril(np.ones((4, 9), bool), 5)
    model = attention_model(lambda g, n: g.const(table), query_dim=4, kv_dim=9)
    copy, result = raised(model)
    assert only_site(result).mask.is_causal and only_site(result).mask.alignment == "end"
    assert_follows_graph(model, copy, "visible", ((4, 9),))


@pytest.mark.parametrize(("dtype", "numpy"), [(BOOL, bool), (INT32, np.int32), (FLOAT, np.float32)])
def test_padding_input_of_any_type(dtype: int, numpy: type) -> None:
    model = attention_model(causal_real, padding_type=dtype)
    copy, result = raised(model)
    assert only_site(result).mask.key_padding
    assert_follows_graph(model, copy, "visible", LONG[:3], padding_type=numpy)


def test_padding_test_for_one_is_kept() -> None:
    """A graph that compares with 1 hides keys marked 2; one that casts to bool does not."""

    def positive(g: Graph, n: Lengths) -> str:
        return g("Unsqueeze", g("Greater", n.padding, g.const(0, np.int64)), [1, 2])

    for build in (equals_one, real, equals_zero, positive):
        kind: Kind = "hidden" if build is equals_zero else "visible"
        model = attention_model(build, kind=kind)
        copy, result = raised(model)
        assert only_site(result).mask.key_padding
        feeds = random_feeds(np.random.default_rng(0), 3, 11, 11)
        feeds["padding"] *= np.arange(11) % 4 - 1
        want = oracle(feeds, seen_by_source(Runner(model), feeds, kind))
        assert np.linalg.norm(Runner(copy)(feeds)[0] - want) <= 1e-5 * np.linalg.norm(want)


# --- near misses ---------------------------------------------------------------------------


def prefix_lm(g: Graph, n: Lengths) -> str:
    return g("Or", causal(g, n), g("Less", key_slots(g, n), g.const(4, np.int64)))


def prefix_input(g: Graph, n: Lengths) -> str:
    prefix = g("Cast", g("Unsqueeze", n.padding, [1, 2]), to=BOOL)
    return g("Or", causal(g, n), prefix)


def chunked(g: Graph, n: Lengths) -> str:
    rows, columns = (g("Div", f(g, n), 8) for f in (query_slots, key_slots))
    return g("And", causal(g, n), g("Equal", rows, columns))


def chunked_by_floor(g: Graph, n: Lengths) -> str:
    rows, columns = (
        g("Floor", g("Div", g("Cast", f(g, n), to=FLOAT), 8.0)) for f in (query_slots, key_slots)
    )
    return g("And", causal(g, n), g("Equal", rows, columns))


def squared_distance(g: Graph, n: Lengths) -> str:
    distance = g("Cast", g("Sub", key_slots(g, n), query_slots(g, n)), to=FLOAT)
    slopes = np.array([-0.01, -0.02], np.float32).reshape(2, 1, 1)
    return g("Where", causal(g, n), g("Mul", g("Mul", distance, distance), slopes), FLOAT_MIN)


def relative_bias(g: Graph, n: Lengths) -> str:
    """T5, with a linear bucket rule."""
    table = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)
    table = table**3
    distance = g("Sub", key_slots(g, n), query_slots(g, n))
    bucket = g("Min", g("Max", g("Add", distance, 8), g.const(0, np.int64)), g.const(15, np.int64))
    return g("Transpose", g("Gather", table, bucket), perm=[2, 0, 1])


def log_bias(g: Graph, n: Lengths) -> str:
    """T5's logarithmic buckets."""
    table = (np.arange(64, dtype=np.float32).reshape(32, 2) / 7) ** 2
    distance = g("Abs", g("Sub", key_slots(g, n), query_slots(g, n)))
    far = g("Log", g("Add", g("Cast", distance, to=FLOAT), 1.0))
    bucket = g("Min", g("Cast", g("Mul", far, 4.0), to=INT64), g.const(31, np.int64))
    return g("Transpose", g("Gather", table, bucket), perm=[2, 0, 1])


def segments(g: Graph, n: Lengths) -> str:
    rows, columns = (g("Unsqueeze", n.padding, axes) for axes in ([1, 3], [1, 2]))
    return g("Equal", rows, columns)


def padded_queries(g: Graph, n: Lengths) -> str:
    query = g("Unsqueeze", g("Cast", n.padding, to=BOOL), [1, 3])
    return g("And", real(g, n), query)


def two_windows(g: Graph, n: Lengths) -> str:
    distance = g("Sub", query_slots(g, n), key_slots(g, n))
    far = g("And", g("Greater", distance, 8), g("Less", distance, 12))
    return g("Or", window(g, n, 4), far)


def strided(g: Graph, n: Lengths) -> str:
    distance = g("Sub", query_slots(g, n), key_slots(g, n))
    return g("And", causal(g, n), g("Equal", g("Mod", distance, 3), 0))


def window_without_self(g: Graph, n: Lengths) -> str:
    return g("Less", key_slots(g, n), query_slots(g, n))


def half(g: Graph, n: Lengths) -> str:
    return g("Mul", g("Cast", real(g, n), to=FLOAT), 0.5)


def small_additive(g: Graph, n: Lengths) -> str:
    return bert(g, n, -100.0)


def nothing(g: Graph, n: Lengths) -> str:
    return g("Not", everything(g, n))


def inverted_padding(g: Graph, n: Lengths) -> str:
    return g("Not", real(g, n))


def checkerboard(g: Graph, n: Lengths) -> str:
    table = np.indices((300, 300)).sum(0) % 2 == 0
    end = g("Unsqueeze", n.kv_len, [0])
    return g("Slice", table, [0, 0], g("Concat", end, end, axis=0), [0, 1])


def bias_table(g: Graph, n: Lengths) -> str:
    table = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    end = g("Unsqueeze", n.kv_len, [0])
    return g("Slice", table, [0, 0], g("Concat", end, end, axis=0), [0, 1])


def activations(g: Graph, n: Lengths) -> str:
    total = g("ReduceSum", n.key, [1, 3], keepdims=0)
    return g("Unsqueeze", g("Greater", total, 0.0), [1, 2])


def shifted_padding(g: Graph, n: Lengths) -> str:
    end = g("Unsqueeze", n.kv_len, [0])
    last = g("Slice", n.padding, [-1], end, [1])
    shifted = g("Concat", g("Slice", n.padding, [1], end, [1]), last, axis=1)
    return g("Unsqueeze", g("Cast", shifted, to=BOOL), [1, 2])


def fixed_row(g: Graph, n: Lengths) -> str:
    first = g("Slice", n.padding, [0], [1], [0])
    return g("Unsqueeze", g("Cast", first, to=BOOL), [1, 2])


def cumulative(g: Graph, n: Lengths) -> str:
    positions = g("CumSum", n.padding, g.const(1, np.int64))
    return g("Unsqueeze", g("Greater", positions, g.const(0, np.int64)), [1, 2])


def pad_token(g: Graph, n: Lengths) -> str:
    """Token ids against a padding token: full, as long as ids are 0 and 1."""
    return g("Unsqueeze", g("Less", n.padding, g.const(50, np.int64)), [1, 2])


def two_pad_tokens(g: Graph, n: Lengths) -> str:
    ids = g("Unsqueeze", n.padding, [1, 2])
    hidden = (g("Equal", ids, g.const(token, np.int64)) for token in (0, 50))
    return g("Not", g("Or", *hidden))


def narrow_positions(g: Graph, n: Lengths) -> str:
    """Positions that wrap at 256: equal to causal at every short length."""
    rows, columns = (
        g("Cast", g("Cast", f(g, n), to=2), to=INT64) for f in (query_slots, key_slots)
    )
    return g("LessOrEqual", columns, rows)


def far_step(g: Graph, n: Lengths) -> str:
    """Causal only from a position on that no probe reaches."""
    early = g("Less", query_slots(g, n), g.const(5000, np.int64))
    return g("Or", early, causal(g, n))


def length_switch(g: Graph, n: Lengths) -> str:
    """Causal only in sequences that no probe is as long as."""
    return g("Or", causal(g, n), g("Greater", n.kv_len, g.const(6000, np.int64)))


NO_BAND: list[tuple[MaskBuilder, Kind, str]] = [
    (prefix_lm, "visible", "no conjunction of limits and padding"),
    (prefix_input, "visible", "no conjunction of limits and padding"),
    (chunked, "visible", "positions divided by 8: blocks, not a band"),
    (chunked_by_floor, "visible", "values depend on positions themselves"),
    (squared_distance, "additive", "values depend on positions themselves"),
    (squared_distance, "float", "values depend on positions themselves"),
    (relative_bias, "additive", "holds many values: a bias, not a mask"),
    (log_bias, "additive", "a table is read at values that are no positions"),
    (segments, "visible", "no conjunction of limits and padding"),
    (padded_queries, "visible", "padding[b, i], which is not a mask of keys"),
    (two_windows, "visible", "no conjunction of limits and padding"),
    (strided, "visible", "positions modulo 3: a strided or block pattern"),
    (window_without_self, "visible", "a query may not see its own position"),
    (half, "additive", "adds 0.5 to scores: a bias, not a mask"),
    (small_additive, "additive", "adds -100 to scores: a bias, not a mask"),
    (nothing, "visible", "the mask hides every key"),
    (inverted_padding, "visible", "keys are visible where padding[b, j] is zero"),
    (checkerboard, "visible", "a two-valued table, but not a band"),
    (bias_table, "additive", "holds many values: a bias, not a mask"),
    (activations, "visible", "operator ReduceSum is outside the mask language"),
    (
        shifted_padding,
        "visible",
        "no conjunction of limits and padding; it tests length >= j + 2; padding[b, j + 1]",
    ),
    (fixed_row, "visible", "padding[0, j], which is not a mask of keys"),
    (cumulative, "visible", "a running sum of padding"),
    (pad_token, "visible", "visibility depends on other values of padding[b, j] than 0 and 1"),
    (two_pad_tokens, "visible", "told apart by other values of padding[b, j] than 0 and 1"),
    (narrow_positions, "visible", "converted to uint8"),
    (far_step, "visible", "no conjunction of limits and padding"),
    (length_switch, "visible", "no conjunction of limits and padding"),
]


@pytest.mark.parametrize(("build", "kind", "reason"), NO_BAND)
def test_near_miss_is_handed_on_as_it_is(build: MaskBuilder, kind: Kind, reason: str) -> None:
    """No claim is made about it: the node gets the graph's own values, and why is said."""
    model = attention_model(build, kind=kind)
    copy, result = raised(model)
    assert reason in only_reason(result)
    site = only_site(result)
    assert (
        site.mask.describe() == ("causal" if build is squared_distance else "full")
        and site.score_bias
    )
    source, ours = Runner(model), Runner(copy)
    rng = np.random.default_rng(6)
    for length in (1, 5, 58, 211):
        feeds = random_feeds(rng, 4, length, length)
        seen = seen_by_source(source, feeds, kind).any(axis=3)
        want, got = source(feeds)[0][seen], ours(feeds)[0][seen]
        # float32 sums over at most some hundreds of keys
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


def test_four_axis_mask_input_is_no_padding() -> None:
    def extra(g: Graph) -> None:
        g.input("full_mask", BOOL, ["batch", 1, "length", "length"])

    model = attention_model(lambda g, n: g("Identity", "full_mask"), kind="bool", extra=extra)
    assert "full_mask[b, 0, i, j], which is not a mask of keys" in only_reason(raised(model)[1])


def test_two_padding_inputs() -> None:
    def extra(g: Graph) -> None:
        g.input("other", INT64, ["batch", "length"])

    def build(g: Graph, n: Lengths) -> str:
        return g("And", real(g, n), g("Unsqueeze", g("Cast", "other", to=BOOL), [1, 2]))

    model = attention_model(build, extra=extra)
    assert "two padding inputs: padding and other" in only_reason(raised(model)[1])


def test_token_ids_are_no_padding_mask() -> None:
    """Visible where the id is not 1: the input marks padding by a value, not by zero."""

    def build(g: Graph, n: Lengths) -> str:
        return g("Unsqueeze", g("Not", g("Equal", n.padding, g.const(1, np.int64))), [1, 2])

    assert "keys are visible where padding[b, j] is zero" in only_reason(
        raised(attention_model(build))[1]
    )


def test_padding_with_more_columns_than_keys() -> None:
    def build(g: Graph, n: Lengths) -> str:
        end = g("Unsqueeze", n.kv_len, [0])
        return g("Unsqueeze", g("Cast", g("Slice", n.padding, [0], end, [1]), to=BOOL), [1, 2])

    model = attention_model(build, padding_dims=("batch", "length + 1"))
    assert "columns for length keys" in only_reason(raised(model)[1])


def test_mask_narrower_than_the_keys() -> None:
    """ONNX Attention pads a shorter mask with minus infinity."""

    def build(g: Graph, n: Lengths) -> str:
        return g.const(np.ones((5, 7), bool))

    model = attention_model(build, kind="bool", query_dim=5, kv_dim=9)
    assert "a bias with 7 entries where the scores have 9" in only_reason(raised(model)[1])


def test_default_of_an_input_is_no_constant() -> None:
    """An initializer that is also an input can be replaced by the caller."""
    model = attention_model(causal, query_dim=40, kv_dim=40)
    table = np.tril(np.ones((1, 1, 40, 40), bool))
    value = ir_input(model, "table", table)
    node = next(n for n in model.graph if n.op_type == "Where")
    node.replace_input_with(0, value)
    assert "table[0, 0, i, j], which is not a mask of keys" in only_reason(raised(model)[1])


def ir_input(model: ir.Model, name: str, array: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    model.graph.inputs.append(value)
    model.graph.register_initializer(value)
    return value


def test_deep_and_shared_masks_end() -> None:
    """A mask nested beyond reason is declined, not a crash; sharing costs nothing."""

    def shared(g: Graph, n: Lengths) -> str:
        mask = causal_real(g, n)
        for _ in range(60):
            mask = g("And", mask, mask)
        return mask

    def deep(g: Graph, n: Lengths) -> str:
        mask = causal_real(g, n)
        for _ in range(900):
            mask = g("Xor", mask, g.const([[[[False]]]]))
        return mask

    assert only_site(raised(attention_model(shared))[1]).mask.is_causal
    reason = only_reason(raised(attention_model(deep))[1])
    assert "nested too deeply" in reason or "more than 600 nodes" in reason


def test_mask_measured_deep_in_the_model() -> None:
    """Sizes read from the scores of a late layer do not drag the model into the proof."""
    g = Graph()
    x = g.input("x", FLOAT, ["batch", 2, "length", 6])
    for _ in range(700):
        x = g("Neg", x)
    scores = g("MatMul", x, g("Transpose", x, perm=[0, 1, 3, 2]))
    slots = [g.arange(g.dim(scores, axis)) for axis in (2, 3)]
    later = g("Greater", g("Unsqueeze", slots[1], [0]), g("Unsqueeze", slots[0], [1]))
    masked = g("Where", later, -1e9, scores)
    model = g.model([g("MatMul", g("Softmax", masked, axis=-1), x)])
    assert only_site(raised(model)[1]).mask.describe() == "causal"


def test_sum_of_many_selections_ends() -> None:
    def build(g: Graph, n: Lengths) -> str:
        rows, columns = query_slots(g, n), key_slots(g, n)
        total = g("Sub", rows, columns)
        for step in range(20):
            chosen = g("Where", g("Less", columns, g.const(step, np.int64)), rows, columns)
            total = g("Add", total, chosen)
        return g("GreaterOrEqual", total, g.const(0, np.int64))

    assert "selection between more than" in only_reason(raised(attention_model(build))[1])
