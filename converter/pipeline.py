"""From a source to an artifact: the stages in order.

| stage | in -> out |
|---|---|
| trace | source -> ``TracedModel`` (opset 24, dynamic batch and length) |
| raise | no-ops removed; attention subgraphs -> ``ai.subquad`` nodes with proved sites |
| plan | sites + requests -> one assignment per site |
| replace | raised nodes -> the operators their methods lower to |
| kernels | on request: operators -> TVM kernels in custom-op libraries; the rest keeps out |
| emit | models, weights, companions, manifest -> a temporary directory |
| check | the written artifact runs, in a child process |
| publish | the directory is renamed into place |
| report | ``report.json`` and ``report.html`` are put into it |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from subquad import __version__
from subquad.converter.atomic import atomic_directory
from subquad.converter.check import check_artifact
from subquad.converter.conversion_report import (
    ConversionReport,
    InspectionReport,
    Progress,
    StageClock,
)
from subquad.converter.cpu_kernels import KernelKind, chosen_kernels, kernel_facts
from subquad.converter.emit import copy_files, place_files, write_models
from subquad.converter.gpu import gpu_records, template_name, write_gpu_kernels
from subquad.converter.reports import write_reports
from subquad.converter.site_records import carried_signature, describe_variants, site_record
from subquad.converter.source import trace
from subquad.converter.traced import TracedModel
from subquad.kernels.gpu import GpuTarget
from subquad.kernels.host.build import (
    LIBRARY_NAME,
    KernelBuild,
    build_kernels,
)
from subquad.kernels.host.gpu_build import build_gpu_kernels, parse_target
from subquad.kernels.kernel import CPU_TEMPLATES
from subquad.kernels.tuning.choose import DEFAULT_TUNING, TunedParameters, TuningOptions
from subquad.passes.canonicalise import canonicalise
from subquad.passes.carry_state import StateCarrier
from subquad.passes.lower import lower_sites
from subquad.passes.methods import method_text
from subquad.passes.plan import Assignment, Request, make_plan
from subquad.passes.plan_file import PlanFile
from subquad.passes.raise_attention import RaisedSites, raise_attention
from subquad.passes.replace import SiteVariants, replace_sites
from subquad.runtime.errors import (
    Rejection,
    ReplacementError,
    TargetUnavailableError,
    UnsupportedModelError,
    UsageError,
)
from subquad.runtime.kernel_library import this_platform
from subquad.runtime.machine import peak_rss_bytes
from subquad.runtime.manifest import (
    MANIFEST_NAME,
    MODEL_NAME,
    REFERENCE_NAME,
    KernelLibrary,
    Manifest,
)

if TYPE_CHECKING:
    import torch

    from subquad.converter.module import ModuleSource

    Source = str | Path | torch.nn.Module | ModuleSource

Repair = Callable[[ir.Model, Sequence[Assignment]], Mapping[str, Any]]

_PACKAGES = (
    "apache-tvm",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Selection:
    """What the user said that attentions shall become.

    Attributes:
        requests: from ``--force``.
        plan: or a plan file.
        strict_causal, allow_declined: as ``convert``.
    """

    requests: tuple[Request, ...]
    plan: PlanFile | None
    strict_causal: bool
    allow_declined: bool

    @staticmethod
    def of(
        force: Sequence[str] = (),
        sites: str | None = None,
        plan: Path | PlanFile | None = None,
        *,
        strict_causal: bool = False,
        allow_declined: bool = False,
    ) -> Selection:
        """Read the texts.

        Raises:
            UsageError: unknown method, bad parameter, or texts that contradict each other.
        """
        requests = tuple(Request.parse(text, sites) for text in force)
        for request in requests:
            granularity = request.method.causal_granularity(request.params)
            if strict_causal and granularity != 1:
                raise UsageError(
                    f"method {method_text(request.method, request.params)!r} is causal only in "
                    f"blocks of {granularity} tokens; drop --strict-causal to allow it"
                )
        if sites is not None and not requests:
            raise UsageError("a site pattern needs a method to apply: give --force METHOD as well")
        if plan is not None and requests:
            raise UsageError("a plan says what every attention becomes; drop --force or --plan")
        read = PlanFile.read(plan) if isinstance(plan, Path) else plan
        return Selection(requests, read, strict_causal, allow_declined)

    def assignments(self, raised: RaisedSites, source_hash: str) -> list[Assignment]:
        """One per site.

        Raises:
            UsageError: a pattern matches nothing, or the plan is of another source.
            ReplacementError: a method declines its site, and that is not allowed.
        """
        if self.plan is None:
            assignments = make_plan(raised.sites, self.requests)
        else:
            assignments = self.plan.assignments(
                raised.sites, source_hash=source_hash, strict_causal=self.strict_causal
            )
        if not self.allow_declined:
            _refuse_declined(assignments)
        return assignments


def inspect_source(
    source: Source, *, cache: bool = False, progress: Progress | None = None
) -> InspectionReport:
    """Trace ``source`` and report every attention, proved or declined, without writing.

    Raises:
        UsageError, UnsupportedModelError: as ``trace``.
    """
    clock = StageClock(progress)
    traced, raised = read_source(source, clock, cache=cache)
    return InspectionReport(
        source=_source(traced),
        sites=tuple(asdict(site_record(a)) for a in make_plan(raised.sites, ())),
        rejections=_rejections(raised.rejections),
        seconds=clock.seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )


def convert(
    source: Source,
    output: Path,
    *,
    force: Sequence[str] = (),
    sites: str | None = None,
    plan: Path | PlanFile | None = None,
    overwrite: bool = False,
    require_sites: str | None = None,
    allow_declined: bool = False,
    seed: int = 0,
    strict_causal: bool = False,
    kernels: KernelKind | None = None,
    require_kernels: bool = False,
    targets: Sequence[str] = (),
    cache: bool = False,
    templates: Mapping[str, str] = CPU_TEMPLATES,
    tuning: TuningOptions = DEFAULT_TUNING,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert ``source`` into the artifact directory ``output``.

    Args:
        source: a Hugging Face folder, an ``.onnx`` file, ``"package.module:factory"``, an
            ``nn.Module`` or a ``ModuleSource``.
        output: created; must be empty or absent unless ``overwrite``.
        force: ``METHOD[:params][@SITES]`` texts; later ones win. Sites not named stay exact.
        sites: pattern for texts without ``@SITES``.
        plan: a plan, as ``plan_source`` makes it, instead of ``force``.
        overwrite: replace an older artifact, at the very end.
        require_sites: ``"all"`` or a number: fewer raised sites are an error.
        allow_declined: a forced method that declines a site is reported, not an error.
        seed: recorded in the manifest; drives every random choice.
        strict_causal: exclude methods that are causal only at a granularity above one token.
        kernels: ``cpu`` adds compiled kernels where they can be built. What has none, and why, is
            in the report; it runs as ONNX functions. Default: see ``chosen_kernels``.
        require_kernels: an attention without a kernel is an error, for every target; implies
            ``kernels="cpu"`` where there are no targets.
        targets: GPUs to compile kernels for beside the graph, e.g. ``cuda:sm_90``; no GPU needed.
        cache: a decoder takes and returns what earlier tokens left, for generation; see
            ``docs/decoding.md``.
        templates: operator -> ``module:attribute`` of the template of its kernels.
        tuning: which records the parameters of the kernels come from.
        progress: called with each stage's name.

    Raises:
        UsageError: bad argument, unknown method, pattern without match.
        UnsupportedModelError: the source cannot be read, or holds no attention.
        ReplacementError: a forced method was declined, or too few sites were raised.
        TargetUnavailableError: kernels are required, and one cannot be built.
        OutputError: ``output`` cannot be written.
    """
    kernels = chosen_kernels(kernels)
    gpus = tuple(dict.fromkeys(parse_target(text) for text in targets))
    selection = Selection.of(
        force, sites, plan, strict_causal=strict_causal, allow_declined=allow_declined
    )
    needed = parse_required(require_sites)
    if cache and is_encoder_decoder_folder(source):
        from subquad.converter.pair import convert_pair

        if force or plan is not None or allow_declined:
            raise UsageError(
                "an encoder-decoder with a cache stays exact so far; drop --force and --plan, or "
                "convert it without --cache"
            )
        return convert_pair(
            Path(str(source)),
            output,
            overwrite=overwrite,
            needed=needed,
            progress=progress,
            seed=seed,
            kernels=kernels,
            require_kernels=require_kernels,
            gpus=gpus,
            templates=templates,
            tuning=tuning,
        )
    clock = StageClock(progress)
    with atomic_directory(output, overwrite=overwrite) as folder:
        traced, raised = read_source(source, clock, cache=cache)
        require_raised(raised, needed)
        with clock.stage("plan"):
            assignments = selection.assignments(raised, traced.source_hash)
        report = write_artifact(
            folder,
            traced,
            raised,
            assignments,
            clock,
            shown_as=output,
            seed=seed,
            kernels=kernels,
            require_kernels=require_kernels,
            gpus=gpus,
            templates=templates,
            tuning=tuning,
        )
        if progress is not None:
            progress("publish", None)
    write_reports(output, report)
    return report


def write_artifact(
    folder: Path,
    traced: TracedModel,
    raised: RaisedSites,
    plan: Sequence[Assignment],
    clock: StageClock,
    *,
    shown_as: Path,
    seed: int,
    kernels: KernelKind,
    require_kernels: bool = False,
    gpus: Sequence[GpuTarget] = (),
    templates: Mapping[str, str] = CPU_TEMPLATES,
    tuning: TuningOptions = DEFAULT_TUNING,
    facts: Mapping[str, Any] | None = None,
    repair: Repair | None = None,
    finish: Callable[[Path], Mapping[str, Any]] | None = None,
) -> ConversionReport:
    """Carry out ``plan`` and write the artifact into the empty ``folder``.

    Args:
        folder: see ``atomic_directory``.
        traced, raised: the source; its model is modified.
        plan: one assignment per site.
        clock: takes the seconds of each stage.
        shown_as: where ``folder`` will be.
        seed, kernels, require_kernels, templates, tuning: as ``convert``.
        gpus: its targets.
        facts: further entries of the report.
        repair: changes weights of the rewritten model; returns more entries.
        finish: looks at the checked artifact, may refuse it, and returns more entries.

    Returns:
        The report; ``write_reports`` puts it into the artifact once that is in its place.

    Raises:
        UnsupportedModelError: the written artifact fails its check.
        TargetUnavailableError: kernels are required, and one cannot be built.
    """
    cached = any(assignment.site.cache is not None for assignment in plan)
    carrier = StateCarrier(traced.model) if cached else None
    with clock.stage("replace"):
        variants = replace_sites(traced.model, plan, carrier)
    inputs, outputs = carried_signature(traced, carrier)
    repaired: Mapping[str, Any] = {}
    if repair is not None:
        with clock.stage("repair"):
            repaired = repair(traced.model, plan)
    built, parameters = KernelBuild(), TunedParameters(templates)
    if require_kernels and not gpus:
        kernels = "cpu"
    if kernels == "cpu":
        with clock.stage("kernels"):
            parameters = tuning.parameters(templates, traced.max_length)
            built = build_kernels(
                [v for site in variants for v in site], templates=templates, params=parameters.of
            )
            if require_kernels:
                _refuse_missing_kernels(plan, variants, built.declined)
    gpu_builds = []
    for gpu in gpus:
        with clock.stage(f"kernels {gpu.name}"):
            gpu_builds.append(build_gpu_kernels([v for site in variants for v in site], gpu))
            if require_kernels:
                _refuse_missing_kernels(plan, variants, gpu_builds[-1].declined)
    names = {key: template_name(place) for key, place in built.served.items()}
    lowered = lower_sites(traced.model, variants, names, built.declined)
    records = tuple(
        site_record(
            assignment,
            site,
            describe_variants(of_site, built, parameters),
            gpu_records(of_site, gpu_builds),
            "" if carrier is None else carrier.keeps.get(assignment.site.name, ""),
        )
        for assignment, site, of_site in zip(plan, lowered, variants, strict=True)
    )
    with clock.stage("emit"):
        files, libraries = _write_libraries(built, folder)
        files |= write_gpu_kernels(gpu_builds, folder)
        files |= _write(traced, folder)
        manifest = Manifest(
            source=_source(traced),
            versions=_versions(),
            seed=seed,
            inputs=inputs,
            outputs=outputs,
            reference_inputs=() if inputs == traced.inputs else traced.inputs,
            sites=records,
            rejections=_rejections(raised.rejections),
            max_length=traced.max_length,
            files=files,
            kernels=libraries,
        )
        manifest.dump(folder / MANIFEST_NAME)
    with clock.stage("check"):
        check = check_artifact(folder, traced.sample_inputs, traced.sample_outputs)
    seen = finish(folder) if finish is not None else {}
    return ConversionReport(
        source=manifest.source,
        sites=tuple(asdict(record) for record in records),
        rejections=manifest.rejections,
        seconds=clock.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        output=str(shown_as),
        files=files,
        check=check,
        facts={
            "kernels": kernel_facts(kernels, built, records),
            **(facts or {}),
            **repaired,
            **seen,
        },
    )


def read_source(
    source: Source, clock: StageClock, *, cache: bool = False
) -> tuple[TracedModel, RaisedSites]:
    """Trace and raise; arguments as ``convert``."""
    with clock.stage("trace"):
        traced = trace(source, cache=cache)
    return traced, raise_traced(traced, clock)


def raise_traced(traced: TracedModel, clock: StageClock) -> RaisedSites:
    """Raise what can be proved; modifies the model."""
    with clock.stage("raise"):
        canonicalise(traced.model)
        return raise_attention(traced.model)


def is_encoder_decoder_folder(source: Source) -> bool:
    """Whether it is a Hugging Face folder with an encoder and a decoder."""
    if not isinstance(source, (str, Path)) or not Path(source).is_dir():
        return False
    from subquad.converter.huggingface import is_encoder_decoder

    return is_encoder_decoder(Path(source))


def parse_required(required: str | None) -> int | None:
    """``None``: at least one; a number; -1 for ``all``."""
    if required is None:
        return None
    if required == "all":
        return -1
    if not required.isdecimal():
        raise UsageError(f"--require-sites must be a number or 'all', got {required!r}")
    return int(required)


def require_raised(raised: RaisedSites, needed: int | None) -> None:
    reasons = "; ".join(f"{r.where}: {r.reason}" for r in raised.rejections[:3])
    if needed == -1 and raised.rejections:
        raise ReplacementError(
            f"{len(raised.rejections)} attention-like subgraphs were declined: {reasons}. "
            "`subquad inspect` lists them all."
        )
    if needed is not None and len(raised.sites) < needed:
        raise ReplacementError(
            f"{len(raised.sites)} attentions were raised, {needed} required. {reasons}"
        )
    if not raised.sites:
        detail = f" Declined: {reasons}." if reasons else ""
        raise UnsupportedModelError(
            "No attention was found that could be proved, so there is nothing to convert."
            f"{detail} `subquad inspect` shows every candidate."
        )


def _refuse_declined(plan: Sequence[Assignment]) -> None:
    declined = [a.declined for a in plan if a.declined is not None]
    if declined:
        raise ReplacementError(
            f"the method asked for was declined at {len(declined)} of {len(plan)} sites; "
            f"{declined[0].where}: {declined[0].reason}. "
            "Select other sites (--force METHOD@SITES, or in the plan), or pass --allow-declined "
            "to keep those exact."
        )


def _refuse_missing_kernels(
    plan: Sequence[Assignment],
    variants: Sequence[SiteVariants],
    declined: Mapping[tuple[str, str], Rejection],
) -> None:
    missing = [
        (assignment.site.name, declined[key].reason)
        for assignment, of_site in zip(plan, variants, strict=True)
        for variant in of_site
        if (key := (variant.op_type, variant.overload)) in declined
    ]
    if missing:
        raise TargetUnavailableError(
            f"kernels are required, but {len({name for name, _ in missing})} of {len(plan)} "
            "attentions have none; "
            f"{missing[0][0]}: {missing[0][1]}"
        )


def _write_libraries(
    built: KernelBuild, folder: Path
) -> tuple[dict[str, dict[str, Any]], tuple[KernelLibrary, ...]]:
    """Put the libraries in their places; returns the file records and the manifest's entries."""
    system = this_platform()
    libraries = {
        f"kernels/{library.target.name}/{LIBRARY_NAME}": library for library in built.libraries
    }
    files = place_files(folder, {name: library.path for name, library in libraries.items()})
    entries = tuple(
        KernelLibrary(library.target.name, system, name, library.target.flags)
        for name, library in libraries.items()
    )
    return files, entries


def _write(traced: TracedModel, folder: Path) -> dict[str, dict[str, Any]]:
    """Models, weights and companions; returns the file records."""
    models = {MODEL_NAME: traced.model, REFERENCE_NAME: traced.reference}
    for model in models.values():
        # Exporters record stack traces with the paths of the machine that traced.
        common_passes.ClearMetadataAndDocStringPass()(model)
        model.producer_name, model.producer_version = "subquad", __version__
    return write_models(folder, models) | copy_files(folder, traced.companions)


def _rejections(rejections: Sequence[Rejection]) -> tuple[dict[str, str], ...]:
    return tuple({"where": r.where, "reason": r.reason} for r in rejections)


def _source(traced: TracedModel) -> dict[str, Any]:
    return {"kind": traced.kind, "name": traced.source_name, "hash": traced.source_hash}


def _versions() -> dict[str, str]:
    found = {"subquad": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an extra that is not installed: the manifest lists what is
    return found
