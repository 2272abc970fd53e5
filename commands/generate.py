"""``generate``: text from a language model that was converted with a cache."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from subquad.commands.frame import print_json, progress_shown
from subquad.commands.options import IntList, common_options, execution_options, seed_option
from subquad.commands.tables import open_console, size_text

if TYPE_CHECKING:
    from subquad.runtime.kernel_library import KernelMode


@click.command(
    epilog="""\b
Examples:
  subquad generate out --text "The capital of France is"
  subquad generate out --text "Once" --text "Twice" --max-new-tokens 20
  subquad generate out --text "Once" --temperature 0.8 --top-p 0.95 --seed 1
  subquad generate out --ids 1,320,17 --json
  subquad generate whisper --input features.npz
"""
)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--text", multiple=True, help="Prompt; several are one batch.")
@click.option("--ids", multiple=True, type=IntList(), help="Prompt as token numbers.")
@click.option(
    "--input",
    "input_",
    type=click.Path(path_type=Path),
    help="Of an encoder-decoder: .npz with the inputs of the encoder.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Per row."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token; else tokens are drawn.",
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Draw among so many tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    help="Draw among the likeliest tokens of this probability together.",
)
@click.option("--ignore-end", is_flag=True, help="Go on after a token that ends the text.")
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Tokens of the prompt per run.",
)
@execution_options
@seed_option
@common_options
def generate(
    artifact: Path,
    text: tuple[str, ...],
    ids: tuple[tuple[int, ...], ...],
    input_: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    ignore_end: bool,
    prefill_chunk: int,
    provider: str,
    threads: int | None,
    kernels: KernelMode,
    seed: int,
    as_json: bool,
) -> None:
    """Continue prompts, token by token."""
    from subquad.runtime.generate import generate as generate_text
    from subquad.runtime.sampling import Sampling

    streaming = len(text) == 1 and not as_json
    stdout = sys.stdout

    shown = False

    def show(piece: str) -> None:
        nonlocal shown
        # The prompt with the first piece: before it, anything may still be refused.
        stdout.write(piece if shown else text[0] + piece)
        stdout.flush()
        shown = True

    with nullcontext() if streaming else progress_shown() as progress:
        result = generate_text(
            artifact,
            texts=text,
            ids=ids,
            arrays=input_,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            ends=() if ignore_end else None,
            prefill_chunk=prefill_chunk,
            provider=provider,
            threads=threads,
            kernels=kernels,
            on_text=show if streaming else None,
            progress=progress,
        )
    if as_json:
        print_json(result.to_json())
        return
    console = open_console()
    if streaming:
        show("\n")
    for row, continuation in enumerate(result.rows):
        if streaming:
            break
        words = ",".join(map(str, continuation.ids))
        if continuation.text is not None:
            words = (text[row] if text else "") + continuation.text
        console.print(words, markup=False, highlight=False)
    step = "no step" if result.step_seconds is None else f"{result.step_seconds * 1e3:.1f} ms/step"
    click.echo(
        f"prompt {result.prefill_seconds:.2f} s, {step}, cache {size_text(result.cache_bytes)}",
        err=True,
    )
