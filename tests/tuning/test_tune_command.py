"""``subquad tune`` on the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from subquad.cli import cli
from subquad.kernels.tuning import tune as tune_module
from subquad.kernels.tuning.records import append_records, read_records
from subquad.kernels.tuning.tune import TunedKernel, TuneReport
from subquad.kernels.tuning.workload import Workload
from tuning_cases import record

SHAPE = "Attention:num_heads=2,head_dim=8,length=16"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["tune", *map(str, arguments)])


def test_help_has_an_example() -> None:
    assert "subquad tune out" in run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ((), 2, "Nothing to tune"),
        (("--shapes", "Nothing:x=1"), 2, "unknown operator"),
        (("--shapes", SHAPE, "--target", "z80"), 2, "Unknown target 'z80'"),
        (("nowhere",), 2, "No such artifact"),
        (("--merge", "nowhere.jsonl"), 2, "cannot be read"),
        (("--merge", "nowhere.jsonl", "--shapes", SHAPE), 2, "--merge tunes nothing"),
        (("--shapes", SHAPE, "--trials", "0"), 2, "--trials"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], code: int, problem: str, tmp_path: Path) -> None:
    result = run(*arguments, "--records", tmp_path / "r.jsonl")
    assert result.exit_code == code
    assert problem in result.stderr


def test_merge(tmp_path: Path) -> None:
    one, two, both = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "both"))
    append_records(one, [record(2)])
    append_records(two, [record(4)])
    result = run("--merge", one, "--merge", two, "--records", both)
    assert result.exit_code == 0, result.stderr
    assert "wrote 2 records" in result.stderr
    assert len(read_records(both)) == 2
    result = run("--merge", one, "--records", both, "--json")
    assert json.loads(result.stdout) == {"path": str(both), "records": 1}


@pytest.fixture
def fake_tune(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records calls; nothing is measured."""
    calls: list[dict[str, Any]] = []

    def fake(shapes: Any, records: Path, **options: Any) -> TuneReport:
        calls.append({"shapes": shapes, "records": records, **options})
        options["progress"]("compiling", 0.25)
        kernels = [
            TunedKernel(
                variant.op_type,
                variant.overload,
                workload,
                how,
                {"rows": 6} if how == "tuned" else {},
                (0.8, 0.9, 0.95) if how == "tuned" else (1.0, 1.0, 1.0),
                21,
                {"ok": 5, "failed": 1, "wrong": 0},
                "" if how == "tuned" else "no candidate could be measured",
                1.0,
            )
            for (variant, workload), how in zip(shapes, ("tuned", "default"), strict=False)
        ]
        return TuneReport(tuple(kernels), "x86-64-v3", records, "a processor", 1, 0, 2.0)

    monkeypatch.setattr(tune_module, "tune", fake)
    return calls


def test_report(fake_tune: list[dict[str, Any]], tmp_path: Path) -> None:
    longer = SHAPE.replace("16", "32")
    result = run(
        "--shapes", SHAPE, "--shapes", longer, "--time", "5", "--records", tmp_path / "r.jsonl"
    )
    assert result.exit_code == 0, result.stderr
    assert "compiling (25%)" in result.stderr
    assert "0.90x" in result.stdout and "rows=6" in result.stdout
    words = " ".join(result.stdout.split())
    assert "defaults:" in words and "a processor" in words
    (call,) = fake_tune
    assert call["seconds"] == 5
    assert [workload for _, workload in call["shapes"]] == [
        Workload(1, 16, 16),
        Workload(1, 32, 32),
    ]
    printed = json.loads(run("--shapes", SHAPE, "--json").stdout)
    assert printed["kernels"][0]["params"] == {"rows": 6}
    assert printed["kernels"][0]["workload"] == dataclasses.asdict(Workload(1, 16, 16))


def test_interrupt_says_where_the_records_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> TuneReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_module, "tune", interrupted)
    result = run("--shapes", SHAPE, "--records", tmp_path / "r.jsonl")
    assert result.exit_code == 130
    assert "what was measured is in" in result.stderr
