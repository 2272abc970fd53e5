"""What every command stands in: progress, errors, packages that may be missing, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from subquad.runtime.errors import UsageError

if TYPE_CHECKING:
    pass

Progress = Callable[[str, float | None], None]


INTERRUPTED = 130


def fail(ctx: click.Context, message: str, code: int) -> None:
    line = " ".join(message.split())
    click.echo(f"error: {line}", err=True)
    ctx.exit(code)


def is_artifact(source: str) -> bool:
    return (Path(source) / "manifest.json").is_file()


def load_pipeline() -> Any:
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


def load_tuner() -> Any:
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


@contextmanager
def progress_shown() -> Iterator[Progress]:
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


def print_json(value: Mapping[str, Any]) -> None:
    from subquad.runtime.jsonable import json_ready

    click.echo(json.dumps(json_ready(value), indent=1, sort_keys=True, allow_nan=False))
