from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sites import make_site
from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.plan_file import PlanFile, SitePlan
from subquad.runtime.errors import OutputError, UsageError

SITES = (make_site("a", right=0), make_site("b", right=0, softcap=1.0), make_site("c", right=0))
PLAN = PlanFile(
    source={"name": "model", "hash": "1234"},
    sites=(
        SitePlan("a", "window:size=64,sinks=4", "saves much", {"price": 1.5}),
        SitePlan("b", "window:size=64,sinks=4"),
        SitePlan("c", "dense", "kept exact"),
    ),
    facts={"budget": ["ppl=1%"]},
)


def written(path: Path, **changes: Any) -> Path:
    raw = PLAN.to_json() | changes
    path.write_text(json.dumps(raw), "utf-8")
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(PLAN.dumps(), "utf-8")
    assert PlanFile.read(tmp_path / "plan.json") == PLAN
    assert PlanFile.read(tmp_path / "plan.json").dumps() == PLAN.dumps()


def fitted_plan() -> PlanFile:
    maps = {"query_map": np.ones((2, 9, 8), np.float32), "key_map": np.ones((2, 9, 8), np.float32)}
    fitted = Fitted(maps, (0.5, 0.5), (0.1, 0.2))
    return dataclasses.replace(PLAN, sites=(SitePlan("a", "hedgehog:dims=0", fitted=fitted),))


def test_fitted_tensors_lie_beside_the_plan(tmp_path: Path) -> None:
    plan = fitted_plan()
    plan.write(tmp_path / "plan.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "plan.tensors.npz"]
    read = PlanFile.read(tmp_path / "plan.json")
    assert read == plan and read.dumps() == plan.dumps()
    first, *_ = read.assignments(SITES, source_hash="1234")
    assert first.fitted is not None and (first.tensors()["key_map"] == 1).all()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (5, "fitted must be an object"),
        ({"before": 5}, "fitted.before must be a list of numbers"),
        ({"after": None}, "fitted.after must be a list of numbers"),
        ({"after": ["much"]}, "fitted.after must be a list of numbers"),
        ({"digest": None}, "does not hold the tensors"),
    ],
)
def test_fitted_entries_of_a_wrong_kind(tmp_path: Path, entry: Any, reason: str) -> None:
    fitted_plan().write(tmp_path / "plan.json")
    raw = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    known = raw["sites"][0]["fitted"]
    raw["sites"][0]["fitted"] = {**known, **entry} if isinstance(entry, dict) else entry
    (tmp_path / "plan.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(UsageError, match=reason):
        PlanFile.read(tmp_path / "plan.json")


def test_errors_that_are_no_numbers_are_read_back(tmp_path: Path) -> None:
    maps = {"query_map": np.ones((2, 9, 8), np.float32)}
    fitted = Fitted(maps, (float("nan"), float("inf")), (0.5, 1.0))
    plan = dataclasses.replace(PLAN, sites=(SitePlan("a", "hedgehog:dims=0", fitted=fitted),))
    plan.write(tmp_path / "plan.json")
    read = PlanFile.read(tmp_path / "plan.json")
    assert read.dumps() == plan.dumps()


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.write(path)
    (tmp_path / "plan.tensors.npz").mkdir()
    with pytest.raises(OutputError, match="plan.tensors.npz cannot be written"):
        fitted_plan().write(path)
    assert PlanFile.read(path) == PLAN
    with pytest.raises(OutputError, match="cannot be written"):
        PLAN.write(tmp_path / "absent" / "plan.json")


def test_an_edited_method_has_no_fitted_tensors(tmp_path: Path) -> None:
    fitted_plan().write(tmp_path / "plan.json")
    raw = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    raw["sites"][0]["method"] = "hedgehog:dims=4"
    (tmp_path / "plan.json").write_text(json.dumps(raw), "utf-8")
    first, *_ = PlanFile.read(tmp_path / "plan.json").assignments(SITES, source_hash="1234")
    assert first.text == "hedgehog:dims=4" and first.fitted is None


def test_fitted_tensors_that_are_missing_or_others(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = fitted_plan()
    plan.write(path)
    tensors = tmp_path / "plan.tensors.npz"
    content = tensors.read_bytes()
    tensors.unlink()
    with pytest.raises(UsageError, match="cannot be read from"):
        PlanFile.read(path)
    tensors.write_bytes(content[:100])
    with pytest.raises(UsageError, match="cannot be read from"):
        PlanFile.read(path)
    other = {f"a/{name}": np.zeros((2, 9, 8), np.float32) for name in ("query_map", "key_map")}
    np.savez(tensors, **other)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not hold the tensors of this plan"):
        PlanFile.read(path)


def test_fitted_tensors_of_another_shape() -> None:
    sites = (make_site("a", right=0, dims=(4, 4)),)
    with pytest.raises(UsageError, match="has shape"):
        fitted_plan().assignments(sites, source_hash="1234")


def test_methods_are_assigned_and_may_decline() -> None:
    first, second, third = PLAN.assignments(SITES, source_hash="1234")
    assert first.text == "window:size=64,sinks=4" and first.declined is None
    assert second.text == "dense" and second.declined is not None
    assert third.text == "dense" and third.declined is None


def test_sites_that_are_not_named_stay_exact(tmp_path: Path) -> None:
    path = written(tmp_path / "plan.json", sites=[{"name": "c", "method": "elu"}])
    assert [a.text for a in PlanFile.read(path).assignments(SITES, source_hash="1234")] == [
        "dense",
        "dense",
        "elu",
    ]


def test_another_source_is_refused_unless_the_hash_is_removed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="made for model"):
        PLAN.assignments(SITES, source_hash="99")
    path = written(tmp_path / "plan.json", source={"name": "model"})
    assert len(PlanFile.read(path).assignments(SITES, source_hash="99")) == 3


def test_unknown_site(tmp_path: Path) -> None:
    path = written(tmp_path / "plan.json", sites=[{"name": "z", "method": "elu"}])
    with pytest.raises(UsageError, match="'z', which this model does not have"):
        PlanFile.read(path).assignments(SITES, source_hash="1234")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "other"}, "is no plan"),
        ({"version": 99}, "version 99"),
        ({"sites": []}, "must be a list"),
        ({"sites": {}}, "must be a list"),
        ({"sites": ["a"]}, r"sites\[0\] must be an object"),
        ({"sites": [{"name": "a"}]}, r"sites\[0\].method must be a text"),
        ({"sites": [{"name": 3, "method": "dense"}]}, r"sites\[0\].name must be a text"),
        ({"sites": [{"name": "a", "method": "sorcery"}]}, r"sites\[0\]: unknown method"),
        ({"sites": [{"name": "a", "method": "window:size=0"}]}, r"sites\[0\]: .*between"),
        ({"sites": [{"name": "a", "method": "elu", "why": 1}]}, "why must be a text"),
        ({"sites": 2 * [{"name": "a", "method": "elu"}]}, "occurs twice"),
        ({"source": 3}, "source must be an object"),
    ],
)
def test_malformed(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        PlanFile.read(written(tmp_path / "plan.json", **changes))


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        PlanFile.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{" * 5, "utf-8")
    with pytest.raises(UsageError, match="no valid JSON"):
        PlanFile.read(tmp_path / "bad.json")
