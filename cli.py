"""The ``subquad`` command: the group of all commands, and what becomes of errors."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

import click

from subquad import __version__
from subquad.commands.convert import convert, inspect, plan
from subquad.commands.frame import INTERRUPTED, fail
from subquad.commands.generate import generate
from subquad.commands.measure import bench, validate
from subquad.commands.methods import methods
from subquad.commands.run import doctor, run
from subquad.commands.tune import tune
from subquad.runtime.errors import SubquadError


class _Commands(click.Group):
    """Turns errors into one line on stderr and the documented exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SubquadError as error:
            fail(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was written", err=True)
            ctx.exit(INTERRUPTED)
        except MemoryError:
            fail(ctx, "out of memory. Use shorter --lengths or a machine with more memory.", 3)


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


COMMANDS = (inspect, convert, plan, tune, validate, bench, run, generate, doctor, methods)

for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Entry point; SIGTERM ends a command the way Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cli(prog_name="subquad")
