"""Distillation inside a conversion: the exact artifact teaches the rewritten model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from subquad.converter.atomic import atomic_directory
from subquad.converter.base_artifact import base_artifact, reopen
from subquad.converter.pipeline import (
    ConversionReport,
    KernelKind,
    Repair,
    Selection,
    StageClock,
    write_artifact,
)
from subquad.converter.work_folder import WorkFolder
from subquad.kernels.tuning.choose import DEFAULT_TUNING, TuningOptions
from subquad.passes.calibrate.data import (
    CALIBRATION_TOKENS,
    HELDOUT_TOKENS,
    CalibrationData,
    open_data,
)
from subquad.passes.plan import DENSE, Assignment
from subquad.passes.repair.adapters import repair_weights
from subquad.passes.repair.distil import DistilSettings, distil
from subquad.runtime.artifact import load
from subquad.runtime.manifest import Manifest
from subquad.runtime.samples import Layout
from subquad.runtime.session import QUIET_THREADS

if TYPE_CHECKING:
    from subquad.converter.pipeline import Progress, Source


@dataclass(frozen=True)
class DistilRequest:
    """Training asked for beside forced methods or a plan.

    Attributes:
        settings: how long and how fast.
        lengths: tokens per row.
        data: files or folders; none = made-up inputs.
        seed: decides what is held out.
        calibration_tokens, heldout_tokens: to train on, and to judge by, per length.
        threads: of the teacher.
    """

    settings: DistilSettings
    lengths: tuple[int, ...] = (512,)
    data: tuple[Path, ...] = ()
    seed: int = 0
    calibration_tokens: int = CALIBRATION_TOKENS
    heldout_tokens: int = HELDOUT_TOKENS
    threads: int | None = None


def convert_and_distil(
    source: Source,
    output: Path,
    selection: Selection,
    request: DistilRequest,
    *,
    work: Path | None = None,
    overwrite: bool = False,
    require_sites: str | None = None,
    kernels: KernelKind = "none",
    require_kernels: bool = False,
    tuning: TuningOptions = DEFAULT_TUNING,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert as ``selection`` says and train what was replaced.

    Args:
        source, output, overwrite, require_sites, kernels, require_kernels, tuning: as
            ``convert``.
        selection: what attentions become.
        request: how to train.
        work: folder for the exact artifact, kept; by default ``OUTPUT.work``, removed at the end.

    Raises:
        what ``convert`` raises; UsageError also for bad data.
    """
    clock = StageClock(progress)
    place = work or output.parent / f"{output.name}.work"
    with atomic_directory(output, overwrite=overwrite) as folder:
        with clock.stage("base"):
            base, manifest = base_artifact(
                source, WorkFolder(place), require_sites=require_sites, progress=progress
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
        report = write_artifact(
            folder,
            traced,
            raised,
            selection.assignments(raised, manifest.source["hash"]),
            clock,
            shown_as=output,
            seed=request.seed,
            kernels=kernels,
            require_kernels=require_kernels,
            tuning=tuning,
            repair=distillation(base, manifest, data, request.settings, request.threads, clock),
        )
    if work is None:
        shutil.rmtree(place, ignore_errors=True)
    return report


def distillation(
    base: Path,
    manifest: Manifest,
    data: CalibrationData,
    settings: DistilSettings,
    threads: int | None,
    clock: StageClock,
) -> Repair:
    """The repair stage that trains on ``data`` with the exact artifact in ``base`` as teacher."""

    def repair(model: ir.Model, plan: Sequence[Assignment]) -> Mapping[str, Any]:
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
