"""``inspect``, ``convert`` and ``plan``: what reads a source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from subquad.commands.frame import is_artifact, load_pipeline, print_json, progress_shown
from subquad.commands.options import (
    IntList,
    cache_option,
    common_options,
    planning_options,
    require_sites_option,
    seed_option,
)
from subquad.commands.tables import (
    open_console,
    print_branches,
    print_distillation,
    print_gpu_kernels,
    print_heads,
    print_kernels,
    print_plan,
    print_proofs,
    print_rejections,
    print_sites,
    print_source,
    size_text,
)
from subquad.runtime.errors import OutputError, ReplacementError, UsageError


@click.command(
    epilog="""\b
Examples:
  subquad inspect ./bert-base
  subquad inspect model.onnx --json
  subquad inspect out                     what became of every attention
  subquad inspect ./gpt --data text.txt   and where its heads look
"""
)
@click.argument("source", metavar="SOURCE|ARTIFACT")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Sample inputs to take statistics of the heads on: a text, .jsonl or .npz file, or a "
    "folder of such files; may repeat.",
)
@click.option(
    "--lengths", type=IntList(), default="1024", show_default=True, help="Tokens per row of them."
)
@click.option(
    "--require-sites",
    metavar="N|all",
    help="Fail (exit 5) unless this many attentions were recognised; all = none was declined.",
)
@cache_option
@common_options
def inspect(
    source: str,
    data: tuple[Path, ...],
    lengths: tuple[int, ...],
    require_sites: str | None,
    cache: bool,
    as_json: bool,
) -> None:
    """Show every attention that is found, with its proved mask; writes nothing."""
    if data and is_artifact(source):
        raise UsageError("--data needs the source: an artifact's heads are those of its source.")
    if cache and (data or is_artifact(source)):
        raise UsageError("--cache goes with a source and without --data.")
    if data:
        import tempfile

        load_pipeline()  # says which extra is missing
        from subquad.converter.head_statistics import inspect_heads

        with (
            progress_shown() as progress,
            tempfile.TemporaryDirectory(prefix="subquad-") as scratch,
        ):
            report = inspect_heads(
                source, data=data, lengths=lengths, work=Path(scratch, "work"), progress=progress
            )
    elif is_artifact(source):
        from subquad.runtime.artifact import open_manifest
        from subquad.runtime.jsonable import json_ready

        _, manifest = open_manifest(source)
        report = json_ready(manifest)
    else:
        with progress_shown() as progress:
            pipeline = load_pipeline()
            report = pipeline.inspect_source(source, cache=cache, progress=progress).to_json()
    if as_json:
        print_json(report)
    else:
        console = open_console()
        print_source(console, report)
        print_sites(console, report["sites"], converted=is_artifact(source))
        print_proofs(console, report["sites"])
        print_rejections(console, report["rejections"])
        if data:
            print_heads(console, report)
    if require_sites is not None:
        _check_required(report, require_sites)


def _check_required(report: Mapping[str, Any], required: str) -> None:
    """Whether a report lists as many attentions as ``--require-sites`` asks for."""
    found, declined = len(report["sites"]), report["rejections"]
    if required != "all" and not required.isdecimal():
        raise UsageError(f"--require-sites must be a number or 'all', got {required!r}")
    if required == "all" and declined:
        raise ReplacementError(f"{len(declined)} attention-like subgraphs were declined, see above")
    if required != "all" and found < int(required):
        raise ReplacementError(f"{found} attentions were recognised, {required} required")


@click.command(
    epilog="""\b
Examples:
  subquad convert ./my-model out                   exact: outputs stay the same
  subquad convert ./my-model out --force elu --sites 2-5
  subquad convert ./my-model out --force window:128@0-3 --force elu@4
  subquad convert my_package.models:build out
  subquad convert ./my-model out --budget ppl=1% --lengths 4096 --data texts/
  subquad convert ./my-model out --plan plan.json
  subquad convert ./my-gpt out --cache             to generate text with

\b
SITES are indices, ranges or patterns on names: 0,2-5,*layers.3*
`subquad inspect` lists indices and names.
"""
)
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--force",
    multiple=True,
    metavar="METHOD[:PARAMS][@SITES]",
    help="Replace attentions by this method; repeat it for several. Others stay exact.",
)
@click.option("--sites", metavar="SITES", help="Where the one --force without @SITES applies.")
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    help="Plan of `subquad plan`, as it is or edited, instead of --force.",
)
@planning_options
@click.option(
    "--distil",
    metavar="SETTINGS",
    is_flag=False,
    flag_value="",
    help="Train low-rank changes of the projections of replaced attentions on --data and merge "
    "them: rank=8,steps=200,learning_rate=0.002.",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="With --force or --plan: fit the tensors of methods that learn on --data; --distil and "
    "--budget do so anyway.",
)
@click.option(
    "--refit/--no-refit",
    default=True,
    show_default=True,
    help="With --budget, or --plan and --data: refit output projections where that helps on "
    "held-out data.",
)
@click.option("--overwrite", is_flag=True, help="Replace an artifact that is already there.")
@require_sites_option
@click.option(
    "--allow-declined",
    is_flag=True,
    help="Keep an attention exact if a forced method declines it, instead of failing (exit 5).",
)
@click.option(
    "--strict-causal",
    is_flag=True,
    help="Refuse methods that are causal only between blocks of tokens.",
)
@click.option(
    "--kernels",
    type=click.Choice(["none", "cpu"]),
    help="Compiled kernels in the artifact; where they cannot be built, it says so and has ONNX "
    "functions alone [default: $SUBQUAD_KERNELS, else cpu].",
)
@click.option(
    "--require-kernels",
    is_flag=True,
    help="Fail (exit 6) unless every attention gets a kernel, for every --target; without one it "
    "implies --kernels cpu.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="cuda:ARCH",
    help="Also compile CUDA kernels for this GPU, e.g. cuda:sm_90; may repeat. Needs nvcc, no GPU.",
)
@click.option(
    "--tuning/--no-tuning",
    default=True,
    show_default=True,
    help="Take kernel parameters from tuning records, your own and those of the package.",
)
@click.option(
    "--tuning-records",
    multiple=True,
    type=click.Path(path_type=Path),
    help="File that `subquad tune` wrote; wins over the others. May repeat.",
)
@click.option(
    "--tuning-length",
    type=click.IntRange(min=1),
    help="Length to look records up for [default: the model's longest, at most 4096].",
)
@cache_option
@seed_option
@common_options
def convert(
    source: str,
    output: Path,
    force: tuple[str, ...],
    sites: str | None,
    plan: Path | None,
    budget: tuple[str, ...],
    minimize: str,
    lengths: tuple[int, ...],
    batch: int,
    data: tuple[Path, ...],
    calibration_tokens: int | None,
    heldout_tokens: int | None,
    methods: tuple[str, ...] | None,
    work: Path | None,
    threads: int | None,
    distil: str | None,
    calibrate: bool,
    refit: bool,
    overwrite: bool,
    require_sites: str | None,
    allow_declined: bool,
    strict_causal: bool,
    kernels: str | None,
    require_kernels: bool,
    targets: tuple[str, ...],
    tuning: bool,
    tuning_records: tuple[Path, ...],
    tuning_length: int | None,
    cache: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Convert SOURCE into the artifact directory OUTPUT."""
    if budget and (force or plan):
        raise UsageError("--budget makes a plan; it goes neither with --force nor with --plan.")
    refits = refit and plan is not None and bool(data)
    if refits and (targets or cache):
        raise UsageError(
            "--plan with --data refits projections, which goes neither with --target nor with "
            "--cache: drop --data, or give --no-refit."
        )
    trains = calibrate or distil is not None or refits
    _refuse_unused(bool(budget), trains, with_plan=plan is not None)
    if targets and (budget or trains):
        raise UsageError(
            "--target goes neither with --budget nor with --distil or --calibrate: make a plan "
            "with `subquad plan`, then convert with --plan and --target."
        )
    if cache and trains:
        raise UsageError(
            "--cache goes neither with --distil nor with --calibrate: training runs the graph "
            "without a cache."
        )
    shared: dict[str, Any] = {
        "overwrite": overwrite,
        "require_sites": require_sites,
        "kernels": kernels,
        "require_kernels": require_kernels,
    }
    pipeline = load_pipeline()
    from subquad.converter.cpu_kernels import will_have_kernels
    from subquad.kernels.tuning.choose import TuningOptions

    shared["tuning"] = TuningOptions(tuning, tuning_records, tuning_length)
    with progress_shown() as progress:
        if budget:
            request = _plan_request(
                budget=budget,
                minimize=minimize,
                lengths=lengths,
                batch=batch,
                data=data,
                seed=seed,
                strict_causal=strict_causal,
                methods=methods,
                calibration_tokens=calibration_tokens,
                heldout_tokens=heldout_tokens,
                refit=refit,
                threads=threads,
                kernels=kernels == "cpu" or require_kernels,
                artifact_kernels=will_have_kernels(kernels),
            )
            from subquad.converter.planning import convert_with_budget

            converted = convert_with_budget(
                source,
                output,
                request,
                work=work,
                distil=None if distil is None else _distil_settings(distil, seed),
                cache=cache,
                progress=progress,
                **shared,
            )
        elif trains:
            converted = _distilling().convert_and_distil(
                source,
                output,
                load_pipeline().Selection.of(
                    _merge_sites(force, sites),
                    None,
                    plan,
                    strict_causal=strict_causal,
                    allow_declined=allow_declined,
                ),
                _distilling().DistilRequest(
                    None if distil is None else _distil_settings(distil, seed),
                    lengths=lengths,
                    data=data,
                    seed=seed,
                    threads=threads,
                    refit=refits,
                    **{
                        name: count
                        for name, count in (
                            ("calibration_tokens", calibration_tokens),
                            ("heldout_tokens", heldout_tokens),
                        )
                        if count is not None
                    },
                ),
                work=work,
                progress=progress,
                **shared,
            )
        else:
            converted = pipeline.convert(
                source,
                output,
                force=_merge_sites(force, sites),
                plan=plan,
                allow_declined=allow_declined,
                seed=seed,
                strict_causal=strict_causal,
                targets=targets,
                cache=cache,
                progress=progress,
                **shared,
            )
    report = converted.to_json()
    if budget and report["planning"]["synthetic"]:
        click.secho(f"warning: {report['planning']['data']}", fg="yellow", err=True)
    elif trains and not data:
        click.secho(
            "warning: without --data, what is fitted is fitted to made-up inputs, which are not "
            "like real ones",
            fg="yellow",
            err=True,
        )
    if as_json:
        print_json(report)
        return
    console = open_console()
    print_source(console, report)
    print_sites(console, report["sites"], converted=True)
    print_rejections(console, report["rejections"])
    if budget:
        print_plan(console, report["planning"])
    if distil is not None:
        print_distillation(console, report["distillation"])
    print_branches(console, report.get("branches", ()))
    print_kernels(console, report["kernels"], len(report["sites"]))
    print_gpu_kernels(console, report["sites"])
    seconds = sum(report["seconds"].values())
    peak = report.get("peak_rss_bytes")
    console.print(f"wrote {report['output']} in {seconds:.1f} s, peak memory {size_text(peak)}")
    console.print(f"next: subquad validate {report['output']}", style="dim")
    if cache:
        console.print(f"      subquad generate {report['output']} --text TEXT", style="dim")


@click.command(
    epilog="""\b
Examples:
  subquad plan ./my-model --budget ppl=1% --lengths 4096,8000 --data texts/ --plan plan.json
  subquad plan ./my-bert --budget cosine=0.99 --lengths 512 --data texts.jsonl
  subquad convert ./my-model out --plan plan.json

\b
Data: texts, .jsonl with {"text": ...} lines, .npz with one array per input, or
folders of them. Half of them is never calibrated on and judges the plan.
Without data, inputs are made up, and the plan is worth as much.
"""
)
@click.argument("source")
@click.option(
    "--plan",
    "output",
    type=click.Path(path_type=Path),
    help="Write the plan to this file, to edit and to pass to `convert --plan`.",
)
@planning_options
@require_sites_option
@click.option(
    "--strict-causal",
    is_flag=True,
    help="Exclude methods that are causal only between blocks of tokens.",
)
@click.option(
    "--kernels",
    type=click.Choice(["none", "cpu"]),
    default="none",
    show_default=True,
    help="Measure with compiled kernels; faster, and as a conversion with them will run.",
)
@seed_option
@common_options
def plan(
    source: str,
    output: Path | None,
    budget: tuple[str, ...],
    minimize: str,
    lengths: tuple[int, ...],
    batch: int,
    data: tuple[Path, ...],
    calibration_tokens: int | None,
    heldout_tokens: int | None,
    methods: tuple[str, ...] | None,
    work: Path | None,
    threads: int | None,
    require_sites: str | None,
    strict_causal: bool,
    kernels: str,
    seed: int,
    as_json: bool,
) -> None:
    """Choose a method for every attention of SOURCE within a budget, without converting."""
    import tempfile

    if output is not None:
        _check_writable(output)  # now, not after hours
    request = _plan_request(
        budget=budget,
        minimize=minimize,
        lengths=lengths,
        batch=batch,
        data=data,
        seed=seed,
        strict_causal=strict_causal,
        methods=methods,
        calibration_tokens=calibration_tokens,
        heldout_tokens=heldout_tokens,
        threads=threads,
        kernels=kernels == "cpu",
    )
    from subquad.converter.planning import plan_source

    with (
        progress_shown() as progress,
        tempfile.TemporaryDirectory(prefix="subquad-plan-") as scratch,
    ):
        place = work or Path(scratch, "work")
        report = plan_source(
            source, request, work=place, require_sites=require_sites, progress=progress
        )
    if output is not None:
        report.plan.write(output)
    if report.synthetic:
        click.secho(f"warning: {report.data}", fg="yellow", err=True)
    if as_json:
        print_json(report.to_json())
        return
    console = open_console()
    print_plan(console, report.to_json())
    if output is not None:
        console.print(f"wrote {output}; next: subquad convert {source} OUT --plan {output}")


_OF_A_PLAN = ("minimize", "batch", "methods")
_OF_DATA = ("data", "lengths", "calibration_tokens", "heldout_tokens", "work")


def _refuse_unused(plans: bool, trains: bool, *, with_plan: bool) -> None:
    """Flags that would be ignored: an attention that was not fitted must not look as if it was."""
    ctx = click.get_current_context()
    # With --no-refit a plan may come with the flags that it was made with.
    of_data = () if trains or with_plan else _OF_DATA
    unused = () if plans else (*_OF_A_PLAN, *of_data)
    for name in unused:
        if ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT):
            needed = "--budget" if name in _OF_A_PLAN else "--budget, --calibrate or --distil"
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect without {needed}: give one of them, or "
                f"drop it."
            )


def _check_writable(output: Path) -> None:
    if not output.parent.is_dir():
        raise UsageError(f"Cannot write {output}: {output.parent} is no directory.")
    if output.exists() and not output.is_file():
        raise UsageError(f"Cannot write {output}: it is no regular file. Name a new file.")
    if not os.access(output.resolve().parent, os.W_OK):
        raise OutputError(f"Cannot write {output}: {output.parent} is not writable.")


def _distilling() -> Any:
    load_pipeline()  # says which extra is missing
    from subquad.converter import distilling

    return distilling


def _distil_settings(text: str, seed: int) -> Any:
    from subquad.passes.repair.distil import DistilSettings

    return DistilSettings.parse(text, seed)


def _plan_request(**options: Any) -> Any:
    load_pipeline()  # says which extra is missing
    from subquad.converter.plan_request import PlanRequest

    given = {key: value for key, value in options.items() if value is not None}
    return PlanRequest(**given)


def _merge_sites(force: Sequence[str], sites: str | None) -> tuple[str, ...]:
    """``force`` with ``--sites`` as the ``@SITES`` of the one method it can only mean."""
    if sites is None:
        return tuple(force)
    if len(force) != 1:
        raise UsageError(
            f"--sites needs exactly one --force, got {len(force)}. For several methods, write "
            "--force METHOD@SITES for each."
        )
    if "@" in force[0]:
        raise UsageError(f"--force {force[0]} already names its sites; drop --sites.")
    return (f"{force[0]}@{sites}",)
