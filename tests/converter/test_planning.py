"""Planning end to end on a small decoder: same plan, however often it was stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exact_folder
from subquad.converter.budget_texts import metric_code, parse_budget
from subquad.converter.pipeline import convert
from subquad.converter.plan_request import PlanRequest
from subquad.converter.planning import convert_with_budget, plan_source
from subquad.passes.calibrate.score import Scorer
from subquad.passes.methods import lolcats
from subquad.runtime.errors import BudgetError, UsageError

SIZES: dict[str, Any] = {
    "lengths": (96,),
    "threads": 1,
    "calibration_tokens": 960,
    "heldout_tokens": 1920,
}
REQUEST = PlanRequest(budget=("kl=1.5",), **SIZES)
FILES = ("model.onnx", "model.onnx.data", "reference.onnx", "manifest.json")


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact_folder.save_decoder(tmp_path_factory.mktemp("source") / "deep.onnx")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with the exact artifact of ``source``, so that tests need not make it."""
    return tmp_path_factory.mktemp("work") / "work"


@pytest.fixture(scope="module")
def plan(source: Path, work: Path) -> Any:
    return plan_source(source, REQUEST, work=work)


def test_plan_says_what_and_why(plan: Any) -> None:
    raw = plan.plan.to_json()
    assert raw["measured"]["metrics"]["kl"] <= 1.5
    assert raw["data"]["synthetic"] and plan.synthetic
    replaced = [site for site in raw["sites"] if site["method"] != "dense"]
    assert replaced, "some window fits this budget"
    for site in raw["sites"]:
        assert site["why"]
        tried = {candidate["method"] for candidate in site["candidates"]}
        assert site["method"] in tried | {"dense"}
        assert "elu" in site["declined"]
    assert raw["price"] == pytest.approx(sum(site["price"] for site in raw["sites"]))
    assert 0 < raw["saving"] == pytest.approx(1 - raw["price"] / raw["exact_price"], rel=1e-4)
    assert raw["front"][-1]["replaced"] == 0
    json.dumps(raw, allow_nan=False)


def test_stopped_anywhere_and_resumed_it_is_the_same_plan(
    source: Path, work: Path, plan: Any, tmp_path: Path
) -> None:
    """The exact artifact is copied: making it is not what is interrupted here."""
    import shutil

    place = tmp_path / "work"
    place.mkdir()
    for item in work.iterdir():
        if item.name.startswith(("base-", "subquad-work")):
            (shutil.copytree if item.is_dir() else shutil.copy)(item, place / item.name)
    stops = 0
    for limit in range(3, 30):
        seen: list[str] = []

        def stop(message: str, share: float | None, limit: int = limit) -> None:
            seen.append(message)  # noqa: B023
            if len(seen) == limit:  # noqa: B023
                raise Stopped

        try:
            again = plan_source(source, REQUEST, work=place, progress=stop)
        except Stopped:
            stops += 1
            continue
        break
    assert stops >= 4 and again.plan.dumps() == plan.plan.dumps()


def test_other_options_are_other_results(source: Path, work: Path, plan: Any) -> None:
    tight = plan_source(source, PlanRequest(budget=("kl=0",), **SIZES), work=work)
    assert {site.method for site in tight.plan.sites} == {"dense"}
    assert all("kept exact" in site.why for site in tight.plan.sites)


def test_artifact_is_the_plan_s(source: Path, work: Path, plan: Any, tmp_path: Path) -> None:
    report = convert_with_budget(
        source, tmp_path / "out", dataclasses.replace(REQUEST, refit=False), work=work
    )
    facts = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert facts["planning"]["plan"]["sites"] == plan.plan.to_json()["sites"]
    assert facts["probes"]["greedy"]["tokens"] == 32
    assert {point["length"] for point in facts["probes"]["recall"]} == {96}
    # Sums are re-associated where segments meet.
    measured = plan.plan.to_json()["measured"]["metrics"]["kl"]
    assert facts["verified"]["metrics"]["kl"] == pytest.approx(measured, rel=1e-2)
    assert [record["method"] for record in report.sites] == [
        site.method.partition(":")[0] for site in plan.plan.sites
    ]
    plan.plan.write(tmp_path / "plan.json")
    convert(source, tmp_path / "direct", plan=tmp_path / "plan.json")
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_the_budget_holds_on_every_kind_of_document(
    source: Path, work: Path, tmp_path: Path
) -> None:
    """Rows of one token are easy, random ones are not: their mean would keep more."""
    rng = np.random.default_rng(3)
    for name, ids in {
        "easy": np.repeat(rng.integers(0, 31, (20, 1)), 96, axis=1),
        "hard": rng.integers(0, 31, (20, 96)),
    }.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        np.savez(
            tmp_path / "data" / name / "rows.npz",
            input_ids=ids,
            attention_mask=np.ones_like(ids),
        )
    request = dataclasses.replace(REQUEST, budget=("kl=0.4",), data=(tmp_path / "data",))
    report = convert_with_budget(source, tmp_path / "out", request, work=work).to_json()
    plan = report["planning"]["plan"]
    assert plan["data"]["groups"] == ["easy", "hard"]
    for figures in (plan["measured"]["groups"], report["verified"]["groups"]):
        kl = {name: group["metrics"]["kl"] for name, group in figures.items()}
        assert max(kl.values()) <= 0.4
    missed = [point for point in plan["front"] if not point["keeps_budget"]]
    means = [point["measured"]["metrics"]["kl"] for point in missed]
    assert means and min(means) < 0.4, "the mean alone would have kept this one"
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "kl on easy" in page and "kl on hard" in page


LEARNED = PlanRequest(
    budget=("kl=0.1",),
    methods=("lolcats", "window"),
    **SIZES | {"lengths": (320,), "calibration_tokens": 1280},
)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact_folder.save_decoder(tmp_path_factory.mktemp("shallow") / "flat.onnx", layers=1)


@pytest.fixture(scope="module")
def learned(shallow: Path, work: Path) -> Any:
    """A plan in which some attention has fitted maps: windows alone lose too much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lolcats, "SIZES", (8,))
        return plan_source(shallow, LEARNED, work=work)


def test_learned_methods_are_candidates(learned: Any) -> None:
    raw = learned.plan.to_json()
    for site in raw["sites"]:
        (hybrid,) = (c for c in site["candidates"] if c["method"].startswith("lolcats"))
        (plain,) = (c for c in site["candidates"] if c["method"] == "window:size=8,sinks=4")
        assert max(hybrid["errors"].values()) < max(plain["errors"].values())
        assert plain["price"] < hybrid["price"] < site["exact_price"]
        assert np.mean(hybrid["fitted"]["after"]) < np.mean(hybrid["fitted"]["before"])


def test_branches_are_looked_at_and_fits_travel_with_the_plan(
    shallow: Path, work: Path, learned: Any, tmp_path: Path
) -> None:
    hybrids = [site for site in learned.plan.sites if site.method.startswith("lolcats")]
    assert hybrids, "some hybrid fits this budget"
    assert all(site.fitted is not None and "branches" in site.facts for site in hybrids)
    assert all("the linear part contributes" in site.why for site in hybrids)
    learned.plan.write(tmp_path / "plan.json")
    convert(shallow, tmp_path / "direct", plan=tmp_path / "plan.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lolcats, "SIZES", (8,))
        request = dataclasses.replace(LEARNED, refit=False)
        report = convert_with_budget(shallow, tmp_path / "out", request, work=work)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    facts = report.to_json()
    assert [seen["name"] for seen in facts["branches"]] == [
        site.name for site in learned.plan.sites if "branches" in site.facts
    ]
    assert "linear part off" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_refit_brings_the_artifact_nearer(
    source: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear attention everywhere: an error large enough that weights can make up for some."""
    import onnx

    from subquad.passes.methods.elu import EluMethod, EluParameters

    monkeypatch.setattr(EluMethod, "candidates", lambda *arguments: [EluParameters()])
    sizes = SIZES | {"calibration_tokens": 4800}
    request = PlanRequest(budget=("kl=100",), methods=("elu",), **sizes)
    report = convert_with_budget(source, tmp_path / "out", request, work=work)
    facts = report.to_json()
    assert facts["refit"]["applied"] and any(s["applied"] for s in facts["refit"]["sites"])
    before = facts["planning"]["plan"]["measured"]["metrics"]["kl"]
    assert facts["verified"]["metrics"]["kl"] < before
    # The reference keeps its own weights, and both share the rest.
    names = [s["name"] for s in facts["refit"]["sites"] if s["applied"]]
    places = []
    for file in ("model.onnx", "reference.onnx"):
        model = onnx.load(tmp_path / "out" / file, load_external_data=False)
        places.append(
            {
                tensor.name: {entry.key: entry.value for entry in tensor.external_data}
                for tensor in model.graph.initializer
            }
        )
    moved = [n for n in places[0] if n in places[1] and places[0][n] != places[1][n]]
    assert len(moved) == len(names) and all(name.startswith("wo") for name in moved)


def test_an_artifact_that_misses_the_budget_is_not_written(
    source: Path, work: Path, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(self: Any, run: Any) -> Any:
        score = original(self, run)
        return type(score)({**score.metrics, "kl": 2.0}, score.errors, score.damage)

    original = Scorer.score
    monkeypatch.setattr(Scorer, "score", worse)
    with pytest.raises(BudgetError, match="kl is 2"):
        convert_with_budget(source, tmp_path / "out", REQUEST, work=work)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_artifact(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "subquad", "convert"]
    command += [str(source), "OUT", "--budget", "kl=1.5", "--lengths", "96", "--threads", "1"]

    def start(name: str) -> subprocess.Popen[bytes]:
        words = [str(tmp_path / name) if word == "OUT" else word for word in command]
        return subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    kills = 0
    for pause in (1.5, 3, 4.5, 6, 7.5, 9, 10.5):
        running = start("killed")
        time.sleep(pause)
        if running.poll() is None:
            os.kill(running.pid, signal.SIGKILL)
            kills += 1
        running.wait()
    # Killed while it asked its probes, the artifact is there, and the work folder still is as well.
    if not (tmp_path / "killed").exists():
        assert start("killed").wait() == 0
        assert not (tmp_path / "killed.work").exists()
    assert kills >= 2
    for name in FILES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def metric(run: Any) -> float:
    """A metric of a user: mean of the logits of one fixed row."""
    import numpy as np

    ids = np.arange(20)[None] % 31
    logits = run({"input_ids": ids, "attention_mask": np.ones_like(ids)})["logits"]
    return float(logits.argmax(-1).sum())


def test_a_user_s_metric(source: Path, work: Path) -> None:
    request = PlanRequest(budget=(f"metric={__file__}:metric,drop=1e9",), **SIZES)
    found = plan_source(source, request, work=work).plan
    assert all(site.method != "dense" for site in found.sites)
    assert "custom" in found.to_json()["measured"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return float('nan')", "The metric is nan for the exact model"),
        ("return 'good'", "must return a number, got str"),
        ("return {}['score']", r"The metric failed: KeyError: 'score' \(.*mine.py, line 2\)"),
        ("return run({})", "The model takes"),
        ("return score", "The metric failed: NameError"),
    ],
)
def test_a_metric_that_gives_no_score(
    source: Path, work: Path, tmp_path: Path, body: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def metric(run):\n    {body}\n")
    request = PlanRequest(budget=(f"metric={tmp_path}/mine.py:metric,drop=1",), **SIZES)
    with pytest.raises(UsageError, match=reason):
        plan_source(source, request, work=work)


def test_an_edited_metric_is_asked_again(tmp_path: Path) -> None:
    budget = (f"kl=1,metric={tmp_path}/mine.py:metric,drop=1",)
    (tmp_path / "mine.py").write_text("def metric(run):\n    return 1\n")
    before = metric_code(budget)
    assert before is not None and metric_code(budget) == before
    (tmp_path / "mine.py").write_text("def metric(run):\n    return 2\n")
    assert metric_code(budget) != before
    assert metric_code(("kl=1",)) is None
    assert metric_code(("metric=json:dumps,drop=1",)) is not None


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ((), "needs a budget"),
        (("speed=1",), "Unknown budget"),
        (("metric=math:floor",), "needs both"),
        (("drop=1",), "needs both"),
        (("metric=math:floor,drop=x",), "not a number"),
        (("metric=math:floor,drop=-1",), "0 or more"),
        (("metric=math:pi,drop=1",), "cannot be called"),
        (("metric=no_such:thing,drop=1",), "cannot import"),
        (("metric=math:floor,drop=1", "metric=math:ceil"), "metric is given twice"),
        (("kl=1", "drop=1,drop=2"), "drop is given twice"),
        (("ppl=1%", "ppl=50%"), "ppl is given twice"),
        (("recall=150%",), "share of at most 1"),
        (("top1=99",), "share of at most 1"),
        (("ppl=nan",), "0 or more"),
    ],
)
def test_bad_budgets(texts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_budget(texts)


def test_a_work_folder_that_is_not_ours(source: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x", "utf-8")
    with pytest.raises(UsageError, match="was not made by subquad"):
        plan_source(source, REQUEST, work=tmp_path)
    assert (tmp_path / "thesis.tex").read_text("utf-8") == "x"
