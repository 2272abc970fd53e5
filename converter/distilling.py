"""Calibration and distillation inside a conversion: the exact artifact teaches the rewritten model.

Methods that learn are fitted to the exact activations first, attention by attention, and
projections are refitted where that is asked for; training starts from there and moves the
projections as well.
Then the branches of hybrids are switched off, one at a time, for the report.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.converter.atomic import atomic_directory
from subquad.converter.base_artifact import base_artifact, reopen
from subquad.converter.branching import branch_runner, with_fits
from subquad.converter.conversion_report import ConversionReport, StageClock
from subquad.converter.cpu_kernels import KernelKind, chosen_kernels
from subquad.converter.pipeline import Repair, Selection, write_artifact
from subquad.converter.planned_cache import replace_weights
from subquad.converter.refitting import Refitted, refit_plan
from subquad.converter.reports import write_reports
from subquad.converter.work_folder import WorkFolder, require_apart
from subquad.kernels.tuning.choose import DEFAULT_TUNING, TuningOptions
from subquad.passes.calibrate.branches import ablate
from subquad.passes.calibrate.data import (
    CALIBRATION_TOKENS,
    HELDOUT_TOKENS,
    CalibrationData,
    open_data,
)
from subquad.passes.calibrate.engine import Engine
from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.calibrate.score import Scorer
from subquad.passes.calibrate.segments import load_split
from subquad.passes.plan import DENSE, Assignment
from subquad.passes.repair.adapters import repair_weights
from subquad.passes.repair.distil import DistilSettings, distil
from subquad.runtime.artifact import load
from subquad.runtime.manifest import MODEL_NAME, Manifest
from subquad.runtime.samples import Layout
from subquad.runtime.session import QUIET_THREADS

if TYPE_CHECKING:
    from subquad.converter.conversion_report import Progress
    from subquad.converter.pipeline import Source


@dataclass(frozen=True)
class DistilRequest:
    """Training asked for beside forced methods or a plan.

    Attributes:
        settings: how long and how fast; ``None``: no training.
        refit: whether output projections are refitted; see ``passes/calibrate/refit.py``.
        lengths: tokens per row.
        data: files or folders; none = made-up inputs.
        seed: decides what is held out.
        calibration_tokens, heldout_tokens: to train on, and to judge by, per length.
        threads: of the teacher.
    """

    settings: DistilSettings | None
    lengths: tuple[int, ...] = (512,)
    data: tuple[Path, ...] = ()
    seed: int = 0
    calibration_tokens: int = CALIBRATION_TOKENS
    heldout_tokens: int = HELDOUT_TOKENS
    threads: int | None = None
    refit: bool = False


def convert_and_distil(
    source: Source,
    output: Path,
    selection: Selection,
    request: DistilRequest,
    *,
    work: Path | None = None,
    overwrite: bool = False,
    require_sites: str | None = None,
    kernels: KernelKind | None = None,
    require_kernels: bool = False,
    tuning: TuningOptions = DEFAULT_TUNING,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert as ``selection`` says, fit methods that learn, and train what was replaced.

    Args:
        source, output, overwrite, require_sites, kernels, require_kernels, tuning: as
            ``convert``.
        selection: what attentions become.
        request: how to train.
        work: folder for the exact artifact, kept; by default ``OUTPUT.work``, removed at the end.

    Raises:
        what ``convert`` raises; UsageError also for bad data.
    """
    kind = chosen_kernels(kernels)
    clock = StageClock(progress)
    place = work or output.parent / f"{output.name}.work"
    require_apart(place, output)
    with ExitStack() as held:
        with atomic_directory(output, overwrite=overwrite) as folder:
            results = WorkFolder(place)
            held.enter_context(results.alone())
            with clock.stage("base"):
                base, manifest = base_artifact(
                    source,
                    results,
                    kernels=kind,
                    require_sites=require_sites,
                    progress=progress,
                )
            with clock.stage("data"):
                data = open_data(
                    manifest,
                    base,
                    paths=request.data,
                    lengths=request.lengths,
                    seed=request.seed,
                    calibration_tokens=request.calibration_tokens,
                    heldout_tokens=request.heldout_tokens,
                )
            traced, raised = reopen(base, manifest)
            plan = selection.assignments(raised, manifest.source["hash"])
            engine = Engine(
                load_split(base, MODEL_NAME, raised.sites),
                base,
                threads=request.threads,
                kernels=kernels == "cpu",
            )
            with clock.stage("calibrate"):
                plan = with_fits(engine, plan, data.calibration, progress)
            facts: dict[str, Any] = {}
            if request.refit:
                with clock.stage("refit"):
                    refit = _refit(engine, manifest, plan, data)
                replace_weights(traced.model, refit.weights)
                facts = {"refit": refit.facts}
            trained = distillation(base, manifest, data, request.settings, request.threads, clock)
            report = write_artifact(
                folder,
                traced,
                raised,
                plan,
                clock,
                shown_as=output,
                seed=request.seed,
                kernels=kind,
                require_kernels=require_kernels,
                tuning=tuning,
                facts=facts,
                repair=_with_branches(trained, engine, manifest, data),
            )
        write_reports(output, report)
        if work is None:
            shutil.rmtree(place, ignore_errors=True)
    return report


def _refit(
    engine: Engine, manifest: Manifest, assignments: Sequence[Assignment], data: CalibrationData
) -> Refitted:
    """Projections that bring the replaced model nearer to the exact one."""
    by_name = {assignment.site.name: assignment for assignment in assignments}
    ordered = [by_name[split_site.site.name] for split_site in engine.split.sites]
    plan = {rank: a for rank, a in enumerate(ordered) if a.method.name != DENSE}
    if not plan:
        return Refitted({}, {"why": "nothing was replaced"})
    scorer = Scorer(manifest, data.heldout)
    feeds = [batch.feeds for batch in data.heldout]
    scorer.teach(lambda finish: engine.run(feeds, {}, finish=finish))
    before = scorer.score(lambda finish: engine.run(feeds, plan, finish=finish))
    return refit_plan(engine, plan, data, scorer, before)


def distillation(
    base: Path,
    manifest: Manifest,
    data: CalibrationData,
    settings: DistilSettings | None,
    threads: int | None,
    clock: StageClock,
) -> Repair:
    """The repair stage that trains on ``data`` with the exact artifact in ``base`` as teacher.

    It says which attentions have fitted tensors, too.
    """

    def repair(model: ir.Model, plan: Sequence[Assignment]) -> Mapping[str, Any]:
        fits = [
            {"name": a.site.name, "method": a.text, **a.fitted.facts()}
            for a in plan
            if a.fitted is not None
        ]
        return {"calibration": fits, **train(model, plan)}

    def train(model: ir.Model, plan: Sequence[Assignment]) -> Mapping[str, Any]:
        if settings is None:
            return {}
        replaced = [a.site.name for a in plan if a.method.name != DENSE]
        if not replaced:
            return {"distillation": None}
        teacher = load(base, threads=threads, verify=False, config=QUIET_THREADS)
        result = distil(
            model,
            repair_weights(model, replaced),
            teacher.run,
            manifest.outputs,
            Layout.of(manifest),
            [batch.feeds for batch in data.calibration],
            [batch.feeds for batch in data.heldout],
            settings,
            clock.progress,
        )
        about = {"data": data.description, "synthetic": data.synthetic}
        return {"distillation": result.to_json() | about}

    return repair


def _with_branches(
    trained: Repair, engine: Engine, manifest: Manifest, data: CalibrationData
) -> Repair:
    """``trained``, and after it the branches of hybrids, with the weights that they have then."""

    def repair(model: ir.Model, plan: Sequence[Assignment]) -> Mapping[str, Any]:
        facts = trained(model, plan)
        changed = engine.fresh()
        replaced = [a.site.name for a in plan if a.method.name != DENSE]
        changed.weights = {
            name: _values(model, name) for name in repair_weights(model, replaced).projections
        }
        by_name = {assignment.site.name: assignment for assignment in plan}
        present = {}
        for rank, split_site in enumerate(engine.split.sites):
            assignment = by_name[split_site.site.name]
            if assignment.method.name == DENSE:
                continue
            names = {key: f"{assignment.site.name}.{key}" for key in assignment.tensors()}
            tensors = {key: _values(model, name) for key, name in names.items()}
            present[rank] = replace(assignment, fitted=Fitted(tensors) if tensors else None)
        found = ablate(present, branch_runner(manifest, engine, changed, data.heldout))
        return {**facts, "branches": [seen.to_json() for _, seen in sorted(found.items())]}

    return repair


def _values(model: ir.Model, name: str) -> NDArray[Any]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.array(tensor.numpy())
