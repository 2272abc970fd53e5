from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subquad.runtime import bench as bench_module
from subquad.runtime.bench import BenchResult, Round, bench
from subquad.runtime.errors import BudgetError, SubquadError, UnsupportedModelError, UsageError
from tiny_artifact import Tiny


def quick(path: Path, **options: Any) -> BenchResult:
    defaults: dict[str, Any] = {"lengths": (8, 40), "rounds": 4, "threads": 1}
    defaults |= {"memory": False, "checked": False}
    return bench(path, **defaults | options)


def test_every_length_has_paired_rounds(decoder: Path) -> None:
    result = quick(decoder, batch=2)
    assert [(case.length, case.batch, case.rounds) for case in result.cases] == [
        (8, 2, 4),
        (40, 2, 4),
    ]
    for case in result.cases:
        assert len(case.raw) == case.rounds
        assert case.rounds_kept == sum(item.kept for item in case.raw)
        assert case.reference_seconds > 0 and case.artifact_seconds > 0 and case.speedup > 0
        assert case.reference_peak_bytes is None
    assert result.gemm_gflops > 0.1
    assert result.checked == "unchecked"


def test_json_is_complete(decoder: Path) -> None:
    content = json.loads(json.dumps(quick(decoder, lengths=(8,)).to_json(), allow_nan=False))
    assert set(content) >= {"artifact", "cases", "gemm_gflops", "machine", "versions", "notes"}
    assert set(content["machine"]) >= {"cpu", "cores", "memory_bytes", "system", "python"}
    assert content["versions"]["onnxruntime"]
    assert set(content["cases"][0]["raw"][0]) == {"reference", "artifact", "gemm", "kept"}


def test_memory_is_that_of_a_fresh_process(decoder: Path) -> None:
    (case,) = quick(decoder, lengths=(8,), rounds=1, memory=True).cases
    for peak in (case.reference_peak_bytes, case.artifact_peak_bytes):
        assert peak is None or 20 << 20 < peak < 1 << 30


def test_a_failing_probe_says_why(copied: Path) -> None:
    with pytest.raises(SubquadError, match="memory of reference.onnx failed: .*600 by 700"):
        bench_module._peak(
            copied,
            "reference.onnx",
            700,
            1,
            0,
            {"provider": "cpu", "threads": 1, "kernels": "auto"},
            lambda message, share: None,
        )


def test_an_artifact_that_fails_validation_is_refused(make: Callable[[Tiny], Path]) -> None:
    folder = make(Tiny(perturbed=0, perturbation=0.5))
    with pytest.raises(BudgetError, match="fails validation"):
        quick(folder, checked=True)
    assert quick(folder, lengths=(8,)).checked == "unchecked"


def test_a_valid_artifact_is_checked(decoder: Path) -> None:
    assert quick(decoder, lengths=(8,), rounds=1, checked=True).checked == "pass"


def test_the_time_limit_ends_rounds_and_is_said(decoder: Path) -> None:
    result = quick(decoder, lengths=(8,), rounds=1000, time_limit=0.3)
    (case,) = result.cases
    assert 1 <= case.rounds < 1000
    assert any("fitted into the time limit" in note for note in result.notes)


def test_lengths_that_cannot_run_are_left_out(decoder: Path) -> None:
    result = quick(decoder, lengths=(8, 700), rounds=1)
    assert [case.length for case in result.cases] == [8]
    assert result.skipped == ({"length": 700, "reason": "the model accepts at most 600 tokens"},)
    with pytest.raises(UnsupportedModelError, match="no length could be timed"):
        quick(decoder, lengths=(700,))
    with pytest.raises(UsageError):
        quick(decoder, lengths=(0,))


def test_default_lengths_respect_the_model(decoder: Path) -> None:
    result = quick(decoder, lengths=None, rounds=1)
    assert [case.length for case in result.cases] == [128, 512]


def test_unsteady_rounds_are_left_out() -> None:
    steady = [Round(2.0, 1.0, (0.10, 0.11), kept=True) for _ in range(5)]
    raw, kept = bench_module._judge([*steady, Round(90.0, 1.0, (0.10, 0.15), kept=True)])
    assert kept == 5 and not raw[-1].kept
    case = bench_module._case(8, 1, raw, (None, None))
    assert (case.speedup, case.reference_seconds) == (2.0, 2.0)
    assert case.gemm_spread == pytest.approx(0.15 / 0.105 - 1, abs=0.05)
