"""``tune``: parameters of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import click

from subquad.commands.frame import INTERRUPTED, load_tuner, print_json, progress_shown
from subquad.commands.options import IntList, common_options
from subquad.commands.tables import print_tuning
from subquad.runtime.errors import UsageError


@click.command(
    epilog="""\b
Examples:
  subquad tune out                        the attentions of an artifact
  subquad tune out --lengths 512,4096 --time 1800
  subquad tune --shapes Attention:num_heads=12,head_dim=64,window_right=0,length=4096
  subquad tune out --rpc tracker:9190 --key arm-board --target x86-64-v3
  subquad tune --merge mine.jsonl --merge theirs.jsonl --records all.jsonl

\b
A shape is OPERATOR:NAME=VALUE,... with the fields of the operator, and batch,
length and queries. `subquad convert` uses what was found.
"""
)
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option("--shapes", multiple=True, metavar="SPEC", help="A shape to tune; may repeat.")
@click.option("--lengths", type=IntList(), help="Of an artifact [default: its longest, <= 4096].")
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
@common_options
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
    tuning = load_tuner()
    path = records or tuning.user_records()
    if merge:
        if artifact is not None or shapes:
            raise UsageError("--merge tunes nothing: drop the artifact and --shapes.")
        count = tuning.merge_records(merge, path, best_only=best_only)
        click.echo(f"wrote {count} records to {path}", err=True)
        if as_json:
            print_json({"records": count, "path": path})
        return
    wanted = [tuning.parse_shape(text, tuning.OPERATORS) for text in shapes]
    if artifact is not None:
        wanted += tuning.shapes_of_artifact(artifact, batch=batch, lengths=lengths)
    if (rpc is None) != (key is None):
        raise UsageError("--rpc and --key need each other.")
    if rpc is not None and target is None:
        raise UsageError("--rpc needs --target: the other machines may have other processors.")
    try:
        with progress_shown() as progress:
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

        print_json(json_ready(report))
    else:
        print_tuning(report)
