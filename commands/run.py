"""``run`` and ``doctor``: using an artifact, and the machine it runs on."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from subquad.commands.frame import fail, print_json, progress_shown
from subquad.commands.options import common_options, execution_options
from subquad.commands.tables import open_console, print_doctor

if TYPE_CHECKING:
    from subquad.runtime.kernel_library import KernelMode


@click.command(
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
@execution_options
@common_options
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

    with progress_shown() as progress:
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
        print_json(result.to_json())
        return
    console = open_console()
    for item in result.summaries:
        console.print(item.describe(), markup=False, highlight=False)
    if output is not None:
        console.print(f"wrote {output}", markup=False)


@click.command(
    epilog="""\b
Examples:
  subquad doctor
  subquad doctor --require cuda           exit 6 if CUDA does not work
"""
)
@click.option(
    "--require", multiple=True, metavar="NAME", help="Exit 6 unless this works; may repeat."
)
@common_options
def doctor(require: tuple[str, ...], as_json: bool) -> None:
    """Report what this machine can do, what is missing, and how to get it."""
    from subquad.runtime.doctor import examine

    with redirect_stdout(sys.stderr):
        report = examine()
    missing = report.missing(require)
    if as_json:
        print_json(report.to_json())
    else:
        print_doctor(report)
    if missing:
        fail(click.get_current_context(), "; ".join(missing), 6)
