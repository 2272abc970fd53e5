"""The ``subquad`` command: one small function per command, everything heavy imported inside."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from subquad import __version__
from subquad.runtime.errors import ReplacementError, SubquadError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from subquad.kernels.tuning.tune import TuneReport
    from subquad.passes.costs import CostTable
    from subquad.runtime.bench import BenchResult
    from subquad.runtime.doctor import DoctorReport
    from subquad.runtime.kernel_library import KernelMode
    from subquad.runtime.validate import ValidationResult

    Progress = Callable[[str, float | None], None]
    # Generic in the stubs, but not at run time in older releases of click.
    _IntsType = click.ParamType[tuple[int, ...]]
    _NamesType = click.ParamType[tuple[str, ...]]
else:
    _IntsType = _NamesType = click.ParamType

INTERRUPTED = 130


class _Commands(click.Group):
    """Turns errors into one line on stderr and the documented exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SubquadError as error:
            _fail(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was written", err=True)
            ctx.exit(INTERRUPTED)
        except MemoryError:
            _fail(ctx, "out of memory. Use shorter --lengths or a machine with more memory.", 3)


class _IntList(_IntsType):
    """``128,512`` as a tuple of integers; a list of a configuration file as well."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        try:
            return tuple(int(part) for part in parts)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is no comma-separated list of integers.", param, ctx)


class _NameList(_NamesType):
    """``none,left`` as a tuple of names; a list of a configuration file as well."""

    name = "NAME,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            self.fail(f"{value!r} is no comma-separated list of names.", param, ctx)
        return tuple(str(part).strip() for part in parts)


def _read_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Make the table ``[command]`` of a TOML file the defaults of this command's flags."""
    if value is None:
        return
    import tomllib

    try:
        tables = tomllib.loads(value.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{value}: {error}") from error
    for name, table in tables.items():
        if name not in cli.commands or not isinstance(table, dict):
            known = ", ".join(f"[{command}]" for command in cli.commands)
            raise click.UsageError(f"{value}: {name!r} is not one of the tables {known}.")
    settings = {_setting(item): item for item in ctx.command.params if item is not param}
    defaults: dict[str, Any] = {}
    for key, setting in tables.get(ctx.command.name or "", {}).items():
        if key not in settings:
            raise click.UsageError(
                f"{value}: [{ctx.command.name}] has no setting {key!r}; known: "
                f"{', '.join(sorted(settings))}."
            )
        multiple = getattr(settings[key], "multiple", False)
        name = settings[key].name or key
        defaults[name] = [setting] if multiple and not isinstance(setting, list) else setting
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _setting(parameter: click.Parameter) -> str:
    """The name of a parameter in a configuration file: that of its flag, without the dashes."""
    return max(parameter.opts, key=len).removeprefix("--")


def _common(function: Callable[..., None]) -> Callable[..., None]:
    """``--json`` and ``--config``."""
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else."
    )
    config = click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file; its table of this command's name holds the same settings as the flags.",
    )
    return config(as_json(function))


def _execution(function: Callable[..., None]) -> Callable[..., None]:
    """``--provider``, ``--threads`` and ``--kernels``."""
    provider = click.option(
        "--provider",
        default="cpu",
        show_default=True,
        help="cpu, cuda, or another ONNX Runtime provider; refused if it does not really start.",
    )
    threads = click.option(
        "--threads", type=click.IntRange(min=1), help="Threads per operator [default: all cores]."
    )
    kernels = click.option(
        "--kernels",
        type=click.Choice(["auto", "off", "require"]),
        default="auto",
        show_default=True,
        help="Compiled kernels: where the artifact has them, never, or for every attention.",
    )
    return provider(threads(kernels(function)))


_require_sites = click.option(
    "--require-sites",
    metavar="N|all",
    help="Fail (exit 5) unless this many attentions were recognised.",
)
_seed = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of everything random."
)


def _planning(function: Callable[..., None]) -> Callable[..., None]:
    """What a plan is made for; see ``_plan_request``."""
    options = (
        click.option(
            "--budget",
            multiple=True,
            metavar="NAME=VALUE",
            help="Limit to keep on held-out data: ppl=1%, kl=0.02, top1, cosine, rel, or "
            "metric=module:function,drop=0.5; repeat or separate by commas.",
        ),
        click.option(
            "--minimize",
            type=click.Choice(["latency", "memory", "flops"]),
            default="latency",
            show_default=True,
            help="What the plan saves.",
        ),
        click.option(
            "--lengths",
            type=_IntList(),
            default="2048",
            show_default=True,
            help="Tokens per row that matter to you; prices and errors are taken there.",
        ),
        click.option(
            "--batch",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Rows at which prices are taken.",
        ),
        click.option(
            "--data",
            multiple=True,
            type=click.Path(path_type=Path),
            help="Inputs to calibrate on; part of them is held out. A text, .jsonl or .npz file, "
            "or a folder of such files; may repeat.",
        ),
        click.option(
            "--calibration-tokens",
            type=click.IntRange(min=1),
            help="Tokens per length to measure errors on [default: 8192].",
        ),
        click.option(
            "--heldout-tokens",
            type=click.IntRange(min=1),
            help="Tokens per length to judge plans by [default: 16384].",
        ),
        click.option(
            "--methods", type=_NameList(), help="Methods the plan may use [default: all]."
        ),
        click.option(
            "--work",
            type=click.Path(path_type=Path),
            help="Folder for intermediate results; a later run goes on from them.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="Threads per operator."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _distilling() -> Any:
    _converter()  # says which extra is missing
    from subquad.converter import distilling

    return distilling


def _distil_settings(text: str, seed: int) -> Any:
    from subquad.passes.repair.distil import DistilSettings

    return DistilSettings.parse(text, seed)


def _plan_request(**options: Any) -> Any:
    _converter()  # says which extra is missing
    from subquad.converter.planning import PlanRequest

    given = {key: value for key, value in options.items() if value is not None}
    return PlanRequest(**given)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
First steps:
  subquad inspect ./my-model              which attentions are in it?
  subquad convert ./my-model out          exact conversion, nothing changes
  subquad convert ./my-model out --force window:256 --overwrite
  subquad validate out --data heldout.txt --budget ppl=1%
  subquad bench out --lengths 512,4096

\b
Exit codes: 0 pass, 2 usage, 3 unsupported input, 4 accuracy budget missed,
5 a required replacement did not happen, 6 target unavailable, 7 artifact
damaged, 8 output not writable, 130 interrupted.
""",
)
@click.version_option(__version__, prog_name="subquad")
@click.option("-v", "--verbose", is_flag=True, help="Show log messages on stderr.")
def cli(verbose: bool) -> None:
    """Compile trained transformers to sub-quadratic attention, by proof.

    A SOURCE is a Hugging Face model folder, an .onnx file, or module:factory (a Python function
    that returns a torch module). An ARTIFACT is the directory that `subquad convert` writes; it
    runs with ONNX Runtime alone.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )


@cli.command(
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
    "--lengths", type=_IntList(), default="1024", show_default=True, help="Tokens per row of them."
)
@click.option(
    "--require-sites",
    metavar="N|all",
    help="Fail (exit 5) unless this many attentions were recognised; all = none was declined.",
)
@_common
def inspect(
    source: str,
    data: tuple[Path, ...],
    lengths: tuple[int, ...],
    require_sites: str | None,
    as_json: bool,
) -> None:
    """Show every attention that is found, with its proved mask; writes nothing."""
    if data and _is_artifact(source):
        raise UsageError("--data needs the source: an artifact's heads are those of its source.")
    if data:
        import tempfile

        _converter()  # says which extra is missing
        from subquad.converter.head_statistics import inspect_heads

        with (
            _working() as progress,
            tempfile.TemporaryDirectory(prefix="subquad-") as scratch,
        ):
            report = inspect_heads(
                source, data=data, lengths=lengths, work=Path(scratch, "work"), progress=progress
            )
    elif _is_artifact(source):
        from subquad.runtime.artifact import open_manifest
        from subquad.runtime.jsonable import json_ready

        _, manifest = open_manifest(source)
        report = json_ready(manifest)
    else:
        with _working() as progress:
            report = _converter().inspect_source(source, progress=progress).to_json()
    if as_json:
        _print_json(report)
    else:
        console = _console()
        _print_source(console, report)
        _print_sites(console, report["sites"], converted=_is_artifact(source))
        _print_proofs(console, report["sites"])
        _print_rejections(console, report["rejections"])
        if data:
            _print_heads(console, report)
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


@cli.command(
    epilog="""\b
Examples:
  subquad convert ./my-model out                   exact: outputs stay the same
  subquad convert ./my-model out --force elu --sites 2-5
  subquad convert ./my-model out --force window:128@0-3 --force elu@4
  subquad convert my_package.models:build out
  subquad convert ./my-model out --budget ppl=1% --lengths 4096 --data texts/
  subquad convert ./my-model out --plan plan.json

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
@_planning
@click.option(
    "--distil",
    metavar="SETTINGS",
    is_flag=False,
    flag_value="",
    help="Train low-rank changes of the projections of replaced attentions on --data and merge "
    "them: rank=8,steps=200,learning_rate=0.002.",
)
@click.option(
    "--refit/--no-refit",
    default=True,
    show_default=True,
    help="With --budget: refit output projections where that helps on held-out data.",
)
@click.option("--overwrite", is_flag=True, help="Replace an artifact that is already there.")
@_require_sites
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
    default="none",
    show_default=True,
    help="Compile kernels into the artifact, for where it runs; needs subquad[kernels] and g++.",
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
@_seed
@_common
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
    refit: bool,
    overwrite: bool,
    require_sites: str | None,
    allow_declined: bool,
    strict_causal: bool,
    kernels: str,
    require_kernels: bool,
    targets: tuple[str, ...],
    tuning: bool,
    tuning_records: tuple[Path, ...],
    tuning_length: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Convert SOURCE into the artifact directory OUTPUT."""
    if budget and (force or plan):
        raise UsageError("--budget makes a plan; it goes neither with --force nor with --plan.")
    if targets and (budget or distil is not None):
        raise UsageError(
            "--target goes neither with --budget nor with --distil: make a plan with "
            "`subquad plan`, then convert with --plan and --target."
        )
    shared: dict[str, Any] = {
        "overwrite": overwrite,
        "require_sites": require_sites,
        "kernels": kernels,
        "require_kernels": require_kernels,
    }
    pipeline = _converter()
    from subquad.kernels.tuning.choose import TuningOptions

    shared["tuning"] = TuningOptions(tuning, tuning_records, tuning_length)
    with _working() as progress:
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
            )
            from subquad.converter.planning import convert_with_budget

            converted = convert_with_budget(
                source,
                output,
                request,
                work=work,
                distil=None if distil is None else _distil_settings(distil, seed),
                progress=progress,
                **shared,
            )
        elif distil is not None:
            converted = _distilling().convert_and_distil(
                source,
                output,
                _converter().Selection.of(
                    _merge_sites(force, sites),
                    None,
                    plan,
                    strict_causal=strict_causal,
                    allow_declined=allow_declined,
                ),
                _distilling().DistilRequest(
                    _distil_settings(distil, seed),
                    lengths=lengths,
                    data=data,
                    seed=seed,
                    threads=threads,
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
                progress=progress,
                **shared,
            )
    report = converted.to_json()
    if budget and report["planning"]["synthetic"]:
        click.secho(f"warning: {report['planning']['data']}", fg="yellow", err=True)
    if as_json:
        _print_json(report)
        return
    console = _console()
    _print_source(console, report)
    _print_sites(console, report["sites"], converted=True)
    _print_rejections(console, report["rejections"])
    if budget:
        _print_plan(console, report["planning"])
    if distil is not None:
        _print_distillation(console, report["distillation"])
    _print_gpu_kernels(console, report["sites"])
    seconds = sum(report["seconds"].values())
    peak = report.get("peak_rss_bytes")
    console.print(f"wrote {report['output']} in {seconds:.1f} s, peak memory {_size(peak)}")
    console.print(f"next: subquad validate {report['output']}", style="dim")


@cli.command(
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
@_planning
@_require_sites
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
@_seed
@_common
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

    if output is not None and not output.parent.is_dir():
        raise UsageError(f"Cannot write {output}: {output.parent} is no directory.")
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

    with _working() as progress, tempfile.TemporaryDirectory(prefix="subquad-plan-") as scratch:
        place = work or Path(scratch, "work")
        report = plan_source(
            source, request, work=place, require_sites=require_sites, progress=progress
        )
    if output is not None:
        output.write_text(report.plan.dumps(), "utf-8")
    if report.synthetic:
        click.secho(f"warning: {report.data}", fg="yellow", err=True)
    if as_json:
        _print_json(report.to_json())
        return
    console = _console()
    _print_plan(console, report.to_json())
    if output is not None:
        console.print(f"wrote {output}; next: subquad convert {source} OUT --plan {output}")


@cli.command(
    epilog="""\b
Examples:
  subquad tune out                        the attentions of an artifact
  subquad tune out --lengths 512,4096 --time 1800
  subquad tune --shapes Attention:num_heads=12,head_dim=64,window_right=0,length=4096
  subquad tune out --rpc tracker:9190 --key arm-board --target x86-64-v3
  subquad tune --merge mine.jsonl --merge theirs.jsonl --records all.jsonl

\b
A shape is OPERATOR:NAME=VALUE,... with the fields of the operator, and batch,
length and queries. `subquad convert --kernels cpu` uses what was found.
"""
)
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option("--shapes", multiple=True, metavar="SPEC", help="A shape to tune; may repeat.")
@click.option("--lengths", type=_IntList(), help="Of an artifact [default: its longest, <= 4096].")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Candidates per shape, at most.",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds for all shapes together; kept.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a call [default: cores].")
@click.option(
    "--target", metavar="NAME", help="Instruction set [default: the best of this machine]."
)
@click.option(
    "--engine",
    type=click.Choice(["templates", "metaschedule"]),
    default="templates",
    show_default=True,
    help="What is searched: parameters of our templates, or schedules by TVM's MetaSchedule.",
)
@click.option("--rpc", metavar="HOST:PORT", help="Measure on the servers of this TVM RPC tracker.")
@click.option("--key", help="Of the servers to use; needs --rpc.")
@click.option(
    "--records",
    type=click.Path(path_type=Path),
    help="File to add records to [default: the one that `subquad convert` reads].",
)
@click.option(
    "--merge",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Only write the records of these files into --records, each once; may repeat.",
)
@click.option("--best-only", is_flag=True, help="Merge only the confirmed best of each shape.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@_common
def tune(
    artifact: Path | None,
    shapes: tuple[str, ...],
    lengths: tuple[int, ...] | None,
    batch: int,
    trials: int,
    seconds: float,
    threads: int | None,
    target: str | None,
    engine: str,
    rpc: str | None,
    key: str | None,
    records: Path | None,
    merge: tuple[Path, ...],
    best_only: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Search faster parameters for the kernels of ARTIFACT or of SHAPES, and keep records."""
    tuning = _tuning()
    path = records or tuning.user_records()
    if merge:
        if artifact is not None or shapes:
            raise UsageError("--merge tunes nothing: drop the artifact and --shapes.")
        count = tuning.merge_records(merge, path, best_only=best_only)
        click.echo(f"wrote {count} records to {path}", err=True)
        return
    wanted = [tuning.parse_shape(text, tuning.OPERATORS) for text in shapes]
    if artifact is not None:
        wanted += tuning.shapes_of_artifact(artifact, batch=batch, lengths=lengths)
    if (rpc is None) != (key is None):
        raise UsageError("--rpc and --key need each other.")
    if rpc is not None and target is None:
        raise UsageError("--rpc needs --target: the other machines may have other processors.")
    try:
        with _working() as progress:
            report = tuning.tune(
                wanted,
                path,
                target=tuning.find_target(target),
                engine=engine,
                rpc=None if rpc is None or key is None else (rpc, key),
                trials=trials,
                seconds=seconds,
                threads=threads,
                seed=seed,
                progress=progress,
            )
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was measured is in {path}", err=True)
        click.get_current_context().exit(INTERRUPTED)
    if as_json:
        from subquad.runtime.jsonable import json_ready

        _print_json(json_ready(report))
    else:
        _print_tuning(report)


@cli.command(
    epilog="""\b
Examples:
  subquad validate out
  subquad validate out --data heldout.txt --budget ppl=1% --budget kl=0.02
  subquad validate out --data inputs.npz --budget cosine=0.999
  subquad validate out --lengths 512,2048 --paddings none,left

\b
Data: .txt (one text, or paragraphs for encoders), .jsonl with {"text": ...}
lines, or .npz with one array per input. Without data, inputs are made up.
"""
)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Held-out inputs; see below.")
@click.option("--lengths", type=_IntList(), help="Sequence lengths [default: a few up to 512].")
@click.option(
    "--paddings", type=_NameList(), help="Of none, right, left, holes [default: all four]."
)
@click.option("--rows", type=click.IntRange(min=1), help="Rows per length and padding.")
@click.option(
    "--budget",
    multiple=True,
    metavar="NAME=VALUE",
    help="Limit on kl, ppl, top1, cosine or rel; repeat or separate by commas.",
)
@click.option(
    "--metamorphic/--no-metamorphic",
    default=True,
    show_default=True,
    help="Test that padding, later tokens and other rows change nothing.",
)
@click.option(
    "--attention/--no-attention",
    default=True,
    show_default=True,
    help="Compare every attention, not only the outputs.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of made-up inputs.")
@_execution
@_common
def validate(
    artifact: Path,
    data: Path | None,
    lengths: tuple[int, ...] | None,
    paddings: tuple[str, ...] | None,
    rows: int | None,
    budget: tuple[str, ...],
    metamorphic: bool,
    attention: bool,
    seed: int,
    provider: str,
    threads: int | None,
    kernels: KernelMode,
    as_json: bool,
) -> None:
    """Compare an artifact with its unconverted reference; exit 4 if it misses the budget."""
    from subquad.runtime.budget import Budget
    from subquad.runtime.samples import PADDINGS
    from subquad.runtime.validate import validate as run_validation

    with _working() as progress:
        result = run_validation(
            artifact,
            data=data,
            lengths=lengths,
            paddings=PADDINGS if paddings is None else paddings,
            rows=rows,
            budget=Budget.parse(budget),
            metamorphic=metamorphic,
            sites=attention,
            seed=seed,
            provider=provider,
            threads=threads,
            kernels=kernels,
            progress=progress,
        )
    if result.synthetic:
        click.secho(f"warning: {result.data}", fg="yellow", err=True)
    if as_json:
        _print_json(result.to_json())
    else:
        _print_validation(result)
    if result.verdict == "fail":
        _fail(click.get_current_context(), "; ".join(result.reasons), 4)


@cli.command(
    epilog="""\b
Examples:
  subquad bench out --lengths 512,2048,8192
  subquad bench out --batch 8 --threads 4 --time-limit 120
  subquad bench --costs out               what every method costs at out's attentions, here
  subquad bench --costs --shapes 9/3/64 --lengths 1024,4096,8192 --output costs.json
"""
)
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option(
    "--costs",
    is_flag=True,
    help="Measure the cost table of this machine instead: time and memory of every operator.",
)
@click.option(
    "--shapes",
    type=_NameList(),
    metavar="HEADS/KV/DIM,...",
    help="Of --costs without an artifact [default: 12/12/64].",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of --costs [default: that of this machine, which grows].",
)
@click.option("--lengths", type=_IntList(), help="Sequence lengths [default: 128,512,2048].")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Per length."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds for all timings together; rounds that do not fit are left out, and said.",
)
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure peak memory.")
@click.option("--unchecked", is_flag=True, help="Skip the quick validation before.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@_execution
@_common
def bench(
    artifact: Path | None,
    costs: bool,
    shapes: tuple[str, ...] | None,
    output: Path | None,
    lengths: tuple[int, ...] | None,
    batch: int,
    rounds: int,
    time_limit: float,
    memory: bool,
    unchecked: bool,
    seed: int,
    provider: str,
    threads: int | None,
    kernels: KernelMode,
    as_json: bool,
) -> None:
    """Time an artifact against its unconverted reference, in turns with a matrix product."""
    if costs:
        if provider.lower() != "cpu":
            raise UsageError(f"--costs measures on the CPU only, not on {provider}.")
        _bench_costs(artifact, shapes, output, lengths, batch, rounds, time_limit, threads, as_json)
        return
    if artifact is None or shapes is not None or output is not None:
        raise UsageError("bench needs an ARTIFACT; --shapes and --output belong to --costs.")
    from subquad.runtime.bench import bench as run_bench

    with _working() as progress:
        result = run_bench(
            artifact,
            lengths=lengths,
            batch=batch,
            rounds=rounds,
            time_limit=time_limit,
            memory=memory,
            checked=not unchecked,
            seed=seed,
            provider=provider,
            threads=threads,
            kernels=kernels,
            progress=progress,
        )
    if as_json:
        _print_json(result.to_json())
    else:
        _print_bench(result)


def _bench_costs(
    artifact: Path | None,
    shapes: tuple[str, ...] | None,
    output: Path | None,
    lengths: tuple[int, ...] | None,
    batch: int,
    rounds: int,
    time_limit: float,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure costs and add them to the table they belong to."""
    from subquad.passes import cost_measurement as measuring
    from subquad.passes.costs import CostTable, default_path
    from subquad.runtime.jsonable import json_ready
    from subquad.runtime.machine import usable_cores

    if artifact is not None and shapes is not None:
        raise UsageError("--shapes are those of the ARTIFACT; give one of the two.")
    if artifact is not None:
        sites = measuring.sites_of(artifact)
    else:
        sites = [site for text in shapes or ("12/12/64",) for site in measuring.example_sites(text)]
    plan = measuring.CostPlan(
        tuple(variant for site in sites for variant in measuring.candidates_of(site)),
        lengths=lengths or measuring.LENGTHS,
        batches=(batch,),
        threads=(threads,) if threads else tuple(sorted({1, usable_cores()})),
        rounds=rounds,
        seconds=time_limit,
    )
    path = output or default_path()
    known = CostTable.load(path) if path.exists() else None
    with _working() as progress:
        measured = measuring.measure_costs(plan, progress)
    table = measured if known is None else known.merge(measured)
    table.save(path)
    if as_json:
        _print_json(json_ready({"path": path, "hash": table.hash, "table": table}))
        return
    _print_costs(measured)
    _console().print(f"wrote {path}", markup=False, highlight=False)


@cli.command(
    epilog="""\b
Examples:
  subquad run out --text "The capital of France is"
  subquad run out --input inputs.npz --output outputs.npz
"""
)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--input", "input_", type=click.Path(path_type=Path), help=".npz, array per input.")
@click.option("--text", multiple=True, help="Text, by the artifact's tokenizer; may repeat.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the outputs as .npz.")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Tokens.")
@_execution
@_common
def run(
    artifact: Path,
    input_: Path | None,
    text: tuple[str, ...],
    output: Path | None,
    top: int,
    provider: str,
    threads: int | None,
    kernels: KernelMode,
    as_json: bool,
) -> None:
    """Run an artifact once, on arrays or on text."""
    from subquad.runtime.run import run as run_once

    with _working() as progress:
        result = run_once(
            artifact,
            arrays=input_,
            texts=text,
            output=output,
            top=top,
            provider=provider,
            threads=threads,
            kernels=kernels,
            progress=progress,
        )
    if as_json:
        _print_json(result.to_json())
        return
    console = _console()
    for item in result.summaries:
        console.print(item.describe(), markup=False, highlight=False)
    if output is not None:
        console.print(f"wrote {output}", markup=False)


@cli.command(
    epilog="""\b
Examples:
  subquad doctor
  subquad doctor --require cuda           exit 6 if CUDA does not work
"""
)
@click.option(
    "--require", multiple=True, metavar="NAME", help="Exit 6 unless this works; may repeat."
)
@_common
def doctor(require: tuple[str, ...], as_json: bool) -> None:
    """Report what this machine can do, what is missing, and how to get it."""
    from subquad.runtime.doctor import examine

    with redirect_stdout(sys.stderr):
        report = examine()
    missing = report.missing(require)
    if as_json:
        _print_json(report.to_json())
    else:
        _print_doctor(report)
    if missing:
        _fail(click.get_current_context(), "; ".join(missing), 6)


def main() -> None:
    """Entry point; SIGTERM ends a command the way Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cli(prog_name="subquad")


def _fail(ctx: click.Context, message: str, code: int) -> None:
    line = " ".join(message.split())
    click.echo(f"error: {line}", err=True)
    ctx.exit(code)


def _is_artifact(source: str) -> bool:
    return (Path(source) / "manifest.json").is_file()


def _converter() -> Any:
    """The conversion pipeline; says which extra is missing."""
    try:
        from subquad.converter import pipeline
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "subquad":
            raise
        raise UsageError(
            f"Reading a model needs {error.name}, which is not installed: "
            "pip install 'subquad[convert]'."
        ) from error
    return pipeline


def _tuning() -> Any:
    """The tuner; says which extra is missing."""
    try:
        from subquad.kernels.tuning import tune
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "subquad":
            raise
        raise UsageError(
            f"Tuning needs {error.name}, which is not installed: "
            "pip install 'subquad[cpu,convert,kernels]'."
        ) from error
    return tune


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


@contextmanager
def _working() -> Iterator[Progress]:
    """A progress callback that shows on stderr; what libraries print goes there as well."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    with redirect_stdout(sys.stderr):
        if not console.is_terminal:
            yield _progress_lines()
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
        )
        # redirect_stdout=False: the line above already has, and to the same place.
        with Bars(*columns, console=console, transient=True, redirect_stdout=False) as bars:
            task = bars.add_task("starting", total=None)

            def show(message: str, share: float | None) -> None:
                total = None if share is None else 1.0
                bars.update(task, description=message, completed=share or 0.0, total=total)

            yield show


def _progress_lines() -> Progress:
    """For logs: a line per message."""

    def show(message: str, share: float | None) -> None:
        percent = "" if share is None else f" ({share:.0%})"
        click.echo(f"{message}{percent}", err=True)

    return show


def _console() -> Console:
    from rich.console import Console

    return Console()


def _print_json(value: Mapping[str, Any]) -> None:
    from subquad.runtime.jsonable import json_ready

    click.echo(json.dumps(json_ready(value), indent=1, sort_keys=True, allow_nan=False))


def _table(*columns: str, title: str | None = None) -> Table:
    """A plain table; columns whose name starts with ``>`` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        # Folded, not cut: a name that ends in dots cannot be passed to --sites.
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    return table


def _add(table: Table, *cells: object) -> None:
    from rich.text import Text

    # Text: names may hold brackets, which rich would read as markup.
    table.add_row(*(Text(str(cell)) for cell in cells))


def _print_source(console: Console, report: Mapping[str, Any]) -> None:
    source = report["source"]
    line = f"{source.get('name', '?')} ({source.get('kind', '?')})"
    console.print(line, style="bold", markup=False, highlight=False)


def _print_sites(
    console: Console, records: Sequence[Mapping[str, Any]], *, converted: bool
) -> None:
    if not records:
        console.print("no attention found")
        return
    columns = [">#", "attention", "heads", ">dim", "mask"]
    table = _table(*columns, *(("method", "runs as") if converted else ()))
    for record in records:
        site = record["site"]
        heads = str(site.get("num_heads", "?"))
        if site.get("num_kv_heads", site.get("num_heads")) != site.get("num_heads"):
            heads += f"/{site['num_kv_heads']}"
        cells = [
            site["index"],
            site["name"],
            heads,
            site.get("head_dim", "?"),
            site.get("mask_text", ""),
        ]
        if converted:
            params = ",".join(f"{key}={_value(v)}" for key, v in record["params"].items())
            method = f"{record['method']}:{params}" if params else record["method"]
            cells += [method, record["kernel"] or "function body"]
        _add(table, *cells)
    console.print(table)
    coarse = {record.get("causal_granularity", 1) for record in records} - {1}
    for block in sorted(coarse):
        line = f"causal only between blocks of {block} tokens; --strict-causal forbids it"
        console.print(line, markup=False, highlight=False)
    if converted:
        _print_tuned_sites(console, records)
    for record in records:
        if record["reason"]:
            line = f"{record['site']['name']}: {record['reason']}"
            console.print(line, markup=False, highlight=False)


def _print_proofs(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """How the semantics of the sites were established; sites with equal proofs together."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        site = record["site"]
        lines = [site.get("proof", {}).get("mask", "")]
        lines += [
            f"added to the scores: {bias['kind']}, along {bias['axes']}; no mask: {bias['reason']}"
            for bias in site.get("biases", ())
        ]
        groups.setdefault("; ".join(line for line in lines if line), []).append(site)
    for text, sites in groups.items():
        if not text:
            continue
        proofs = [site["proof"] for site in sites]
        numbers = ",".join(str(site["index"]) for site in sites)
        line = (
            f"proof of {numbers}: {text} "
            f"({min(p['mask_probes'] for p in proofs)} masks and "
            f"{min(p['node_probes'] for p in proofs)} inputs probed each, "
            f"largest error {max(p['max_error'] for p in proofs):.1e})"
        )
        console.print(line, markup=False, highlight=False)


def _print_distillation(console: Console, result: Mapping[str, Any] | None) -> None:
    if result is None:
        console.print("distillation: every attention is exact, so there was nothing to train")
        return
    if not result["best_step"]:
        console.print("distillation: no step lowered the held-out loss, so nothing was changed")
        return
    console.print(
        f"distillation: held-out loss {result['loss_before']:.4g} -> {result['loss_after']:.4g}, "
        f"{len(result['changed'])} weights changed (step {result['best_step']})"
    )


def _value(value: Any) -> str:
    """A parameter as it is written: one for every head with slashes."""
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _print_tuned_sites(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """One line: where the parameters of the kernels come from."""
    counts: dict[str, int] = {}
    for record in records:
        for variant in record.get("variants", ()):
            for target, choice in variant["tuning"].items():
                line = f"{target} {choice['how']}"
                counts[line] = counts.get(line, 0) + 1
    if counts:
        text = ", ".join(f"{line}: {count}" for line, count in counts.items())
        console.print(f"kernel parameters: {text}", markup=False, highlight=False)


def _print_gpu_kernels(console: Console, sites: Sequence[Mapping[str, Any]]) -> None:
    for target in sites[0]["gpu_kernels"] if sites else ():
        texts = [site["gpu_kernels"][target] for site in sites]
        missing = [text for text in texts if text.startswith("no kernel")]
        console.print(
            f"{target}: {len(texts) - len(missing)} of {len(texts)} attentions have a kernel, "
            "which has not run on a GPU"
        )
        for text in dict.fromkeys(missing):
            console.print(f"  {text}", style="dim")


def _print_rejections(console: Console, rejections: Sequence[Mapping[str, str]]) -> None:
    if rejections:
        console.print("left alone:", style="bold")
    for item in rejections:
        where = item.get("where") or "?"
        console.print(f"  {where}: {item['reason']}", markup=False, highlight=False)


def _print_heads(console: Console, report: Mapping[str, Any]) -> None:
    """Statistics of the heads of every attention, as means over its heads."""
    table = _table(
        "attention", ">entropy", ">sinks", ">in 64", ">in 256", ">blocks 90%", ">95%", ">99%"
    )
    for name, item in report["statistics"].items():
        window, density = item["window_mass"], item["density"]
        shares = (
            item["entropy"],
            item["sink_mass"],
            *(window["64"], window["256"]),
            *(density["0.9"], density["0.95"], density["0.99"]),
        )
        _add(table, name, *(f"{sum(share) / len(share):.0%}" for share in shares))
    console.print(table)
    line = (
        "means over heads: entropy (100% = uniform), mass on the first 4 tokens and in windows, "
        f"blocks of 64 keys needed for 90, 95 and 99 % of the mass; {report['data']}"
    )
    console.print(line, markup=False, highlight=False)


def _print_plan(console: Console, report: Mapping[str, Any]) -> None:
    """The plan of a planning report, per site and as a whole."""
    found = report["plan"]
    table = _table("attention", "method", ">saved", ">error", ">damage", ">pays from")
    for site in found["sites"]:
        chosen = next((c for c in site["candidates"] if c["method"] == site["method"]), None)
        saved = 1 - site["price"] / site["exact_price"] if site["exact_price"] else 0.0
        _add(
            table,
            site["name"],
            site["method"],
            f"{saved:.0%}",
            _number(max(chosen["errors"].values()) if chosen else None),
            _number(chosen["predicted_damage"] if chosen else None),
            site.get("crossover_length") or "-",
        )
    console.print(table)
    for site in found["sites"]:
        if site["method"] == "dense":
            console.print(f"{site['name']}: {site['why']}", markup=False, highlight=False)
    prices, measured = found["prices"], found["measured"]
    console.print(
        f"saves {found['saving']:.1%} of the {prices['unit']} of all attentions at lengths "
        f"{', '.join(map(str, found['lengths']))} ({prices['source']})",
        markup=False,
        highlight=False,
    )
    errors = measured["standard_errors"]
    figures = ", ".join(
        f"{name} {value:.4g}" + (f" +- {errors[name]:.2g}" if name in errors else "")
        for name, value in measured["metrics"].items()
    )
    budget = ", ".join(found["budget"])
    console.print(f"held out: {figures}; budget {budget}", markup=False, highlight=False)
    for note in found["data"]["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
    seconds = sum(report["seconds"].values())
    console.print(
        f"data: {report['data']}; {found['runs']} plans run, {seconds:.1f} s, peak memory "
        f"{_size(report['peak_rss_bytes'])}",
        markup=False,
        highlight=False,
    )


def _print_validation(result: ValidationResult) -> None:
    console = _console()
    table = _table(
        ">length", "padding", ">rows", ">rel. L2", ">cosine", ">KL", ">top-1", ">ppl ratio"
    )
    for case in result.cases:
        outputs = case.outputs.values()
        logits = case.logits or {}
        _add(
            table,
            case.length or "-",
            case.padding,
            case.rows,
            _number(max(item["relative_l2"] for item in outputs)),
            _number(min(item["cosine_mean"] for item in outputs), "{:.6f}"),
            _number(logits.get("kl_mean")),
            _number(logits.get("top1_agreement"), "{:.2%}"),
            _number(logits.get("perplexity_ratio"), "{:.5g}"),
        )
    console.print(table)
    if result.sites:
        _print_site_errors(console, result)
    if result.metamorphic is not None:
        checks = result.metamorphic.checks
        text = ", ".join(f"{count} x {name}" for name, count in checks.items()) or "none"
        found = len(result.metamorphic.violations)
        console.print(f"hidden tokens: {text} checked, {found} violations", highlight=False)
        for name, reason in result.metamorphic.not_applicable.items():
            console.print(f"  {name} not tested: {reason}", highlight=False)
        for name, count in result.metamorphic.source_reacts.items():
            line = f"  {name}: in {count} checks the source model itself reacts; not counted"
            console.print(line, highlight=False)
    for item in result.skipped:
        line = f"length {item['length']} left out: {item['reason']}"
        console.print(line, markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    memory = _size(result.peak_rss_bytes)
    line = f"data: {result.data}; {result.seconds:.1f} s, peak memory {memory}"
    console.print(line, markup=False, highlight=False)
    words = {
        "pass": ("PASS", "bold green"),
        "fail": ("FAIL", "bold red"),
        "measured": ("MEASURED, no budget given", "bold yellow"),
    }
    console.print(words[result.verdict][0], style=words[result.verdict][1])


def _print_site_errors(console: Console, result: ValidationResult) -> None:
    table = _table(">#", "attention", "method", ">worst rel. L2", ">length", "padding", "note")
    for site in result.sites:
        _add(
            table,
            site.index,
            site.name,
            site.method,
            _number(site.relative_l2),
            site.length or "-",
            site.padding or "-",
            site.note,
        )
    console.print(table)
    first = result.first_diverging
    if first is not None:
        line = f"first diverging attention: {first.name} ({first.method}), {first.relative_l2:.3g}"
        console.print(line, markup=False, highlight=False)


def _print_bench(result: BenchResult) -> None:
    console = _console()
    table = _table(
        ">length", ">rounds", ">reference", ">artifact", ">speed-up", ">GEMM spread", ">memory"
    )
    for case in result.cases:
        memory = f"{_size(case.reference_peak_bytes)} -> {_size(case.artifact_peak_bytes)}"
        _add(
            table,
            case.length,
            f"{case.rounds_kept}/{case.rounds}",
            f"{case.reference_seconds * 1e3:.1f} ms",
            f"{case.artifact_seconds * 1e3:.1f} ms",
            f"{case.speedup:.2f}x",
            f"{case.gemm_spread:.0%}",
            memory,
        )
    console.print(table)
    for item in result.skipped:
        line = f"length {item['length']} left out: {item['reason']}"
        console.print(line, markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    machine = result.machine
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, ONNX Runtime "
        f"{result.versions['onnxruntime']}, GEMM {result.gemm_gflops:.0f} GFLOP/s",
        markup=False,
        highlight=False,
    )


def _print_costs(costs: CostTable) -> None:
    console = _console()
    places = sorted({(p.kv_len, p.query_len) for curve in costs.curves for p in curve.points})
    names = [f">{k}" if k == q else f">{q} of {k}" for k, q in places]
    table = _table("operator, ms by length", "as", ">threads", *names)
    for curve in costs.curves:
        times = {(p.kv_len, p.query_len): p.seconds for p in curve.points if p.density == 1.0}
        cells = [f"{times[place] * 1e3:.3g}" if place in times else "-" for place in places]
        _add(table, curve.title, curve.runs_as, curve.threads, *cells)
    console.print(table)
    for note in costs.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    steady = costs.settings["steady"]
    if steady < 0.85:
        line = f"note: the machine was busy: {1 - steady:.0%} of the matrix products were unsteady"
        console.print(line, markup=False, highlight=False)


def _print_tuning(report: TuneReport) -> None:
    console = _console()
    table = _table("kernel", ">length", ">trials", ">failed", ">time", ">quartiles", "parameters")
    for kernel in report.kernels:
        low, middle, high = kernel.ratios
        failed = kernel.trials.get("failed", 0) + kernel.trials.get("wrong", 0)
        params = ",".join(f"{name}={value}" for name, value in kernel.params.items())
        _add(
            table,
            f"{kernel.operator}:{kernel.variant}",
            kernel.workload.kv_len,
            sum(kernel.trials.values()),
            failed,
            f"{middle:.2f}x",
            f"{low:.2f}-{high:.2f}",
            params if kernel.how == "tuned" else f"defaults: {kernel.reason}",
        )
    console.print(table)
    console.print(
        f"{report.machine}, {report.target}, threads: {report.threads}; {report.seconds:.0f} s; "
        f"time is that of the default parameters; records: {report.records}",
        markup=False,
        highlight=False,
    )


def _print_doctor(report: DoctorReport) -> None:
    console = _console()
    table = _table("", "what", "found", "meaning")
    for check in report.checks:
        mark = "ok" if check.ok else ("!" if check.problem else "-")
        _add(table, mark, check.name, check.found, check.advice)
    console.print(table)


def _number(value: float | None, form: str = "{:.2e}") -> str:
    return "-" if value is None else form.format(value)


def _size(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:.0f} MiB"
