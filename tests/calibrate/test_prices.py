from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.costs import CostCurve, CostPoint, CostTable, bucket_of, owner_here
from subquad.passes.prices import (
    Shape,
    band_keys,
    cheapest_length,
    choose_prices,
    counted_flops,
    counted_memory,
)
from subquad.runtime.errors import Rejection, UsageError

CAUSAL = AttentionVariant(4, 2, 8, 6, 0.5, window_right=0)
FULL = AttentionVariant(4, 2, 8, 6, 0.5)
WINDOW = HybridVariant(4, 2, 8, 6, 0.5, window_left=15, window_right=0, sinks=4, allowed_right=0)
LINEAR = HybridVariant(4, 2, 8, 6, 0.5, allowed_right=0, feature_map="elu")


@pytest.mark.parametrize("length", [1, 2, 17, 64])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (5, 0), (5, 3), (100, 0), (0, 0)])
def test_band_keys_counts_pairs(length: int, left: int, right: int) -> None:
    pairs = sum(
        (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
        for i in range(length)
        for j in range(length)
    )
    assert band_keys(length, left, right) == pytest.approx(pairs / length)


def test_flops_of_exact_attention() -> None:
    flops = counted_flops()
    assert flops.price([FULL], Shape(3, 10)) == 2 * 3 * 10 * 10 * 4 * (8 + 6)
    assert flops.price([CAUSAL], Shape(1, 10)) == 2 * 55 * 4 * (8 + 6)


def test_a_window_grows_with_the_length_and_not_its_square() -> None:
    flops = counted_flops()

    def price(variant: object, length: int) -> float:
        found = flops.price([variant], Shape(1, length))  # type: ignore[list-item]
        assert not isinstance(found, Rejection)
        return found

    for variant in (WINDOW, LINEAR):
        assert price(variant, 8192) == pytest.approx(2 * price(variant, 4096), rel=0.01)
        assert price(variant, 8192) < 0.05 * price(CAUSAL, 8192)
    assert price(WINDOW, 10) == price(CAUSAL, 10)


@pytest.mark.parametrize("length", [1, 3, 40])
@pytest.mark.parametrize("left", [0, 5, 100])
def test_sinks_beyond_the_window_are_counted(length: int, left: int) -> None:
    variant = HybridVariant(
        4, 2, 8, 6, 0.5, window_left=left, window_right=0, sinks=3, allowed_right=0
    )
    pairs = sum(
        0 <= i - j <= left or j < 3 for i in range(length) for j in range(min(i + 1, length))
    )
    assert counted_flops().price([variant], Shape(1, length)) == pytest.approx(
        2 * pairs * 4 * (8 + 6)
    )


def test_memory_is_what_decoding_keeps() -> None:
    memory = counted_memory()
    per_key = 4 * 2 * (8 + 6)
    assert memory.price([CAUSAL], Shape(1, 1000)) == 1000 * per_key
    assert memory.price([WINDOW], Shape(1, 1000)) == (16 + 4) * per_key
    assert memory.price([WINDOW], Shape(1, 7)) == 7 * per_key
    assert memory.price([LINEAR], Shape(2, 10)) == memory.price([LINEAR], Shape(2, 10**6))


def test_block_sparse_costs_what_it_keeps_and_its_selection() -> None:
    sparse = BlockSparseVariant(4, 2, 8, 6, 0.5, 64, window_right=0)
    select = BlockSelectVariant(4, 2, 8, 0.5, 64, window_right=0)
    flops = counted_flops()
    dense = flops.price([CAUSAL], Shape(2, 4096))
    assert not isinstance(dense, Rejection)
    assert flops.price([sparse], Shape(2, 4096, 0.25)) == pytest.approx(dense / 4)
    selection = flops.price([select], Shape(2, 4096))
    assert not isinstance(selection, Rejection)
    # Products of 64 x 65 / 2 pairs of blocks, and means of all queries and keys.
    assert selection == 2 * 8 * (4096 * (4 + 2) + 2 * 64 * 65 / 2 * 4)
    assert counted_memory().price([select, sparse], Shape(1, 100)) == counted_memory().price(
        [CAUSAL], Shape(1, 100)
    )


def test_an_unknown_operator_has_no_price() -> None:
    class Unknown:
        op_type = "Mystery"

    found = counted_flops().price([Unknown()], Shape(1, 10))  # type: ignore[list-item]
    assert isinstance(found, Rejection) and "Mystery" in found.reason


def test_crossover() -> None:
    lengths = (64, 128, 256, 512)
    assert cheapest_length(lambda n: 200.0 * n, lambda n: float(n * n), lengths) == 256
    assert cheapest_length(lambda n: 1e9, lambda n: float(n * n), lengths) is None


def test_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    assert choose_prices("memory", None).unit == "bytes"
    assert "no costs were measured" in choose_prices("latency", None).source
    with pytest.raises(UsageError, match="latency, memory, flops"):
        choose_prices("speed", None)  # type: ignore[arg-type]


def test_latency_is_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    points = [CostPoint(2, n, n, 1.0, 0, 1e-6 * n**2, 0.0, None) for n in (64, 256)]
    curve = CostCurve("Attention", bucket_of(CAUSAL), "function", 2, tuple(points))
    fast = tuple(replace(point, seconds=point.seconds / 4) for point in points)
    kernel = CostCurve("Attention", bucket_of(CAUSAL), "kernel", 2, fast)
    CostTable(owner_here(), (curve, kernel)).save()
    prices = choose_prices("latency", 2, [CAUSAL])
    assert prices.unit == "seconds" and "2 threads" in prices.source
    assert prices.price([CAUSAL, CAUSAL], Shape(1, 128)) == pytest.approx(2e-6 * 128**2)
    with_kernels = choose_prices("latency", 2, [CAUSAL], kernels=True)
    assert with_kernels.price([CAUSAL], Shape(1, 128)) == pytest.approx(0.25e-6 * 128**2)
    unknown = prices.price([CAUSAL, LINEAR], Shape(1, 128))
    assert isinstance(unknown, Rejection) and "HybridAttention" in unknown.reason
    # Nothing in a plan could be compared with attentions that have no price.
    for exact, threads in (([LINEAR], 2), ([CAUSAL], 1)):
        assert "the cost table" in choose_prices("latency", threads, exact).source


def test_heads_of_their_own_are_priced_one_by_one() -> None:
    """Two dense heads, one with a window, one linear: a part of each price."""
    parts = ((-1, -1, 0, 0), (-1, -1, 0, 0), (15, 0, 4, 0), (-1, -1, 0, 1))
    mixed = replace(LINEAR, head_parts=parts)
    shape = Shape(2, 300)
    flops = counted_flops()

    def quarter(variant: AttentionVariant | HybridVariant) -> float:
        found = flops.price([variant], shape)
        assert not isinstance(found, Rejection)
        return found / 4

    want = 2 * quarter(CAUSAL) + quarter(WINDOW) + quarter(LINEAR)
    assert flops.price([mixed], shape) == pytest.approx(want)
    # The dense heads read the first key/value head, the others the second.
    cache = 4 * (8 + 6)
    state = 4 * 8 * (6 + 1)
    assert counted_memory().price([mixed], shape) == 2 * (300 * cache + 20 * cache + state)
