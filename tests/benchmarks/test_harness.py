"""The rules of measuring, on contestants whose times are written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness
from harness import Case, Contestant, ContestantFailed, Pool, Row, Settings, WrongResult

GEMM = 0.02
PRODUCTS = harness.GEMM_LEAST
OUTPUT = np.ones((1, 2, 4, 3))


class Scripted:
    """Stands for the child process: what each contestant takes, in order."""

    def __init__(
        self,
        seconds: Mapping[str, float],
        gemm: Sequence[float] = (),
        slowdown: Sequence[float] = (),
        errors: Mapping[str, float] | None = None,
        failing: str = "",
    ) -> None:
        self.seconds, self.errors, self.failing = seconds, errors or {}, failing
        self.gemm: Iterator[float] = iter(gemm)
        self.slowdown: Iterator[float] = iter(slowdown)
        self.asked: list[tuple[str, str]] = []

    def ask(self, label: str, do: str, **request: Any) -> dict[str, Any]:
        self.asked.append((do, label))
        if label == self.failing and do == "open":
            raise ContestantFailed(label, "out of memory")
        if do == "sample":
            np.save(request["path"], OUTPUT * (1 + self.errors.get(label, 0.0)))
        if do == "first":
            return {"seconds": self.seconds[label], "growth": 1 << 20, "peak": 2 << 20}
        if do == "time":
            if label == "GEMM":
                return {"seconds": next(self.gemm, GEMM)}
            return {"seconds": self.seconds[label] * next(self.slowdown, 1.0)}
        return {}


class ScriptedPool(Pool):
    def __init__(self, process: Scripted) -> None:
        super().__init__()
        self.process = process

    def get(self, family: str, threads: int) -> Any:
        return self.process

    def stop(self, keep: Any = None) -> None:
        return


OURS = Contestant("ours", "ort", {}, ours=True, wanted=lambda: OUTPUT)
RIVAL = Contestant("rival", "torch", {}, wanted=lambda: OUTPUT, limit=1e-4)
CASE = Case("dense", 64, 1, (OURS, RIVAL), flops=1e6, rows=(0, 1))


def measure(process: Scripted, case: Case = CASE, **settings: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"rounds": 10}
    left = settings.pop("left", 100.0)
    result = harness.measure_case(
        case, ScriptedPool(process), Settings(**defaults | settings), left=left
    )
    return result


def test_long_runs_have_more_samples_of_the_product_beside_them() -> None:
    assert harness.products_beside(0.1, GEMM) == harness.GEMM_LEAST
    assert harness.products_beside(16.0, GEMM) == 16
    assert harness.products_beside(60.0, GEMM) == 60
    assert harness.products_beside(3600.0, GEMM) == harness.GEMM_MOST


@pytest.mark.parametrize(("slow", "counts"), [(4, True), (5, False)])
def test_a_minority_of_slow_products_costs_no_round(slow: int, counts: bool) -> None:
    # Before and after the first run of the first round, behind a warm-up and an estimate.
    before = [3 * GEMM] * 2 + [GEMM] * (PRODUCTS - 2)
    after = [3 * GEMM] * (slow - 2) + [GEMM] * (PRODUCTS - slow + 2)
    gemm = [GEMM] * (1 + PRODUCTS) + before + after
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, gemm))
    assert result["rounds"] - result["rounds_kept"] == (0 if counts else 1)


def test_one_slow_timing_of_three_moves_no_sample() -> None:
    # One run each to see how long it takes; then ours is interrupted once in the first round.
    slowdown = [1, 1] + [1, 50, 1]
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, slowdown=slowdown), rounds=1)
    (_, rival) = result["contestants"]
    assert rival["ratio_quartiles"] == pytest.approx([0.25, 0.25])


def test_long_runs_are_timed_once_a_round() -> None:
    process = Scripted({"ours": 0.2, "rival": 0.04})
    result = measure(process, rounds=1)
    times = [label for do, label in process.asked if do == "time"]
    assert times.count("ours") == 1 + result["rounds"]
    assert times.count("rival") == 1 + harness.TIMINGS * result["rounds"]


def test_ratios_are_paired_and_rates_relative_to_the_product() -> None:
    # CASE_SECONDS is never reached by a script: rounds go on to three times what was asked for.
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}))
    ours, rival = result["contestants"]
    assert rival["ours_over_this"] == pytest.approx(0.25)
    assert rival["median_seconds"] == pytest.approx(0.04)
    rate = 2 * harness.GEMM_SIZE**3 / GEMM
    assert ours["share_of_gemm"] == pytest.approx(1e6 / 0.01 / rate)
    assert ours["gflops"] == pytest.approx(0.1)
    assert ours["peak_growth_bytes"] == 1 << 20
    assert result["rounds"] == result["rounds_kept"] == 30


def test_order_changes_every_round() -> None:
    process = Scripted({"ours": 0.01, "rival": 0.04})
    measure(process)
    runs = [label for do, label in process.asked if do == "time" and label != "GEMM"][2:]
    assert runs[:: harness.TIMINGS][:6] == ["ours", "rival", "rival", "ours", "ours", "rival"]


def test_rounds_with_an_unsteady_reference_are_left_out_and_counted() -> None:
    # Warm-up and estimate, then products at three places a round; in the second round those in the
    # middle are disturbed, and the run before them.
    gemm = [GEMM] * (1 + PRODUCTS + 4 * PRODUCTS) + [2 * GEMM] * PRODUCTS
    slowdown = [1, 1] + [1] * 2 * harness.TIMINGS + [50] * harness.TIMINGS
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, gemm, slowdown))
    assert result["rounds"] - result["rounds_kept"] == 1
    # Half of the products before and after each run of that round.
    assert result["gemm_spread"] == pytest.approx(0.5)
    (_, rival) = result["contestants"]
    assert rival["ratio_quartiles"] == pytest.approx([0.25, 0.25])


def test_a_machine_that_is_never_quiet_ends_after_twice_the_rounds() -> None:
    gemm = [GEMM * (1 + number // PRODUCTS % 2) for number in range(1000)]
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, gemm))
    assert (result["rounds"], result["rounds_kept"]) == (20, 0)
    assert result["contestants"][1]["ours_over_this"] == pytest.approx(0.25)


def test_a_contestant_that_fails_takes_only_itself_out() -> None:
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, failing="rival"))
    assert [item["label"] for item in result["contestants"]] == ["ours"]
    assert result["excluded"] == {"rival": "out of memory"}


def test_without_any_of_ours_nothing_is_timed() -> None:
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, failing="ours"))
    assert result["skipped"] == "ours: out of memory"


@pytest.mark.parametrize("error", [2e-5, float("nan")])
def test_a_wrong_result_of_ours_ends_everything(error: float) -> None:
    with pytest.raises(WrongResult, match="ours: its error relative to float64"):
        measure(Scripted({"ours": 0.01, "rival": 0.04}, errors={"ours": error}))


def test_a_rival_that_computes_something_else_is_left_out() -> None:
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, errors={"rival": 0.01}))
    assert "error relative to float64 is 0.01" in result["excluded"]["rival"]


def test_an_approximation_is_reported_not_judged() -> None:
    case = replace(CASE, contestants=(OURS, replace(RIVAL, limit=None)))
    result = measure(Scripted({"ours": 0.01, "rival": 0.04}, errors={"rival": 0.01}), case)
    assert result["contestants"][1]["error"] == pytest.approx(0.01)


def test_what_does_not_fit_into_the_time_is_left_out_and_said() -> None:
    result = measure(Scripted({"ours": 30.0, "rival": 40.0}))
    assert result["skipped"].startswith("about 700 s are needed")
    late = measure(Scripted({}), replace(CASE, predicted=1000.0))
    assert late["skipped"].startswith("about 10000 s are needed")


def test_too_little_memory_is_a_reason() -> None:
    case = replace(CASE, contestants=(OURS, replace(RIVAL, scratch=1 << 60)))
    result = measure(Scripted({"ours": 0.01}), case)
    assert "MiB" in result["excluded"]["rival"]


def test_cheap_cases_come_first_and_results_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[int] = []

    def record(case: Case, *_: Any) -> dict[str, Any]:
        order.append(case.length)
        facts = {"workload": case.workload, "length": case.length, "threads": case.threads}
        return facts | {"contestants": [], "rounds": 1, "rounds_kept": 1}

    monkeypatch.setattr(harness, "measure_case", record)
    cases = [replace(CASE, length=n, predicted=float(n)) for n in (300, 100, 200)]
    results, skipped = harness.run_cases(cases, Settings(), lambda text: None)
    assert order == [100, 200, 300]
    assert [item["length"] for item in results] == [300, 100, 200]
    assert skipped == []


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    process = harness.Process(1)
    with pytest.raises(ContestantFailed, match="ValueError: dance"):
        process.ask("x", "dance")
    process.close()


def test_steady_rounds() -> None:
    def row(factor: float, *stands: float) -> Row:
        return Row({}, {"ours": GEMM, "rival": GEMM * factor}, tuple(GEMM * f for f in stands))

    rows = [row(factor, 1.0) for factor in (1.0, 1.14, 1.16, 0.84)]
    assert harness.steady(rows) == [True, True, False, False]
    # A machine that is slow for one stop only moves a reference by half of that.
    rows = [row(1.0, 1.0, slow, 1.0) for slow in (1.0, 1.29, 1.31)]
    assert harness.steady(rows) == [True, True, False]
    assert harness.steady([]) == []
