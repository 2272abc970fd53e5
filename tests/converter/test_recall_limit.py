"""A limit on recall, end to end: plans that perplexity takes and recall refuses."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import exact_folder
from subquad.converter import recall_limit
from subquad.converter.pipeline import convert
from subquad.converter.plan_request import PlanRequest
from subquad.converter.planning import convert_with_budget, plan_source
from subquad.runtime.budget import Budget
from subquad.runtime.errors import BudgetError, UsageError
from subquad.runtime.recall_budget import RecallKept, RecallTest
from subquad.runtime.validate import validate
from subquad.runtime.validation_result import ValidationResult

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "tarfile.py"):
        (folder / f"{name}.txt").write_text((library / name).read_text("utf-8"), "utf-8")
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work") / "work"


@pytest.fixture(scope="module")
def request_without(texts: Path) -> PlanRequest:
    return PlanRequest(
        budget=("ppl=30%",),
        lengths=(512,),
        data=(texts,),
        methods=("window",),
        threads=1,
        calibration_tokens=1024,
        heldout_tokens=2048,
    )


@pytest.fixture(scope="module")
def request_with(request_without: PlanRequest) -> PlanRequest:
    return dataclasses.replace(request_without, budget=("ppl=30%", "recall=95%"))


def windows(plan: dict[str, Any]) -> int:
    return sum(site["method"].startswith("window") for site in plan["sites"])


def test_windows_that_perplexity_takes_are_refused_by_recall(
    request_without: PlanRequest,
    request_with: PlanRequest,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = plan_source(DEMO_MODEL, request_without, work=work).plan.to_json()
    assert windows(taken) == len(taken["sites"]), "all of them are windows"
    assert "recall" not in taken["measured"]["metrics"]
    assert not (work / "recall").exists(), "who does not ask for it does not pay for it"

    found = plan_source(DEMO_MODEL, request_with, work=work).plan.to_json()
    assert 0 < windows(found) < len(found["sites"])
    measured = found["measured"]
    assert measured["metrics"]["recall"] - measured["standard_errors"]["recall"] >= 0.95
    kept: list[float] = []
    replaced: list[float] = []
    for site in found["sites"]:
        worst = max(candidate["recall_error"] for candidate in site["candidates"])
        (kept if site["method"] == "dense" else replaced).append(worst)
    assert min(kept) > 5 * max(replaced), "the one that looks far is left alone"
    assert found["saving"] < taken["saving"]

    # The exact model answers once for all; and so do plans that were run.
    assert len(list((work / "recall").iterdir())) == 1
    monkeypatch.setattr(recall_limit, "hits", None)
    monkeypatch.setattr(RecallTest, "kept", None)
    again = plan_source(DEMO_MODEL, request_with, work=work).plan.to_json()
    assert again == found


def test_the_artifact_keeps_recall_as_it_ships_and_validate_says_so(
    request_with: PlanRequest, work: Path, texts: Path, tmp_path: Path
) -> None:
    report = convert_with_budget(DEMO_MODEL, tmp_path / "out", request_with, work=work).to_json()
    assert report["verified"]["metrics"]["recall"] >= 0.95
    convert(DEMO_MODEL, tmp_path / "windows", force=("window:size=64",))

    def judged(name: str) -> ValidationResult:
        return validate(
            tmp_path / name,
            data=texts / "tarfile.py.txt",
            lengths=[512],
            paddings=["left"],
            rows=2,
            budget=Budget.parse(["recall=90%"]),
            metamorphic=False,
            sites=False,
        )

    good, bad = judged("out"), judged("windows")
    assert good.verdict == "pass" and (good.measured["recall"] or 0) >= 0.9
    assert bad.verdict == "fail" and "recall is 0" in bad.reasons[0]
    assert any("recall kept of the reference's" in note for note in bad.notes)


@pytest.mark.slow
def test_an_artifact_that_forgets_is_not_written(
    request_with: PlanRequest, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are known by now, so that only the refitted model and the artifact are asked."""
    plan_source(DEMO_MODEL, request_with, work=work)
    monkeypatch.setattr(RecallTest, "kept", lambda *arguments: RecallKept(0.5, 0.0, {}))
    with pytest.raises(BudgetError, match="recall is 0.5, below the budget of 0.95"):
        convert_with_budget(DEMO_MODEL, tmp_path / "out", request_with, work=work)
    assert not (tmp_path / "out").exists()


def test_a_model_that_recalls_nothing_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    source = exact_folder.save_decoder(tmp_path / "random.onnx")
    request = PlanRequest(budget=("kl=1", "recall=95%"), lengths=(96,), threads=1)
    seen: list[str] = []
    with pytest.raises(UsageError, match="Budget recall: cannot be judged at the lengths 96"):
        plan_source(
            source, request, work=tmp_path / "work", progress=lambda text, share: seen.append(text)
        )
    assert "recall" in seen and "measure" not in seen
