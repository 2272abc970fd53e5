"""The proof is honest: wrong claims are caught, mutated graphs are followed, nothing leaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from masked_attention import (
    Kind,
    Lengths,
    MaskBuilder,
    assert_follows_graph,
    attention_model,
    only_reason,
    only_site,
    raised,
    random_feeds,
)
from onnx_graphs import BOOL, FLOAT, Graph, Runner, inferred
from subquad.passes import raise_attention as module
from subquad.passes.recognise import bias
from subquad.passes.recognise.candidates import Candidate
from subquad.passes.recognise.find import find_candidates
from subquad.passes.recognise.mask import DerivedMask, derive_mask
from subquad.passes.recognise.probe import relative_distance

# --- wrong claims --------------------------------------------------------------------------


def grouped_model() -> ir.Model:
    g = Graph()
    q = g.input("q", FLOAT, ["batch", 4, "length", 6])
    k, v = (g.input(name, FLOAT, ["batch", 2, "length", 6]) for name in "kv")
    return g.model([g("Attention", q, k, v, scale=0.3, is_causal=1)])


def claims(monkeypatch: pytest.MonkeyPatch, change: Callable[[Candidate], Candidate]) -> None:
    """Let the recogniser read ``change`` of what is there."""

    def wrong(*args: Any) -> list[Any]:
        return [
            change(found) if isinstance(found, Candidate) else found
            for found in find_candidates(*args)
        ]

    monkeypatch.setattr(module, "find_candidates", wrong)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, scale=c.scale * 1.01),
        lambda c: replace(c, scale=c.scale * 1.0003),
        lambda c: replace(c, softcap=50.0),
        lambda c: replace(c, key=c.value, value=c.key),
    ],
    ids=["scale 1 %", "scale 0.03 %", "softcap", "key and value swapped"],
)
def test_wrong_claim_is_caught(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Candidate], Candidate]
) -> None:
    claims(monkeypatch, change)
    assert "the raised node differs from the source" in only_reason(raised(grouped_model())[1])


@pytest.mark.parametrize(("true", "claimed"), [(50.0, 0.0), (50.0, 49.0), (50.0, 51.0), (3.0, 3.1)])
def test_wrong_softcap_is_caught(
    monkeypatch: pytest.MonkeyPatch, true: float, claimed: float
) -> None:
    claims(monkeypatch, lambda c: replace(c, softcap=claimed))
    # A decomposed source: its order of softcap and mask is not the runtime's to choose.
    g = Graph()
    q, k, v = (g.input(name, FLOAT, ["batch", 2, "length", 6]) for name in "qkv")
    scores = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), 0.3)
    capped = g("Mul", g("Tanh", g("Div", scores, true)), true)
    model = g.model([g("MatMul", g("Softmax", capped, axis=-1), v)])
    assert "the raised node differs from the source" in only_reason(raised(model)[1])


def first_input(value: ir.Value) -> ir.Value:
    node = value.producer()
    assert node is not None and node.inputs[0] is not None
    return node.inputs[0]


def test_wrong_grouping_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads taken from the source of an interleaved repetition."""

    def ungrouped(candidate: Candidate) -> Candidate:
        before = [replace(o, value=first_input(o.value)) for o in (candidate.key, candidate.value)]
        sizes = replace(candidate.sizes, num_kv_heads=2)
        return replace(candidate, key=before[0], value=before[1], sizes=sizes)

    g = Graph()
    q = g.input("q", FLOAT, ["batch", 4, "length", 6])
    k, v = (
        g("Gather", g.input(name, FLOAT, ["batch", 2, "length", 6]), [0, 1, 0, 1], axis=1)
        for name in "kv"
    )
    model = g.model([g("Attention", q, k, v)])
    assert only_site(raised(model)[1]).num_kv_heads == 4
    claims(monkeypatch, ungrouped)
    assert "the raised node differs from the source" in only_reason(raised(model)[1])


@pytest.mark.parametrize(
    "change", [{"window_left": 6}, {"window_left": 4}, {"window_right": 1}, {"alignment": "start"}]
)
def test_wrong_mask_is_caught(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    def wrong(*args: Any, **options: Any) -> DerivedMask:
        derived = derive_mask(*args, **options)
        return replace(derived, predicate=replace(derived.predicate, **change))

    monkeypatch.setattr(bias, "derive_mask", wrong)
    model = attention_model(windowed(), kv_dim="total")
    assert "the mask of the graph differs from the derived one" in only_reason(raised(model)[1])


# --- mutants -------------------------------------------------------------------------------


def windowed(
    *,
    less: str = "LessOrEqual",
    inside: str = "Less",
    left: int = 6,
    join: str = "And",
    swap: bool = False,
    shift: int = 0,
    row_axis: int = 1,
    start: str = "end",
    step: int = 1,
    with_padding: bool = False,
    negate: bool = False,
) -> MaskBuilder:
    """A causal window at the end of the keys, and what one wrong step makes of it."""

    def build(g: Graph, n: Lengths) -> str:
        offset = g("Sub", n.kv_len, n.query_len) if start == "end" else g.const(0, np.int64)
        slots = g("Range", offset, g("Add", offset, n.query_len), g.const(1, np.int64))
        if step != 1:
            slots = g("Mul", slots, step)
        rows = g("Unsqueeze", slots, [row_axis])
        columns = g("Unsqueeze", g.arange(n.kv_len), [1 - row_axis])
        if shift:
            columns = g("Add", columns, shift)
        causal = g(less, *((rows, columns) if swap else (columns, rows)))
        mask = g(join, causal, g(inside, g("Sub", rows, columns), left))
        if with_padding:
            mask = g("And", mask, g("Unsqueeze", g("Cast", n.padding, to=BOOL), [1, 2]))
        return g("Not", mask) if negate else mask

    return build


MUTANTS: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, "causal, window 6"),
    "padding": ({"with_padding": True}, "causal, window 6, key padding"),
    "window + 1": ({"left": 7}, "causal, window 7"),
    "window - 1": ({"left": 5}, "causal, window 5"),
    "< to <=": ({"inside": "LessOrEqual"}, "causal, window 7"),
    "<= to <": ({"less": "Less"}, "own position"),
    "operands swapped": ({"swap": True}, "band -0..+inf"),
    "and to or": ({"join": "Or"}, "full"),
    "and to xor": ({"join": "Xor"}, "no conjunction"),
    "inverted": ({"negate": True}, "no conjunction"),
    "keys one on": ({"shift": 1}, "own position"),
    "keys one back": ({"shift": -1}, "band -4..+1"),
    "start": ({"start": "start"}, "causal, window 6"),
    "twice the step": ({"step": 2}, "not a distance of positions"),
    "to >=": ({"less": "GreaterOrEqual"}, "band -0..+inf"),
    "window >": ({"inside": "Greater"}, "own position"),
    "window 1": ({"left": 1}, "causal, window 1"),
    "window 0": ({"left": 0}, "hides every key"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_followed_or_declined(name: str) -> None:
    options, expected = MUTANTS[name]
    model = attention_model(windowed(**options), kv_dim="total")
    copy, result = raised(model)
    if only_site(result).biases:
        assert expected in only_reason(result)
    else:
        assert only_site(result).mask.describe() == expected
    assert_follows_graph(model, copy, "visible", ((1, 1), (5, 12), (57, 60), (210, 390)))


@pytest.mark.parametrize("name", ["as it is", "window + 1", "< to <=", "keys one back", "to >="])
def test_mutant_through_an_attention_node(name: str) -> None:
    model = attention_model(windowed(**MUTANTS[name][0]), kind="bool")
    copy, result = raised(model)
    assert len(result.sites) == 1
    assert_follows_graph(model, copy, "bool", ((1, 1), (57, 57), (390, 390)))


def transposed_mask(g: Graph, n: Lengths) -> str:
    return g("Transpose", windowed()(g, n), perm=[1, 0])


def test_transposed_mask_looks_ahead() -> None:
    model = attention_model(transposed_mask)
    copy, result = raised(model)
    mask = only_site(result).mask
    assert (mask.window_left, mask.window_right) == (0, 5)
    assert_follows_graph(model, copy, "visible", ((1, 1), (57, 57), (300, 300)))


# --- what may not be seen does not matter ----------------------------------------------------


@pytest.mark.parametrize("kind", ["visible", "bool"])
def test_hidden_keys_move_nothing(kind: Kind) -> None:
    """Changing padding, later keys and keys behind the window leaves results equal to the bit."""
    left, length = 6, 70
    copy, result = raised(attention_model(windowed(left=left, with_padding=True), kind=kind))
    assert only_site(result).mask.describe() == "causal, window 6, key padding"
    ours = Runner(copy)
    feeds = random_feeds(np.random.default_rng(1), 4, length, length)
    before = ours(feeds)[0]
    for changed in (0, 13, 50):
        other = {name: array.copy() for name, array in feeds.items()}
        other["k"][:, :, changed] = 1e3
        other["v"][:, :, changed] = -1e3
        after = ours(other)[0]
        distance = np.arange(length) - changed
        sees = (distance >= 0) & (distance < left)
        assert np.array_equal(before[:, :, ~sees], after[:, :, ~sees])
        real = feeds["padding"][:, changed].astype(bool)
        assert np.array_equal(before[~real], after[~real])
        assert not np.array_equal(before[real][:, :, sees], after[real][:, :, sees])


# --- structure -----------------------------------------------------------------------------


def text(source: str) -> ir.Model:
    return inferred(ir.from_onnx_text(source))


def structure(model: ir.Model) -> list[str]:
    return [
        f"{n.op_type}({', '.join(v.name or '' if v else '-' for v in n.inputs)})"
        for n in model.graph
    ]


def test_structure_of_a_decomposed_attention() -> None:
    """Before: five nodes and a mask. After: one node on the same operands."""
    model = text(
        """
        <ir_version: 10, opset_import: ["": 24]>
        g (float[batch, 2, length, 8] q, float[batch, 2, length, 8] k,
           float[batch, 2, length, 8] v, bool[batch, length] real) => (float[batch, 2, length, 8] y)
        <int64[2] axes = {1, 2}, float scale = {0.5}, float low = {-1000000000.0}>
        {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            product = MatMul(q, kt)
            scaled = Mul(product, scale)
            seen = Unsqueeze(real, axes)
            masked = Where(seen, scaled, low)
            weights = Softmax <axis = -1> (masked)
            y = MatMul(weights, v)
        }
        """
    )
    result = module.raise_attention(model)
    assert structure(model) == ["Attention(q, k, v, real)"]
    site = only_site(result)
    (node,) = model.graph
    assert (node.domain, node.name, node.overload) == (
        "ai.subquad",
        site.name,
        "h2kv2d8v8_s0p5_mask",
    )
    assert [v.name for v in model.graph.outputs] == ["y"] and site.output == "y"
    assert list(model.functions) == [("ai.subquad", "Attention", "h2kv2d8v8_s0p5_mask")]


def test_structure_with_positions_shared_by_two_sites() -> None:
    """Positions are computed once; the second site reads the first one's result."""
    model = text(
        """
        <ir_version: 10, opset_import: ["": 24]>
        g (float[batch, 2, length, 8] x) => (float[batch, 2, length, 8] y)
        {
            first = Attention <is_causal = 1> (x, x, x)
            y = Attention <is_causal = 1> (first, first, x)
        }
        """
    )
    result = module.raise_attention(model)
    assert [s.source_output for s in result.sites] == ["first", "y"]
    nodes = structure(model)
    assert [n for n in nodes if n.startswith("Attention")] == [
        nodes[-2],
        nodes[-1],
    ]
    first, second = (
        [None if v is None else v.name for v in node.inputs] for node in list(model.graph)[-2:]
    )
    assert first[:3] == ["x", "x", "x"] and second[:3] == ["first", "first", "x"]
    assert first[3:] == second[3:]
    assert len(result.rejections) == 0


def test_structure_of_a_rejected_attention_is_untouched() -> None:
    source = """
        <ir_version: 10, opset_import: ["": 24]>
        g (float[batch, 2, length, 8] q)
        => (float[batch, 2, length, 8] y, float[batch, 2, length, 8] k)
        {
            y, k = Attention(q, q, q)
        }
    """
    model = text(source)
    assert "further outputs of Attention are used: k" in only_reason(module.raise_attention(model))
    assert structure(model) == ["Attention(q, q, q)"] and not model.functions


# --- cost ----------------------------------------------------------------------------------


def test_equal_layers_share_the_raised_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source subgraph is probed; the node to compare with is built once."""
    from subquad.passes.recognise import subgraph

    opened: list[str] = []
    original = subgraph.Piece.__init__

    def counting(self: Any, source: Any, inputs: Any, outputs: Any) -> None:
        opened.append(outputs[0].name)
        original(self, source, inputs, outputs)

    monkeypatch.setattr(subgraph.Piece, "__init__", counting)
    g = Graph()
    x = g.input("x", FLOAT, ["batch", 2, "length", 6])
    for _ in range(6):
        scores = g("MatMul", x, g("Transpose", x, perm=[0, 1, 3, 2]))
        x = g("MatMul", g("Softmax", scores, axis=-1), x)
    model = g.model([x])
    result = module.raise_attention(model)
    assert len(result.sites) == 6
    assert len(opened) == 7


def test_a_distance_from_zeros_is_no_agreement() -> None:
    zeros = np.zeros(3)
    assert relative_distance(zeros, zeros) == 0.0
    assert relative_distance(zeros, np.ones(3)) == math.inf
    assert relative_distance(np.ones(4), np.full(4, 1.01)) == pytest.approx(0.01)
