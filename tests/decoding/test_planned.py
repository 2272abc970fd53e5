"""A budget and a cache: the plan is made with whole sequences, the artifact is decoded by steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import subquad
import tiny_decoders
from sites import make_site
from subquad.converter.plan_request import PlanRequest
from subquad.converter.planned_cache import replace_weights, require_all_planned
from subquad.converter.planning import convert_with_budget
from subquad.passes.methods import parse_method
from subquad.passes.plan import declined_by
from subquad.passes.plan_file import PlanFile, SitePlan
from subquad.passes.repair.distil import DistilSettings
from subquad.runtime.decoding import Decoding
from subquad.runtime.errors import ReplacementError, UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.validate import validate

REQUEST = PlanRequest(
    budget=("kl=2",),
    lengths=(96,),
    threads=1,
    calibration_tokens=384,
    heldout_tokens=384,
    methods=("window",),
)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # GPT-2 has a table of positions
def test_planned_and_decoded(family: str, tmp_path: Path) -> None:
    tiny_decoders.save(getattr(tiny_decoders, family), tmp_path / "source")
    report = convert_with_budget(tmp_path / "source", tmp_path / "out", REQUEST, cache=True)
    raw = report.to_json()
    assert raw["verified"]["metrics"]["kl"] <= 2
    methods = {site["method"] for site in raw["sites"]}
    assert any(method.startswith("window") for method in methods), methods
    manifest = Manifest.read(tmp_path / "out")
    assert any(spec.role == "past" for spec in manifest.inputs)
    artifact = subquad.load(tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, tiny_decoders.VOCABULARY, (2, 90))
    whole = Decoding(artifact, 2).advance(ids)
    steps = Decoding(artifact, 2)
    pieces = [
        steps.advance(ids[:, :70]),
        *(steps.advance(ids[:, i : i + 1]) for i in range(70, 90)),
    ]
    # float32 through two layers with large weights
    assert np.linalg.norm(np.concatenate(pieces, 1) - whole) <= 2e-5 * np.linalg.norm(whole)
    result = validate(tmp_path / "out", lengths=(19,))
    assert result.metamorphic is not None and not result.metamorphic.violations
    assert result.metamorphic.checks["pieces"]


def test_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--cache goes not with --distil"):
        convert_with_budget("s", tmp_path / "out", REQUEST, distil=DistilSettings(), cache=True)


def test_methods_without_steps_are_no_candidates() -> None:
    site = make_site("causal", right=0)
    method, params = parse_method("block_sparse")
    assert declined_by(method, site, params) is None
    reason = declined_by(method, site, params, decodes=True)
    assert reason is not None and "step by step" in reason.reason


def test_a_plan_that_a_site_declines_is_an_error() -> None:
    """It would be another model than the one that was measured."""
    site = make_site("causal", right=0)
    plan = PlanFile({}, (SitePlan("causal", "window:size=8"),))
    require_all_planned(plan, plan.assignments([site], source_hash=""))
    with pytest.raises(ReplacementError, match="which declines it: scores have more than a mask"):
        sinks = replace(site, has_sinks=True)
        require_all_planned(plan, plan.assignments([sinks], source_hash=""))


def test_a_weight_that_is_not_there_is_an_error() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="empty")
    with pytest.raises(ReplacementError, match="'w' of shape .* is not in the graph"):
        replace_weights(ir.Model(graph, ir_version=10), {"w": np.zeros((2, 2), np.float32)})
