"""The cost table: what it answers between, at and beyond measured points, and when it refuses."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.host.build import KernelBuild
from subquad.kernels.host.targets import host_targets
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes import cost_measurement
from subquad.passes.cost_measurement import (
    CostPlan,
    between,
    candidates_of,
    compare_tables,
    example_sites,
    measure_costs,
    spearman,
)
from subquad.passes.costs import (
    CostCurve,
    CostPoint,
    CostTable,
    RunsAs,
    bucket_of,
    default_path,
    owner_here,
    span_of,
)
from subquad.runtime.errors import IntegrityError, Rejection, UsageError

DENSE = AttentionVariant(4, 2, 8, 8, 0.3, window_right=0)
LINEAR = HybridVariant(4, 2, 8, 8, 0.3, allowed_right=0, feature_map="elu")


def point(length: int, seconds: float, **changes: Any) -> CostPoint:
    facts = {"rows": 2, "query_len": length, "kv_len": length, "density": 1.0, "span": 0}
    return CostPoint(**facts | {"seconds": seconds, "spread": 0.01, "bytes": 1 << 20} | changes)


def curve(
    points: Iterable[CostPoint], variant: Any = DENSE, runs_as: RunsAs = "kernel", threads: int = 1
) -> CostCurve:
    ordered = tuple(sorted(points, key=lambda p: p.place))
    return CostCurve(variant.op_type, bucket_of(variant), runs_as, threads, ordered)


def table(*curves: CostCurve) -> CostTable:
    return CostTable(owner_here(), curves)


def quadratic(length: float) -> float:
    return 1e-6 * length**2


TABLE = table(curve(point(n, quadratic(n)) for n in (64, 256, 1024)))


def at(length: int, costs: CostTable = TABLE, batch: int = 1, **options: Any) -> float | Rejection:
    return costs.time(DENSE, batch, length, length, 1, **options)


@pytest.mark.parametrize("length", [64, 100, 256, 1000, 1024])
def test_a_power_law_is_met_exactly(length: int) -> None:
    assert at(length) == pytest.approx(quadratic(length))


@pytest.mark.parametrize("length", [32, 2048])
def test_slopes_go_on_by_a_factor_of_two(length: int) -> None:
    assert at(length) == pytest.approx(quadratic(length))


@pytest.mark.parametrize("length", [31, 2049])
def test_beyond_that_it_refuses_and_says_what_to_do(length: int) -> None:
    answer = at(length)
    assert isinstance(answer, Rejection)
    assert "64 to 1024" in answer.reason and "subquad bench --costs" in answer.reason


def test_one_point_gives_no_slope() -> None:
    costs = table(curve([point(64, 1.0)]))
    assert at(64, costs) == 1.0
    assert isinstance(at(65, costs), Rejection)


def test_more_rows_cost_in_proportion_fewer_only_to_the_half() -> None:
    costs = table(curve([point(64, 1.0, rows=4), point(64, 1.5, rows=8)]))
    assert at(64, costs, batch=2) == 1.0  # 2 x 2 key/value heads
    assert at(64, costs, batch=3) == pytest.approx(1.5 ** np.log2(1.5))
    assert at(64, costs, batch=16) == pytest.approx(1.5 * 4)
    assert at(64, costs, batch=1) == pytest.approx(0.5)
    few = table(curve([point(64, 1.0, rows=5)]))
    assert isinstance(at(64, few, batch=1), Rejection)


def test_other_numbers_of_heads_share_a_curve_at_the_same_group() -> None:
    twice = replace(DENSE, num_heads=8, num_kv_heads=4, scale=0.7)
    assert TABLE.time(twice, 1, 64, 64, 1) == pytest.approx(2 * quadratic(64))
    other_group = replace(DENSE, num_heads=8)
    assert isinstance(TABLE.time(other_group, 1, 64, 64, 1), Rejection)


def test_what_changes_the_work_has_a_curve_of_its_own() -> None:
    for changed in (
        replace(DENSE, head_dim=16),
        replace(DENSE, has_key_mask=True),
        replace(DENSE, window_left=7, window_right=0),
        replace(DENSE, softcap=5.0),
    ):
        assert bucket_of(changed) != bucket_of(DENSE)
        answer = TABLE.time(changed, 1, 64, 64, 1)
        assert isinstance(answer, Rejection) and changed.overload in answer.reason
    assert bucket_of(replace(DENSE, softcap=5.0)) == bucket_of(replace(DENSE, softcap=6.0))
    assert isinstance(TABLE.time(DENSE, 1, 64, 64, 2), Rejection)  # threads


def test_decoding_is_read_along_the_keys() -> None:
    points = [point(n, 1e-6 * n * q**0.5, query_len=q) for n in (256, 1024) for q in (1, 16)]
    costs = table(curve([*points, point(256, 9.0)]))
    assert costs.time(DENSE, 1, 1, 512, 1) == pytest.approx(1e-6 * 512)
    assert costs.time(DENSE, 1, 4, 512, 1) == pytest.approx(1e-6 * 512 * 2)
    answer = costs.time(DENSE, 1, 17, 512, 1)
    assert isinstance(answer, Rejection) and "1, 16" in answer.reason
    assert costs.time(DENSE, 1, 256, 256, 1) == 9.0


def test_density_is_linear_and_never_extrapolated() -> None:
    costs = table(curve([point(64, 1.0 + 10 * d, density=d) for d in (0.1, 0.5)]))
    assert at(64, costs, density=0.2) == pytest.approx(3.0)
    assert isinstance(at(64, costs, density=0.6), Rejection)
    assert isinstance(at(64, costs, density=0.05), Rejection)
    # Measured with full lists only: an upper bound.
    assert at(64, density=0.2) == quadratic(64)


def test_windows_are_read_along_their_span() -> None:
    def windowed(size: int) -> HybridVariant:
        return HybridVariant(4, 2, 8, 8, 0.3, size - 1, 0, 4, allowed_right=0)

    assert bucket_of(windowed(64)) == bucket_of(windowed(256))
    assert bucket_of(replace(windowed(64), sinks=0)) != bucket_of(windowed(64))
    points = [point(512, 1.0 + span / 100, span=span + 4) for span in (64, 256)]
    costs = table(curve(points, windowed(64)))

    def seconds(size: int) -> float | Rejection:
        return costs.time(windowed(size), 1, 512, 512, 1)

    for size in (64, 128, 256, 500):
        assert seconds(size) == pytest.approx(1.0 + size / 100)
    assert seconds(16) == pytest.approx(1.64)  # an upper bound
    answer = seconds(600)
    assert isinstance(answer, Rejection) and "604 keys" in answer.reason


def test_the_kernel_comes_first_and_the_function_where_there_is_none() -> None:
    both = table(curve([point(64, 2.0)]), curve([point(64, 1.0)], runs_as="function"))
    assert at(64, both) == 2.0 and at(64, both, runs_as="function") == 1.0
    assert both.faster(DENSE, 1, 64, 64, 1) == "function"
    alone = table(curve([point(64, 1.0)], runs_as="function"))
    assert at(64, alone) == 1.0
    assert isinstance(at(64, alone, runs_as="kernel"), Rejection)
    assert isinstance(alone.faster(DENSE, 1, 64, 64, 1), Rejection)


def test_memory_is_interpolated_too() -> None:
    points = [point(n, 1.0, bytes=n * 4096) for n in (64, 256)]
    assert table(curve(points)).memory(DENSE, 1, 128, 128, 1) == pytest.approx(128 * 4096)
    untold = table(curve([point(64, 1.0, bytes=None)]))
    assert isinstance(untold.memory(DENSE, 1, 64, 64, 1), Rejection)


def test_nonsense_sizes_are_refused() -> None:
    assert isinstance(TABLE.time(DENSE, 1, 0, 0, 1), Rejection)


def test_merging_keeps_the_newer_points() -> None:
    newer = table(curve([point(64, 7.0), point(512, 8.0)]), curve([point(64, 1.0)], LINEAR))
    merged = TABLE.merge(newer)
    assert at(64, merged) == 7.0 and at(512, merged) == 8.0
    assert at(1024, merged) == quadratic(1024)
    assert merged.time(LINEAR, 1, 64, 64, 1) == 1.0
    foreign = replace(newer, owner={**newer.owner, "cpu": "another"})
    with pytest.raises(UsageError, match="cpu: another"):
        TABLE.merge(foreign)


def test_a_file_returns_what_was_saved(tmp_path: Path) -> None:
    path = TABLE.save(tmp_path / "new" / "costs.json")
    assert CostTable.load(path) == replace(TABLE, machine={}, settings={})
    assert json.loads(path.read_text())["hash"] == TABLE.hash
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("name", ["cpu", "cores", "kernels"])
def test_a_table_from_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    foreign = replace(TABLE, owner={**TABLE.owner, name: "other"})
    path = foreign.save(tmp_path / "costs.json")
    with pytest.raises(UsageError, match=f"{name}: other"):
        CostTable.load(path)


def test_a_changed_or_broken_file_is_refused(tmp_path: Path) -> None:
    path = TABLE.save(tmp_path / "costs.json")
    content = json.loads(path.read_text())
    content["curves"][0]["points"][0]["seconds"] /= 2
    path.write_text(json.dumps(content))
    with pytest.raises(IntegrityError, match="was changed"):
        CostTable.load(path)
    for broken in ("{", "[]", '{"schema": 1, "curves": [{}]}'):
        path.write_text(broken)
        with pytest.raises(IntegrityError, match="no cost table"):
            CostTable.load(path)
    with pytest.raises(UsageError, match="subquad bench --costs"):
        CostTable.load(tmp_path / "none.json")


def test_the_table_of_this_machine_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    missing = CostTable.find()
    assert isinstance(missing, Rejection) and "subquad bench --costs" in missing.reason
    TABLE.save()
    assert isinstance(CostTable.find(), CostTable)
    monkeypatch.setattr("subquad.passes.costs.cpu_model", lambda: "another processor")
    assert not default_path().exists()
    assert isinstance(CostTable.find(), Rejection)


def test_inversions_are_found_with_their_size() -> None:
    plan = CostPlan((DENSE, LINEAR), lengths=(64,), threads=(1,))
    told = table(curve([point(64, 1.0)]), curve([point(64, 1.2)], LINEAR))
    real = table(curve([point(64, 3.0)]), curve([point(64, 2.0)], LINEAR))
    check = compare_tables(told, real, plan)
    assert check.worst is not None and check.worst.factor == pytest.approx(1.5)
    assert check.worst.cheaper.startswith("Attention:")
    assert check.correlation == -1.0 and check.compared == 2
    assert check.median_error == pytest.approx((2 / 3 + 0.4) / 2)
    same = compare_tables(told, told, plan)
    assert same.worst is None and same.correlation == 1.0
    partly = compare_tables(table(told.curves[0]), real, plan)
    assert partly.compared == 1 and "HybridAttention" in partly.refused[0]
    with pytest.raises(UsageError, match="knows none"):
        compare_tables(table(curve([point(64, 1.0)], threads=2)), real, plan)


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([3, 1, 2], [9, 1, 4]) == 1.0


def test_lengths_between() -> None:
    assert between((256, 1024)) == (512,)
    assert between((1024,)) == (1448,)


def test_candidates_are_every_method_that_takes_the_site() -> None:
    causal, full = example_sites("4/2/8")
    for site, is_causal in ((causal, True), (full, False)):
        variants = candidates_of(site)
        assert len({(bucket_of(v), span_of(v), v.op_type) for v in variants}) == len(variants)
        exact = [v for v in variants if isinstance(v, AttentionVariant)]
        assert [v.window_right == 0 for v in exact] == [is_causal]
        windows = [v.window_left for v in variants if isinstance(v, HybridVariant)]
        assert {63, 255, 1023} <= set(windows) if is_causal else {64, 256, 1024} <= set(windows)
    with pytest.raises(UsageError, match="12/12/64"):
        example_sites("4x2x8")
    with pytest.raises(UsageError, match="multiple|expected"):
        example_sites("4/3/8")


def test_plans_need_something_to_measure() -> None:
    with pytest.raises(UsageError, match="No operator"):
        CostPlan(())
    with pytest.raises(UsageError, match="1 or more"):
        CostPlan((DENSE,), lengths=(0,))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Functions only: kernels take many seconds to build."""
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))


@pytest.mark.usefixtures("without_compiler")
def test_functions_are_measured_and_the_missing_kernel_is_said() -> None:
    variants = (DENSE, replace(DENSE, scale=0.9), LINEAR)
    plan = CostPlan(variants, lengths=(16, 48), query_lens=(1,), threads=(1,), rounds=3)
    costs = measure_costs(plan)
    assert [c.runs_as for c in costs.curves] == ["function"] * 2  # the scale makes no difference
    for one in costs.curves:
        assert [(p.query_len, p.kv_len) for p in one.points] == [
            (1, 16),
            (1, 48),
            (16, 16),
            (48, 48),
        ]
        assert all(0 < p.seconds < 1 and p.rows == 2 for p in one.points)
    assert costs.owner == owner_here()
    assert any("C++ compiler" in note for note in costs.notes)
    assert isinstance(costs.time(DENSE, 1, 1, 30, 1), float)


@pytest.mark.usefixtures("without_compiler")
def test_with_one_thread_cpu_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the wall clock says: every reading of the CPU clock is a second after the last."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(ticks)))
    costs = measure_costs(CostPlan((DENSE,), lengths=(16,), threads=(1,), rounds=3))
    assert [point.seconds for curve in costs.curves for point in curve.points] == [1.0]


def test_only_kernels_of_this_machine_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library for older processors would take as long to compile, and nobody runs it."""
    asked: list[Any] = []

    def build(variants: Any, *, targets: Any) -> KernelBuild:
        asked.append(targets)
        refusal = Rejection("not here")
        return KernelBuild(declined={(v.op_type, v.overload): refusal for v in variants})

    monkeypatch.setattr(cost_measurement, "build_kernels", build)
    monkeypatch.setattr(cost_measurement, "missing_tools", lambda: None)
    measure_costs(CostPlan((DENSE,), lengths=(16,), threads=(1,), rounds=3))
    assert asked == [host_targets()[-1:]]


@pytest.mark.usefixtures("without_compiler")
def test_what_does_not_fit_into_the_time_is_said() -> None:
    plan = CostPlan((DENSE,), lengths=(16, 32, 48), threads=(1,), rounds=3, seconds=1e-6)
    with pytest.raises(UsageError, match="no time"):
        measure_costs(plan)


@pytest.mark.slow
def test_ranking_agrees_with_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and functions of every method, half-way between the measured lengths."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    variants = tuple(v for site in example_sites("4/2/64") for v in candidates_of(site))
    plan = CostPlan(variants, lengths=(256, 1024, 4096), threads=(1,), rounds=9)
    costs = measure_costs(plan)
    assert {c.runs_as for c in costs.curves} == {"kernel", "function"}, costs.notes
    check = compare_tables(
        costs,
        measure_costs(replace(plan, lengths=between(plan.lengths))),
        replace(plan, lengths=between(plan.lengths)),
    )
    print(check)
    # Many candidates are within some per cent of each other, so ranks change places; what would
    # mislead a plan is a wrong order of candidates that differ much.
    assert check.correlation >= 0.9
    assert check.worst is None or check.worst.factor <= 1.5
    assert check.refused == ()
