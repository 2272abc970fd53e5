"""``validate`` and ``bench``: accuracy and time of an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from subquad.commands.frame import fail, print_json, progress_shown
from subquad.commands.options import IntList, NameList, common_options, execution_options
from subquad.commands.tables import open_console, print_bench, print_costs, print_validation
from subquad.runtime.errors import UsageError

if TYPE_CHECKING:
    from subquad.runtime.kernel_library import KernelMode


@click.command(
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
@click.option("--lengths", type=IntList(), help="Sequence lengths [default: a few up to 512].")
@click.option(
    "--paddings", type=NameList(), help="Of none, right, left, holes [default: all four]."
)
@click.option("--rows", type=click.IntRange(min=1), help="Rows per length and padding.")
@click.option(
    "--budget",
    multiple=True,
    metavar="NAME=VALUE",
    help="Limit on kl, ppl, top1, cosine, rel or recall; repeat or separate by commas.",
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
@execution_options
@common_options
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

    with progress_shown() as progress:
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
        print_json(result.to_json())
    else:
        print_validation(result)
    if result.verdict == "fail":
        fail(click.get_current_context(), "; ".join(result.reasons), 4)


@click.command(
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
    type=NameList(),
    metavar="HEADS/KV/DIM,...",
    help="Of --costs without an artifact [default: 12/12/64].",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of --costs [default: that of this machine, which grows].",
)
@click.option("--lengths", type=IntList(), help="Sequence lengths [default: 128,512,2048].")
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
@execution_options
@common_options
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

    with progress_shown() as progress:
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
        print_json(result.to_json())
    else:
        print_bench(result)


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
    with progress_shown() as progress:
        measured = measuring.measure_costs(plan, progress)
    table = measured if known is None else known.merge(measured)
    table.save(path)
    if as_json:
        print_json(json_ready({"path": path, "hash": table.hash, "table": table}))
        return
    print_costs(measured)
    open_console().print(f"wrote {path}", markup=False, highlight=False)
